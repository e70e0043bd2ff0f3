"""A tensor of a GGUF file, read in row blocks into canonical form."""

from __future__ import annotations

import mmap
from typing import NoReturn

import ml_dtypes
import numpy as np
import numpy.typing as npt

from neoserve.formats.gguf_blocks import BlockType, Decoded
from neoserve.formats.gguf_cursor import DAMAGED, shown
from neoserve.types.errors import CheckpointError
from neoserve.types.tensors import BF16, F32, TensorRows, WeightFormat

# read_f32 and conversions to float work on this many values at a time, to bound their temporary arrays.
_VALUES_AT_ONCE = 1 << 20

_FLOAT_TYPES: dict[str, np.dtype[np.generic]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}

RowOrder = npt.NDArray[np.int64]


def llama_row_order(num_heads: int, head_dim: int) -> RowOrder:
    """Undo the q/k row permutation that conversion to GGUF applies for the ``llama`` architecture.

    Conversion stores the rows of a head as pairs (i, i + head_dim / 2) side by side, for a rotary embedding of
    adjacent values; Hugging Face and NeoServe rotate halves. Returns int64 [num_heads * head_dim]: element r is
    the GGUF row that holds Hugging Face row r. For the k projection pass the number of KV heads.
    Raises ValueError when ``head_dim`` is odd or a number is below 1.
    """
    if num_heads < 1 or head_dim < 2 or head_dim % 2:
        raise ValueError(f"num_heads {num_heads} must be at least 1 and head_dim {head_dim} a positive even number")
    pairs = np.arange(num_heads * head_dim, dtype=np.int64).reshape(num_heads, head_dim // 2, 2)
    return pairs.swapaxes(1, 2).reshape(-1)


class GGUFTensor:
    """One tensor, lazily read; implements ``neoserve.types.tensors.CheckpointTensor``.

    ``shape`` is row-major: GGUF's dimensions reversed. Rows are counted over all leading dimensions, so an expert
    tensor (E, N, K) has E * N rows of K values; a one-dimensional tensor (N,) is one row of N values.
    ``nbytes`` is the size in the file, ``storage_type`` the GGUF type such as ``Q4_K``, ``file`` the path, and
    ``row_order`` (None or int64 [rows]) names for every row the stored row that it is read from; for a
    one-dimensional tensor it orders the values instead, which only F32, F16 and BF16 allow.
    """

    __slots__ = ("_buffer", "_offset", "_type", "file", "name", "nbytes", "row_order", "shape", "storage_type")

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        file: str,
        block_type: BlockType,
        buffer: mmap.mmap,
        offset: int,
        nbytes: int,
        row_order: RowOrder | None = None,
    ) -> None:
        self.name = name
        self.shape = shape
        self.file = file
        self.storage_type = block_type.name
        self.nbytes = nbytes
        self.row_order = row_order
        self._type = block_type
        self._buffer = buffer
        self._offset = offset

    def __repr__(self) -> str:
        return f"GGUFTensor({self.name!r}, shape={self.shape}, {self.storage_type})"

    @property
    def columns(self) -> int:
        """K: the number of values in a row."""
        return self.shape[-1]

    @property
    def rows(self) -> int:
        """The number of rows that ``read_rows`` counts."""
        rows = 1
        for extent in self.shape[:-1]:
            rows *= extent
        return rows

    def with_row_order(self, row_order: RowOrder) -> GGUFTensor:
        """The same tensor with its rows reordered: row r of the result is stored row ``row_order[r]``.

        Raises CheckpointError when ``row_order`` is not a permutation of this tensor's rows (values when
        one-dimensional), which means that head counts in the metadata and the tensor's shape disagree.
        """
        expected = self.rows if len(self.shape) > 1 else self.columns
        order = np.asarray(row_order, np.int64)
        if order.shape != (expected,) or not np.array_equal(np.sort(order), np.arange(expected)):
            self._fail(f"expected a row order over {expected} rows, found one over {order.size}; check the head counts")
        if len(self.shape) == 1 and self._type.size > 1:
            self._fail(f"values of a one-dimensional {self.storage_type} tensor cannot be reordered; use F32")
        return GGUFTensor(self.name, self.shape, self.file, self._type, self._buffer, self._offset, self.nbytes, order)

    def native_format(self) -> WeightFormat:
        """The canonical format that holds this tensor without loss (F16 maps to f32)."""
        return self._type.native

    def read_rows(self, start: int, stop: int, fmt: WeightFormat) -> TensorRows:
        """Rows [start, stop) in ``fmt``: the native format, f32 or bf16.

        f32 is exactly what the GGUF format defines; bf16 is that, rounded to nearest even. F32 and BF16 rows in
        their own format are read-only views of the file, everything else is newly allocated. Raises CheckpointError
        when a scale, or a value of a one-dimensional float tensor, is not finite (float matrices are not searched),
        ValueError for rows out of range or another format.
        """
        if not 0 <= start <= stop <= self.rows:
            raise ValueError(f"tensor {self.name!r}: rows [{start}, {stop}) are outside [0, {self.rows})")
        if fmt == F32:
            return TensorRows(F32, self._floats(start, stop))
        if fmt == BF16:
            return TensorRows(BF16, self._bfloats(start, stop))
        if fmt == self._type.native:
            return self._quantised(start, stop)
        raise ValueError(f"tensor {self.name!r} cannot be read as {fmt}; possible: {self._type.native}, f32, bf16")

    def read_f32(self) -> npt.NDArray[np.float32]:
        """The whole tensor as float32 in its own shape."""
        return self._floats(0, self.rows).reshape(self.shape)

    def sample(self, length: int) -> bytes:
        """``length`` bytes each from the beginning, the middle and the end of the stored data (all if shorter)."""
        if self.nbytes <= 3 * length:
            return self._buffer[self._offset : self._offset + self.nbytes]
        starts = (0, (self.nbytes - length) // 2, self.nbytes - length)
        return b"".join(self._buffer[self._offset + at : self._offset + at + length] for at in starts)

    def _fail(self, problem: str) -> NoReturn:
        raise CheckpointError(f"{self.file}: tensor {shown(self.name)}: {problem}")

    def _stored(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Stored bytes of rows [start, stop) as [rows, row bytes]: a view, or a copy when rows are reordered."""
        row_bytes = self.nbytes // self.rows
        if self.row_order is not None and len(self.shape) > 1:
            stored = np.frombuffer(self._buffer, np.uint8, self.nbytes, self._offset).reshape(self.rows, row_bytes)
            gathered: npt.NDArray[np.uint8] = stored[self.row_order[start:stop]]
            return gathered
        view = np.frombuffer(self._buffer, np.uint8, (stop - start) * row_bytes, self._offset + start * row_bytes)
        return view.reshape(stop - start, row_bytes)

    def _stored_floats(self, start: int, stop: int) -> npt.NDArray[np.generic]:
        """Rows of an F32, F16 or BF16 tensor in their stored type."""
        values = self._stored(start, stop).view(_FLOAT_TYPES[self.storage_type])
        if len(self.shape) > 1:
            return values
        # One-dimensional tensors are norms and biases: small enough to look at every value.
        if not np.isfinite(values).all():
            at = int(np.flatnonzero(~np.isfinite(values[0]))[0]) if values.size else 0
            self._fail(f"value {at} is {values[0, at]}, expected a finite number; {DAMAGED}")
        return values if self.row_order is None else values[:, self.row_order]

    def _decode(self, start: int, stop: int) -> Decoded:
        decode = self._type.decode
        assert decode is not None, "only block types are decoded"
        stored = self._stored(start, stop)
        blocks = stored.reshape(stop - start, self.columns // self._type.size, self._type.nbytes)
        self._check_scales(blocks, start)
        decoded = decode(blocks)
        self._release(start, stop)
        return decoded

    def _check_scales(self, blocks: npt.NDArray[np.uint8], first_row: int) -> None:
        for at in self._type.halves:
            # Exponent bits all set: infinity or NaN. They are the upper byte's bits 2 to 6.
            bad = (blocks[..., at + 1] & 0x7C) == 0x7C
            if bad.any():
                row, block = (int(index) for index in np.argwhere(bad)[0])
                value = blocks[row, block, at : at + 2].copy().view("<f2")[0]
                self._fail(
                    f"row {first_row + row}, block {block}: the scale or minimum is {value}, "
                    f"expected a finite number; {DAMAGED}"
                )

    def _quantised(self, start: int, stop: int) -> TensorRows:
        decoded = self._decode(start, stop)
        native = self._type.native
        groups = (stop - start, self.columns // native.group)
        zeros = np.full(groups, 8, np.uint8) if native.offset == "zero" else None
        minimums = None if decoded.minimums is None else decoded.minimums.reshape(groups)
        values = decoded.values.reshape(stop - start, self.columns)
        return TensorRows(native, values, decoded.scales.reshape(groups), minimums, zeros)

    def _dequantise(self, start: int, stop: int, out: npt.NDArray[np.float32]) -> None:
        decoded = self._decode(start, stop)
        groups = out.reshape(*decoded.scales.shape, self._type.native.group)
        groups[...] = decoded.values.reshape(groups.shape)
        if self._type.native.offset == "zero":
            groups -= 8
        groups *= decoded.scales[..., None].astype(np.float32)
        if decoded.minimums is not None:
            groups += decoded.minimums[..., None].astype(np.float32)

    def _floats(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        if self._type.decode is None:
            # A NaN stays a NaN; numpy would warn about converting one.
            with np.errstate(invalid="ignore"):
                return self._stored_floats(start, stop).astype(np.float32, copy=False)
        out = np.empty((stop - start, self.columns), np.float32)
        step = max(1, _VALUES_AT_ONCE // self.columns)
        for first in range(start, stop, step):
            last = min(first + step, stop)
            self._dequantise(first, last, out[first - start : last - start])
        return out

    def _bfloats(self, start: int, stop: int) -> npt.NDArray[np.generic]:
        if self.storage_type == "BF16":
            return self._stored_floats(start, stop)
        out = np.empty((stop - start, self.columns), ml_dtypes.bfloat16)
        step = max(1, _VALUES_AT_ONCE // self.columns)
        for first in range(start, stop, step):
            last = min(first + step, stop)
            with np.errstate(invalid="ignore"):
                out[first - start : last - start] = self._floats(first, last)
        return out

    def _release(self, start: int, stop: int) -> None:
        """Take the file pages of rows that were just decoded out of this process's resident memory.

        Without it a load holds the whole file beside the packed weights. The page cache keeps the pages, so reading
        the rows again costs no disk access. Only whole pages inside the rows are released; the page size is read at
        run time.
        """
        if self.row_order is not None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        row_bytes = self.nbytes // self.rows
        page = mmap.PAGESIZE
        first = -(-(self._offset + start * row_bytes) // page) * page
        last = (self._offset + stop * row_bytes) // page * page
        if last > first:
            self._buffer.madvise(mmap.MADV_DONTNEED, first, last - first)
