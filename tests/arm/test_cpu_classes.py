"""What an emulated AArch64 CPU offers, and which kernel rows are chosen on it.

tools/arm/test.sh runs this with NEOSERVE_EMULATED_CPU naming the model; elsewhere there is nothing to check.
"""

from __future__ import annotations

import os

import pytest

from neoserve import _native

CPU = os.environ.get("NEOSERVE_EMULATED_CPU", "")
pytestmark = pytest.mark.skipif(not CPU, reason="runs under an emulated AArch64 CPU: make test-arm")

V8_2 = ["neon", "fp16", "dotprod"]
MATRIX = [*V8_2, "i8mm", "bf16"]
FEATURES = {
    "cortex-a72": ["neon"],
    "neoverse-n1": V8_2,
    "neoverse-v1": [*MATRIX, "sve", "sve_i8mm", "sve_bf16"],
    "neoverse-n2": [*MATRIX, "sve", "sve2", "sve_i8mm", "sve_bf16"],
    "max,sve=off,sme=off": MATRIX,
}
SVE_BYTES = {"neoverse-v1": 32, "neoverse-n2": 16}
for _vectors in (1, 2, 4):
    FEATURES[f"max,sve-max-vq={_vectors}"] = FEATURES["neoverse-n2"]
    SVE_BYTES[f"max,sve-max-vq={_vectors}"] = 16 * _vectors

# Feature set whose row an op is to get: (without dot product, with it, with matrix multiplication and bf16).
INTEGER = ("neon", "dotprod", "i8mm")
OPS = {
    "linear_int8_channel": INTEGER,
    "linear_int8_group": INTEGER,
    "linear_int4_group": INTEGER,
    "linear_bf16": ("neon", "neon", "bf16"),
    "linear_f32": ("neon", "neon", "neon"),
    "attention_f32": ("neon", "neon", "neon"),
    "attention_bf16": ("neon", "neon", "neon"),
    "rms_norm": ("neon", "neon", "neon"),
    "quantize_int8": ("neon", "neon", "neon"),
}


def expected_folder(op: str) -> str:
    features = FEATURES[CPU]
    return OPS[op][2 if "i8mm" in features else 1 if "dotprod" in features else 0]


def test_features() -> None:
    assert _native.cpu_features() == FEATURES[CPU]
    assert _native.sve_vector_bytes() == SVE_BYTES.get(CPU, 0)


def test_build_holds_every_folder() -> None:
    assert _native.folders() == ["bf16", "i8mm", "dotprod", "neon", "reference"]


@pytest.mark.parametrize("op", sorted(OPS))
def test_chosen_row(op: str) -> None:
    chosen = [(row, folder) for name, row, folder, taken, _ in _native.rows() if name == op and taken]
    assert len(chosen) == 1
    assert chosen[0][1] == expected_folder(op)


def test_every_op_has_one_simd_row() -> None:
    taken: dict[str, str] = {}
    for op, _, folder, chosen, _ in _native.rows():
        if chosen:
            assert op not in taken
            taken[op] = folder
    assert set(taken) == {op for op, *_ in _native.rows()}
    assert "reference" not in taken.values()


def test_rejected_rows_say_what_the_cpu_lacks() -> None:
    lacking = {folder: reason for _, _, folder, _, reason in _native.rows() if "lacks" in reason}
    wanted = {folder for folder in ("dotprod", "i8mm", "bf16") if folder not in FEATURES[CPU]}
    assert set(lacking) == wanted
    for folder in wanted:
        assert folder in lacking[folder]


@pytest.mark.parametrize("folder", ["neon", "dotprod", "i8mm", "bf16"])
def test_force(folder: str) -> None:
    """A feature set that the CPU has is used wherever it has rows; one that it lacks is refused by name."""
    if folder not in FEATURES[CPU]:
        with pytest.raises(ValueError, match=f"CPU lacks .*{folder}"):
            _native.rows(folder)
        return
    order = _native.folders()
    chosen = [used for _, _, used, taken, _ in _native.rows(folder) if taken]
    assert folder in chosen
    assert all(order.index(used) >= order.index(folder) for used in chosen)
