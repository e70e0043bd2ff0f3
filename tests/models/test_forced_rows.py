"""Whole models with every feature set of this build that the CPU has: the bits of the portable reference rows."""

from __future__ import annotations

import numpy as np
import pytest

from neoserve import _native
from neoserve.formats.checkpoint import open_checkpoint
from neoserve.program.executor import Checkpoint
from neoserve.program.native import NativeExecutor
from neoserve.types.errors import ConfigurationError

from .step_driver import StepDriver, assert_same_bits
from .tiny import CONTEXT, FORMATS, native, quantised, tiny_folder

IDS = np.random.default_rng(30).integers(0, 128, 290).tolist()
MODELS = ("llama", "llama-bias", "llama-d80", "qwen2", "gemma3")
COMBINATIONS = [(name, choice) for name in MODELS for choice in ("float32", "bfloat16", *FORMATS)]
COMBINATIONS += [("llama-odd", choice) for choice in ("float32", "bfloat16", "int8_channel")]


def _usable(folder: str) -> bool:
    try:
        _native.rows(folder)
    except ValueError:
        return False
    return True


USABLE = [folder for folder in _native.folders() if folder != "reference" and _usable(folder)]
LACKING = [folder for folder in _native.folders() if not _usable(folder)]
ROW_FOLDERS = {row: folder for _, row, folder, _, _ in _native.rows()}


def _checkpoint(name: str, choice: str) -> Checkpoint:
    return quantised(name, FORMATS[choice]) if choice in FORMATS else open_checkpoint(tiny_folder(name))


def _linear_rows(choice: str) -> str:
    """What the names of the rows must begin with that multiply by weights of this choice (B14)."""
    kind = {"float32": "f32", "bfloat16": "bf16"}.get(choice) or FORMATS[choice].kind
    return f"linear_{kind}_"


def _run(checkpoint: Checkpoint, choice: str, force: str) -> tuple[np.ndarray, set[str]]:
    """Logits [290, V], prefill and then decode, and the feature sets whose rows ran."""
    dtype = "auto" if choice in FORMATS else choice
    executor = native(checkpoint, dtype=dtype, kernel_force=force, context_length=CONTEXT)
    assert isinstance(executor, NativeExecutor)
    try:
        driver = StepDriver(executor)
        sequence = driver.add(IDS)
        driver.step((sequence, 270))
        while sequence.done < len(IDS):
            driver.step((sequence, 1))
        linear = {row for _, op, row in executor.rows() if op == "linear"}
        assert any(row.startswith(_linear_rows(choice)) for row in linear), f"{choice} was asked for, {linear} ran"
        return sequence.logits, {ROW_FOLDERS[row] for _, _, row in executor.rows() if row}
    finally:
        executor.close()


@pytest.mark.parametrize(("name", "choice"), COMBINATIONS)
def test_every_feature_set_gives_the_bits_of_the_reference(name: str, choice: str) -> None:
    checkpoint = _checkpoint(name, choice)
    wanted, ran = _run(checkpoint, choice, "reference")
    assert ran == {"reference"}
    for folder in USABLE:
        logits, ran = _run(checkpoint, choice, folder)
        assert folder in ran, f"{folder} was forced, but only rows of {sorted(ran)} ran"
        if "bf16" in folder and choice != "float32":
            # bf16 dot-product instructions round inside; they are exempt by contract, but not far off.
            assert np.abs(logits - wanted).max() < 0.05 * wanted.std(), folder
        else:
            assert_same_bits(logits, wanted, f"{name}, {choice}, {folder} against reference")


@pytest.mark.parametrize("folder", [*LACKING, "avx1024"])
def test_a_feature_set_that_is_not_there_is_refused(folder: str) -> None:
    with pytest.raises(ConfigurationError, match=folder):
        native(open_checkpoint(tiny_folder("llama")), kernel_force=folder, context_length=CONTEXT)
