"""Own lazy reader of safetensors files: a JSON header over one memory-mapped block of tensor bytes.

The whole header is checked before any tensor is touched, so that a cut, padded or overlapping file is refused at
opening. Nothing is read beyond the rows that are asked for.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, cast

import ml_dtypes
import numpy as np
import numpy.typing as npt

from neoserve.types.errors import CheckpointError, UnsupportedModelError
from neoserve.types.tensors import BF16, F32, TensorRows, WeightFormat

MAX_HEADER_BYTES: Final = 100_000_000
MAX_RANK: Final = 8

# Bits of one element; what is not in _READABLE is known but not read.
_BITS: Final[Mapping[str, int]] = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
_READABLE: Final[Mapping[str, np.dtype[np.generic]]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(slots=True)
class SafetensorsTensor:
    """One tensor of a safetensors file; implements ``types.tensors.CheckpointTensor``.

    ``storage_type`` is the header's dtype. ``offset`` counts from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    file: str
    storage_type: str
    nbytes: int
    offset: int
    _data: mmap.mmap = field(repr=False)

    def native_format(self) -> WeightFormat:
        """bf16 for BF16, f32 for F32 and F16. Raises UnsupportedModelError for any other dtype."""
        self._dtype()
        return BF16 if self.storage_type == "BF16" else F32

    def read_rows(self, start: int, stop: int, fmt: WeightFormat) -> TensorRows:
        """Rows [start, stop) as [stop - start, K]; a one-dimensional tensor is one row of its values.

        In the stored dtype this is a read-only view of the file; otherwise a converted copy of these rows alone.
        F16 widens exactly; f32 and f16 round to nearest even for bf16.
        """
        if not 0 <= start <= stop <= self._rows:
            raise ValueError(f"{self.name}: rows [{start}, {stop}) of a tensor with {self._rows} rows")
        values = self._elements(start, stop)
        match fmt.kind:
            case "f32":
                return TensorRows(fmt, values.astype(np.float32, copy=False))
            case "bf16" if self.storage_type == "BF16":
                return TensorRows(fmt, values)
            case "bf16":
                return TensorRows(fmt, values.astype(np.float32, copy=False).astype(ml_dtypes.bfloat16))
        raise ValueError(f"{self.name}: a {self.storage_type} tensor cannot be read as {fmt}; use f32 or bf16")

    def read_f32(self) -> npt.NDArray[np.float32]:
        """The whole tensor as float32, in its own shape. Raises CheckpointError if a norm or bias is not finite."""
        values = self._elements(0, self._rows).astype(np.float32).reshape(self.shape)
        if values.ndim == 1 and not np.isfinite(values).all():
            at = int(np.flatnonzero(~np.isfinite(values))[0])
            raise CheckpointError(
                f"{self.file}: tensor {self.name!r}: value {at} is {values[at]}, expected a finite number; "
                "fetch the file again"
            )
        return values

    def sample(self, size: int) -> bytes:
        """Up to ``size`` bytes from the start, the middle and the end each: what the content digest is made of."""
        size = min(size, self.nbytes)
        spare = self.nbytes - size
        starts = (self.offset, self.offset + spare // 2, self.offset + spare)
        return b"".join(self._data[start : start + size] for start in starts)

    @property
    def _rows(self) -> int:
        return math.prod(self.shape[:-1])

    def _dtype(self) -> np.dtype[np.generic]:
        dtype = _READABLE.get(self.storage_type)
        if dtype is None:
            raise UnsupportedModelError(
                f"{self.file}: tensor {self.name!r} has dtype {self.storage_type}, which is not supported; "
                f"supported: {', '.join(sorted(_READABLE))}; use a checkpoint in one of them"
            )
        return dtype

    def _elements(self, start: int, stop: int) -> npt.NDArray[np.generic]:
        dtype = self._dtype()
        columns = self.shape[-1] if self.shape else 1
        first = self.offset + start * columns * dtype.itemsize
        flat = np.frombuffer(self._data, dtype, (stop - start) * columns, first)
        # Some writers do not pad the header; their tensors then lie at odd addresses and are copied row by row.
        return np.require(flat, requirements="A").reshape(stop - start, columns)


class SafetensorsFile:
    """An opened file: ``tensors`` by name, ``metadata`` (the header's free strings), ``header_bytes`` for digests.

    Raises CheckpointError naming the file (and tensor), what was expected and what was found.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path.name
        try:
            with open(path, "rb") as stream:
                self.size = stream.seek(0, 2)
                if self.size < 8:
                    raise self._fault(f"has {self.size} bytes; a safetensors file has at least 8. Fetch it again")
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{path.name}: cannot be opened: {error.strerror}") from None
        try:
            self.header_bytes = self._header_bytes()
            self.metadata: dict[str, str] = {}
            self.tensors: dict[str, SafetensorsTensor] = {}
            self._read_header()
        except BaseException:
            self.close()
            raise

    def release_pages(self) -> None:
        """Lets the kernel take back the pages read so far; they are read again when needed."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Unmaps the file; where views of it are still alive, when the last of them goes."""
        with contextlib.suppress(BufferError):
            self._map.close()

    def _fault(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.file}: {text}")

    def _header_bytes(self) -> bytes:
        (length,) = struct.unpack("<Q", self._map[:8])
        if length > MAX_HEADER_BYTES:
            raise self._fault(f"header length is {length} bytes; at most {MAX_HEADER_BYTES}. Is it a safetensors file?")
        if length > self.size - 8:
            raise self._fault(f"header length is {length} bytes, but only {self.size - 8} follow. Fetch it again")
        return self._map[8 : 8 + length]

    def _read_header(self) -> None:
        try:
            header = json.loads(self.header_bytes.decode("utf-8"), object_pairs_hook=self._unique)
        except (ValueError, RecursionError) as error:
            raise self._fault(f"the header is not valid JSON ({error}). Fetch it again") from None
        if not isinstance(header, dict):
            raise self._fault(f"the header is a JSON {type(header).__name__}; it must be an object")
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise self._fault("__metadata__ must be an object of strings")
        self.metadata = metadata
        data_start = 8 + len(self.header_bytes)
        position = 0
        for name, entry, begin, end in sorted(self._entries(header), key=lambda item: (item[2], item[3])):
            if begin != position:
                problem = "an overlap" if begin < position else "a hole"
                raise self._fault(f"tensor {name!r} starts at byte {begin} of the data, expected {position}: {problem}")
            position = end
            shape, dtype = tuple(cast("list[int]", entry["shape"])), cast(str, entry["dtype"])
            self.tensors[name] = SafetensorsTensor(
                name, shape, self.file, dtype, end - begin, data_start + begin, self._map
            )
        found = self.size - data_start
        if position != found:
            last = max(self.tensors.values(), key=lambda tensor: tensor.offset, default=None)
            where = f" up to tensor {last.name!r}" if last else ""
            raise self._fault(
                f"the header describes {position} bytes of data{where}, found {found}: the file is "
                f"{'cut off' if found < position else 'longer than it should be'}. Fetch it again"
            )

    def _unique(self, pairs: list[tuple[str, object]]) -> dict[str, object]:
        table = dict(pairs)
        if len(table) != len(pairs):
            seen: set[str] = set()
            name = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise self._fault(f"the header has {name!r} twice")
        return table

    def _entries(self, header: Mapping[str, object]) -> list[tuple[str, Mapping[str, object], int, int]]:
        return [(name, *self._entry(name, entry)) for name, entry in header.items()]

    def _entry(self, name: str, entry: object) -> tuple[Mapping[str, object], int, int]:
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise self._fault(f"tensor {name!r}: the header entry must have exactly dtype, shape and data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        bits = _BITS.get(dtype) if isinstance(dtype, str) else None
        if bits is None:
            raise self._fault(f"tensor {name!r} has unknown dtype {dtype!r}; known: {', '.join(_BITS)}")
        if not _naturals(shape) or len(shape) > MAX_RANK:
            raise self._fault(f"tensor {name!r} has shape {shape!r}; it must list at most {MAX_RANK} sizes >= 0")
        if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise self._fault(f"tensor {name!r} has data_offsets {offsets!r}; it must be [begin, end], begin <= end")
        begin, end = offsets
        # Python integers do not overflow: a shape of absurd sizes simply disagrees with the bytes.
        expected_bits = math.prod(shape) * bits
        if expected_bits != (end - begin) * 8:
            raise self._fault(
                f"tensor {name!r} of dtype {dtype} and shape {shape} needs {expected_bits // 8} bytes, "
                f"its data_offsets hold {end - begin}"
            )
        return entry, begin, end


def _naturals(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
