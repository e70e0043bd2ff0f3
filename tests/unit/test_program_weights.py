"""Streaming weights: small blocks, whole coverage, and arrays that do not fit are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from neoserve.program.ir import Vector, Weight
from neoserve.program.weights import row_blocks, vector_values
from neoserve.types.errors import CheckpointError
from neoserve.types.tensors import F32, TensorRows, WeightFormat

from .program_fakes import FORMATS, INT4_MINIMUM, INT4_ZERO, INT8_CHANNEL, INT8_G32, FakeTensor, fake_tensor


def weight(fmt: WeightFormat, *parts: FakeTensor) -> tuple[Weight, dict[str, FakeTensor]]:
    names = tuple(part.name for part in parts)
    return Weight("w", names, sum(part.shape[0] for part in parts), 64, fmt), {part.name: part for part in parts}


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_blocks_cover_all_rows_once_in_order(fmt: WeightFormat) -> None:
    stacked, tensors = weight(fmt, fake_tensor("a", (48, 64), fmt), fake_tensor("b", (40, 64), fmt))
    blocks = list(row_blocks(stacked, tensors, block_bytes=16 * 64))
    starts = [start for start, _ in blocks]
    lengths = [len(rows.values) for _, rows in blocks]
    assert starts == [0, *np.cumsum(lengths)[:-1].tolist()]
    assert sum(lengths) == 88
    joined = np.concatenate([rows.values for _, rows in blocks])
    np.testing.assert_array_equal(joined, np.concatenate([tensors[name].rows.values for name in "ab"]))


def test_blocks_are_small_and_begin_at_packed_blocks() -> None:
    tensor = fake_tensor("a", (1000, 64), F32)
    stacked, tensors = weight(F32, tensor)
    list(row_blocks(stacked, tensors, block_bytes=100 * 64 * 4))
    assert all(start % 16 == 0 and stop - start <= 100 for start, stop in tensor.reads)
    assert len(tensor.reads) > 8


def damaged(fmt: WeightFormat, change: Callable[[TensorRows], TensorRows]) -> None:
    tensor = fake_tensor("layers.0.mlp.up", (32, 64), fmt)
    tensor.rows = change(tensor.rows)
    stacked, tensors = weight(fmt, tensor)
    list(row_blocks(stacked, tensors))


@pytest.mark.parametrize(
    ("fmt", "change", "message"),
    [
        (
            F32,
            lambda r: replace(r, values=r.values[:, :32]),
            r"values is float32 \(32, 32\), expected float32 \(32, 64\)",
        ),
        (F32, lambda r: replace(r, values=r.values.astype(np.float64)), "values is float64"),
        (INT8_CHANNEL, lambda r: replace(r, scales=None), r"scales is nothing, expected float32 \(32,\)"),
        (INT8_G32, lambda r: replace(r, scales=r.scales.astype(np.float32)), r"expected float16 \(32, 2\)"),
        (INT4_MINIMUM, lambda r: replace(r, minimums=None), "minimums is nothing"),
        (INT4_ZERO, lambda r: replace(r, zeros=r.zeros[:, :1]), r"zeros is uint8 \(32, 1\)"),
        (INT8_G32, lambda r: replace(r, scales=np.full_like(r.scales, np.nan)), "scales holds NaN or infinity"),
        (INT4_MINIMUM, lambda r: replace(r, minimums=np.full_like(r.minimums, np.inf)), "minimums holds NaN"),
        (INT8_G32, lambda r: replace(r, minimums=r.scales), "minimums are given, but format int8_g32_f16 has none"),
        (F32, lambda r: replace(r, scales=np.ones(32, np.float32)), "scales are given, but format f32 has none"),
    ],
)
def test_rows_that_do_not_fit_their_format(
    fmt: WeightFormat, change: Callable[[TensorRows], TensorRows], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as error:
        damaged(fmt, change)
    assert "memory: tensor layers.0.mlp.up rows [0, 32)" in str(error.value)


def test_missing_part() -> None:
    stacked, _ = weight(F32, fake_tensor("a", (16, 64)))
    with pytest.raises(CheckpointError, match="tensor a is missing"):
        list(row_blocks(stacked, {}))


def test_part_of_another_shape() -> None:
    stacked, _ = weight(F32, fake_tensor("a", (16, 64)))
    with pytest.raises(CheckpointError, match=r"tensor a has shape \(16, 32\), expected \(N, 64\)"):
        list(row_blocks(stacked, {"a": fake_tensor("a", (16, 32))}))
    with pytest.raises(CheckpointError, match="needs 16 rows, the checkpoint's tensors have 32"):
        list(row_blocks(stacked, {"a": fake_tensor("a", (32, 64))}))


class TestVectors:
    def test_parts_are_joined(self) -> None:
        tensors = {name: fake_tensor(name, (size,)) for name, size in (("a", 3), ("b", 5))}
        values = vector_values(Vector("v", ("a", "b"), 8), tensors)
        np.testing.assert_array_equal(values, np.concatenate([tensors["a"].read_f32(), tensors["b"].read_f32()]))

    def test_constants(self) -> None:
        values = vector_values(Vector("v", (), 2, (0.1, 0.25)), {})
        np.testing.assert_array_equal(values, np.array([0.1, 0.25], np.float32))

    def test_wrong_size(self) -> None:
        with pytest.raises(CheckpointError, match="vector v needs 4 values, the checkpoint has 3"):
            vector_values(Vector("v", ("a",), 4), {"a": fake_tensor("a", (3,))})

    def test_not_finite(self) -> None:
        tensor = fake_tensor("norm", (8,))
        np.asarray(tensor.rows.values)[5] = np.nan
        with pytest.raises(CheckpointError, match="tensor norm holds nan at 5"):
            vector_values(Vector("v", ("norm",), 8), {"norm": tensor})
