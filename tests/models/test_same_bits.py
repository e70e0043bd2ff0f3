"""Every instruction set computes the same logits, bit for bit (design D6): digests written once, compared everywhere.

The emulated AArch64 CPUs and x86-64 machines run this against one golden file. The dot-product instructions for bf16
round in their own way and are exempt by name; the bf16 case uses the row without them.

NEOSERVE_WRITE_GOLDEN=1 rewrites the file, after a deliberate change of the op contract.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator

import numpy as np
import pytest

from neoserve import _native
from neoserve.formats.checkpoint import open_checkpoint

from .step_driver import StepDriver
from .tiny import CONTEXT, FORMATS, GOLDEN, native, quantised, tiny_folder

PATH = GOLDEN / "same_bits.json"
LENGTH = 270  # beyond the first attention partition
IDS = np.random.default_rng(4).integers(0, 128, LENGTH).tolist()
EXEMPT_FOLDERS = ("bf16", "avx512_bf16")

CASES = [("llama", "float32"), ("gemma3", "float32"), ("gemma3", "bfloat16"), ("gemma3", "int8_channel")]
CASES += [("llama", fmt) for fmt in FORMATS]


def bf16_row() -> str:
    """The preferred row of linear over bf16 weights on this CPU that keeps the contract's order."""
    lacking = {row for op, row, _, _, reason in _native.rows() if "lacks" in reason}
    for op, row, folder, _, _ in _native.rows():
        if op == "linear_bf16" and folder not in EXEMPT_FOLDERS and row not in lacking:
            return str(row)
    raise AssertionError("the reference row is missing")


def digest(name: str, fmt: str) -> str:
    """SHA-256 of the float32 logits [LENGTH, V] of a tiny model, prefilled in uneven chunks."""
    quantise = fmt in FORMATS
    checkpoint = quantised(name, FORMATS[fmt]) if quantise else open_checkpoint(tiny_folder(name))
    options: dict[str, object] = {"dtype": "auto" if quantise else fmt, "context_length": CONTEXT, "num_threads": 2}
    if fmt == "bfloat16":
        options["kernel_force"] = bf16_row()
    executor = native(checkpoint, **options)
    try:
        logits = StepDriver(executor).run(IDS, chunk=97).logits
    finally:
        executor.close()
    assert logits.shape[0] == LENGTH
    assert np.isfinite(logits).all()
    return hashlib.sha256(logits.astype("<f4").tobytes()).hexdigest()


@pytest.fixture(scope="module")
def golden() -> Iterator[dict[str, str]]:
    writing = os.environ.get("NEOSERVE_WRITE_GOLDEN") == "1"
    digests: dict[str, str] = {} if writing else json.loads(PATH.read_text(encoding="utf-8"))
    yield digests
    if writing:
        PATH.write_text(json.dumps(digests, indent=1, sort_keys=True) + "\n", encoding="utf-8")


@pytest.mark.parametrize(("name", "fmt"), CASES, ids=[f"{name}-{fmt}" for name, fmt in CASES])
def test_same_bits_everywhere(golden: dict[str, str], name: str, fmt: str) -> None:
    found = digest(name, fmt)
    if os.environ.get("NEOSERVE_WRITE_GOLDEN") == "1":
        golden[f"{name}-{fmt}"] = found
    assert found == golden[f"{name}-{fmt}"]


def test_digests_tell_cases_apart(golden: dict[str, str]) -> None:
    assert set(golden) == {f"{name}-{fmt}" for name, fmt in CASES}
    assert len(set(golden.values())) == len(golden)
