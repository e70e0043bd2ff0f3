"""--quantization at load gives the logits of a checkpoint that was quantised before, bit for bit, on both executors."""

from __future__ import annotations

import numpy as np
import pytest

from neoserve.formats.checkpoint import open_checkpoint
from neoserve.types.tensors import INT8_CHANNEL

from .step_driver import StepDriver, assert_same_bits
from .tiny import CONTEXT, native, quantised, reference, tiny_folder

IDS = np.random.default_rng(9).integers(0, 128, 150).tolist()


def logits(executor: object) -> np.ndarray:
    try:
        return StepDriver(executor).run(IDS, chunk=64).logits  # type: ignore[arg-type]
    finally:
        executor.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_int8_equals_a_quantised_checkpoint(name: str) -> None:
    checkpoint = open_checkpoint(tiny_folder(name))
    at_load = logits(native(checkpoint, dtype="auto", quantization="int8", context_length=CONTEXT))
    before = logits(native(quantised(name, INT8_CHANNEL), dtype="auto", context_length=CONTEXT))
    assert_same_bits(at_load, before, f"{name} int8")


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_native_is_near_the_numpy_executor(quantization: str) -> None:
    checkpoint = open_checkpoint(tiny_folder("llama"))
    options = {"dtype": "auto", "quantization": quantization, "context_length": CONTEXT}
    fast, exact = logits(native(checkpoint, **options)), logits(reference(checkpoint, **options))
    assert np.abs(fast - exact).max() < 2e-2 * np.abs(exact).max()


def test_bf16_equals_dtype_bfloat16() -> None:
    checkpoint = open_checkpoint(tiny_folder("llama"))
    assert_same_bits(
        logits(native(checkpoint, dtype="auto", quantization="bf16", context_length=CONTEXT)),
        logits(native(checkpoint, dtype="bfloat16", context_length=CONTEXT)),
        "bf16",
    )
