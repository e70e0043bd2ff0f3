"""Reads the parameters of a program from a checkpoint, in blocks of rows, so that memory stays near the packed size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt

from neoserve.program.ir import Vector, Weight
from neoserve.program.quantize import quantize_rows
from neoserve.types.errors import CheckpointError
from neoserve.types.tensors import BF16, F32, CheckpointTensor, TensorRows, WeightFormat

BLOCK_BYTES = 8 << 20
"""Canonical bytes of values read at once: large enough to stream, small beside any model."""

_VALUE_TYPES: dict[str, np.dtype[np.generic]] = {
    "f32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "int8_channel": np.dtype(np.int8),
    "int8_group": np.dtype(np.int8),
    "int4_group": np.dtype(np.uint8),
}


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows [start, stop) of one part of a stacked weight; they become rows from ``row`` on of the stack."""

    part: str
    tensor: CheckpointTensor
    start: int
    stop: int
    row: int


def row_ranges(
    weight: Weight, tensors: Mapping[str, CheckpointTensor], block_bytes: int = BLOCK_BYTES
) -> list[RowRange]:
    """``weight`` cut into ranges of about ``block_bytes`` of values, in order.

    Each starts at a multiple of 16 rows of the stack, a packed block, so that ranges may be packed concurrently.
    Raises CheckpointError naming the tensor when a part is missing or mis-shaped.
    """
    value_bytes = _VALUE_TYPES[weight.format.kind].itemsize
    block = max(16, block_bytes // (weight.k * value_bytes) // 16 * 16)
    ranges: list[RowRange] = []
    row = 0
    for part in weight.parts:
        tensor = _find(part, tensors)
        if len(tensor.shape) != 2 or tensor.shape[1] != weight.k:
            raise CheckpointError(f"{tensor.file}: tensor {part} has shape {tensor.shape}, expected (N, {weight.k})")
        n = tensor.shape[0]
        ranges += [RowRange(part, tensor, start, min(n, start + block), row + start) for start in range(0, n, block)]
        row += n
    if row != weight.n:
        raise CheckpointError(f"weight {weight.name} needs {weight.n} rows, the checkpoint's tensors have {row}")
    return ranges


def read_range(rows: RowRange, weight: Weight) -> TensorRows:
    """The canonical rows of a range, checked against the format of ``weight``; quantised here if not stored so.

    Raises CheckpointError naming tensor and rows when arrays do not fit the format, or scales are not finite.
    """
    where = f"{rows.tensor.file}: tensor {rows.part} rows [{rows.start}, {rows.stop})"
    if weight.format in (rows.tensor.native_format(), F32, BF16):
        found = rows.tensor.read_rows(rows.start, rows.stop, weight.format)
    else:
        values = rows.tensor.read_rows(rows.start, rows.stop, F32).values.astype(np.float32, copy=False)
        found = quantize_rows(values, weight.format, where)
    _check_rows(where, found, weight.format, rows.stop - rows.start, weight.k)
    return found


def row_blocks(
    weight: Weight, tensors: Mapping[str, CheckpointTensor], block_bytes: int = BLOCK_BYTES
) -> Iterator[tuple[int, TensorRows]]:
    """Yields (first row in the stacked weight, rows) over all parts of ``weight`` in order; errors as above."""
    for rows in row_ranges(weight, tensors, block_bytes):
        yield rows.row, read_range(rows, weight)


def vector_values(vector: Vector, tensors: Mapping[str, CheckpointTensor]) -> npt.NDArray[np.float32]:
    """The float32 values [vector.size], parts concatenated. Raises CheckpointError naming a bad part."""
    if vector.values is not None:
        values = np.asarray(vector.values, np.float32)
    else:
        values = np.concatenate([_vector_part(part, tensors) for part in vector.parts])
    if values.shape != (vector.size,):
        raise CheckpointError(f"vector {vector.name} needs {vector.size} values, the checkpoint has {values.size}")
    return values


def _vector_part(part: str, tensors: Mapping[str, CheckpointTensor]) -> npt.NDArray[np.float32]:
    tensor = _find(part, tensors)
    values = np.ascontiguousarray(tensor.read_f32(), np.float32).reshape(-1)
    if not np.isfinite(values).all():
        bad = int(np.flatnonzero(~np.isfinite(values))[0])
        raise CheckpointError(f"{tensor.file}: tensor {part} holds {values[bad]} at {bad}; the file is damaged")
    return values


def _find(part: str, tensors: Mapping[str, CheckpointTensor]) -> CheckpointTensor:
    tensor = tensors.get(part)
    if tensor is None:
        raise CheckpointError(f"tensor {part} is missing from the checkpoint; download it again")
    return tensor


def _check_rows(where: str, rows: TensorRows, fmt: WeightFormat, n: int, k: int) -> None:
    """Arrays must fit the format exactly: native packing trusts their shapes."""
    if rows.format != fmt:
        raise CheckpointError(f"{where}: read as {rows.format}, asked for {fmt}")
    _check_array(where, "values", rows.values, (n, k), _VALUE_TYPES[fmt.kind])
    shape = (n, k // fmt.group) if fmt.group else (n,)
    scale_type = np.dtype(np.float16 if fmt.scale_type == "f16" else np.float32)
    expected = {
        "scales": scale_type if fmt.kind not in ("f32", "bf16") else None,
        "minimums": scale_type if fmt.offset == "minimum" else None,
        "zeros": np.dtype(np.uint8) if fmt.offset == "zero" else None,
    }
    for what, dtype in expected.items():
        array = getattr(rows, what)
        if dtype is not None:
            _check_array(where, what, array, shape, dtype)
            _check_finite(where, what, array)
        elif array is not None:
            raise CheckpointError(f"{where}: {what} are given, but format {fmt} has none")


def _check_array(
    where: str,
    what: str,
    array: npt.NDArray[np.generic] | None,
    shape: tuple[int, ...],
    dtype: np.dtype[np.generic],
) -> None:
    if array is None or array.shape != shape or array.dtype != dtype:
        found = "nothing" if array is None else f"{array.dtype} {array.shape}"
        raise CheckpointError(f"{where}: {what} is {found}, expected {dtype} {shape}")


def _check_finite(where: str, what: str, array: npt.NDArray[np.generic] | None) -> None:
    if array is not None and not np.isfinite(array).all():
        raise CheckpointError(f"{where}: {what} holds NaN or infinity; the file is damaged, download it again")
