"""Every architecture and rope kind: the native program against what transformers computed for tiny random models."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from neoserve.formats.checkpoint import open_checkpoint

from .golden.cases import CASES, Case
from .step_driver import StepDriver
from .tiny import CONTEXT, FORMATS, expected, native, quantised, reference, tiny_folder

NAMES = [case.name for case in CASES]


def _relative_error(actual: npt.NDArray[np.float32], wanted: npt.NDArray[np.float32]) -> float:
    """Root mean square of the difference in units of the spread of the wanted logits."""
    return float(np.sqrt(np.mean((actual - wanted) ** 2)) / wanted.std())


@pytest.mark.parametrize("name", NAMES)
def test_float32_logits_equal_transformers(name: str) -> None:
    checkpoint = open_checkpoint(tiny_folder(name))
    ids, wanted = expected(name)
    executor = native(checkpoint, context_length=len(ids))
    try:
        logits = StepDriver(executor).run(ids).logits
    finally:
        executor.close()
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_one_token_at_a_time_equals_transformers(name: str) -> None:
    """Decode reads every key through the pages; a fault there can hide when the whole prompt is one step."""
    checkpoint = open_checkpoint(tiny_folder(name))
    ids, wanted = expected(name)
    executor = native(checkpoint, context_length=len(ids))
    try:
        logits = StepDriver(executor).run(ids, chunk=1).logits
    finally:
        executor.close()
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_stays_near_transformers(name: str) -> None:
    """Weights, activations and KV have 8 significant bits; the models are 2 or 3 layers deep."""
    checkpoint = open_checkpoint(tiny_folder(name))
    ids, wanted = expected(name)
    executor = native(checkpoint, dtype="bfloat16", context_length=len(ids))
    try:
        logits = StepDriver(executor).run(ids).logits
    finally:
        executor.close()
    assert 1e-5 < _relative_error(logits, wanted) < 0.03


@pytest.mark.parametrize("fmt", list(FORMATS))
@pytest.mark.parametrize("name", ["llama", "llama-bias", "qwen2", "gemma3"])
def test_quantised_logits_equal_the_reference(name: str, fmt: str) -> None:
    """Native against the numpy reference of the same quantised program; both round activations to int8.

    A last-bit difference in a float can turn a rounding the other way, so that a few activations differ by one
    quantum; a wrong scale, zero point, minimum, group or row order moves the logits by far more.
    """
    checkpoint = quantised(name, FORMATS[fmt])
    ids, _ = expected(name)
    executor, oracle = native(checkpoint, dtype="auto"), reference(checkpoint, dtype="auto")
    try:
        logits = StepDriver(executor).run(ids).logits
        wanted = StepDriver(oracle).run(ids).logits
    finally:
        executor.close()
    assert _relative_error(logits, wanted) < 0.02


@pytest.mark.parametrize("fmt", list(FORMATS))
def test_quantised_weights_are_near_their_dequantised_values(fmt: str) -> None:
    """Only activations are rounded on top: the same weights in float32 give nearly the same logits."""
    checkpoint = quantised("llama", FORMATS[fmt])
    ids, _ = expected("llama")
    executor, wide = native(checkpoint, dtype="auto"), native(checkpoint, dtype="float32")
    try:
        logits, wanted = StepDriver(executor).run(ids).logits, StepDriver(wide).run(ids).logits
    finally:
        executor.close()
        wide.close()
    assert 1e-5 < _relative_error(logits, wanted) < 0.05


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_generation_config_gives_all_end_ids(case: Case) -> None:
    declared: Sequence[int] = [case.eos] if isinstance(case.eos, int) else case.eos
    assert set(open_checkpoint(tiny_folder(case.name)).generation.eos_token_ids) >= set(declared)


def test_pages_of_a_finished_sequence_are_no_trace() -> None:
    """A new sequence in pages that another one filled gives the logits of a fresh executor (padding never read)."""
    checkpoint = open_checkpoint(tiny_folder("mistral"))
    ids, wanted = expected("mistral")
    executor = native(checkpoint, context_length=CONTEXT)
    try:
        driver = StepDriver(executor)
        driver.run(np.arange(CONTEXT) % 128)
        logits = driver.run(ids).logits
    finally:
        executor.close()
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-4)
