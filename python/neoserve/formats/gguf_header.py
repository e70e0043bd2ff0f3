"""The header of one GGUF file: magic, version, metadata, and where each tensor lies."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from neoserve.formats.gguf_blocks import BLOCK_TYPES, UNSUPPORTED_TYPES, BlockType
from neoserve.formats.gguf_cursor import DAMAGED, Cursor, map_file, shown
from neoserve.formats.gguf_metadata import GGUFMetadata, read_metadata
from neoserve.formats.gguf_tensor import GGUFTensor
from neoserve.types.errors import CheckpointError, UnsupportedModelError

_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32
# By number of dimensions: the dimensions, the type, the offset.
_INFO_LAYOUTS = {count: struct.Struct(f"<{count}QIQ") for count in range(1, _MAX_DIMENSIONS + 1)}


@dataclass(frozen=True, slots=True)
class Header:
    """One opened file; ``tensors`` are in the order of the file, ``data_start`` is where tensor data begins."""

    path: Path
    buffer: mmap.mmap
    version: int
    alignment: int
    metadata: GGUFMetadata
    tensors: list[GGUFTensor]
    data_start: int


@dataclass(frozen=True, slots=True)
class _TensorInfo:
    name: str
    shape: tuple[int, ...]
    block_type: BlockType
    offset: int
    nbytes: int


def read_header(path: Path) -> Header:
    """Map ``path`` and read its header. Raises CheckpointError (see GGUFFile.open)."""
    buffer = map_file(path)
    cursor = Cursor(str(path), buffer)
    _read_magic(cursor)
    version = _read_version(cursor)
    tensor_count = cursor.u64("the tensor count")
    key_count = cursor.u64("the key count")
    metadata = read_metadata(cursor, key_count)
    alignment = _alignment(cursor, metadata)
    infos = _read_infos(cursor, tensor_count)
    data_start = -(-cursor.position // alignment) * alignment
    _check_layout(cursor, infos, alignment, data_start)
    tensors = [
        GGUFTensor(info.name, info.shape, cursor.file, info.block_type, buffer, data_start + info.offset, info.nbytes)
        for info in infos
    ]
    return Header(path, buffer, version, alignment, metadata, tensors, data_start)


def _read_magic(cursor: Cursor) -> None:
    found = cursor.buffer[:4]
    if found == b"GGUF":
        cursor.position = 4
        return
    if cursor.buffer[:24] == b"version https://git-lfs.":
        cursor.fail("this is a Git LFS pointer, not the model itself: run git lfs pull, or download the file")
    if b"GGUF".startswith(found):
        cursor.fail(f"the file has only {cursor.end} bytes; {DAMAGED}")
    cursor.fail(f"the file begins with {ascii(found)[1:]}, expected 'GGUF': it is not a GGUF file, or damaged")


def _read_version(cursor: Cursor) -> int:
    version = cursor.u32("the version")
    if version in _VERSIONS:
        return version
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    if swapped in _VERSIONS:
        problem = "the file is big-endian; only little-endian files are supported: convert it with gguf-convert-endian"
        raise UnsupportedModelError(f"{cursor.file}: {problem}")
    raise UnsupportedModelError(
        f"{cursor.file}: GGUF version {version}; supported: 2 and 3: convert the model again with a recent tool"
    )


def _alignment(cursor: Cursor, metadata: GGUFMetadata) -> int:
    if "general.alignment" in metadata and metadata.type_name("general.alignment") != "uint32":
        found = metadata.type_name("general.alignment")
        cursor.fail(f"key 'general.alignment': expected uint32, found {found}; {DAMAGED}")
    alignment = metadata.get_int("general.alignment", _DEFAULT_ALIGNMENT)
    if alignment < 8 or alignment & (alignment - 1):
        cursor.fail(f"key 'general.alignment' is {alignment}; expected a power of two of at least 8; {DAMAGED}")
    return alignment


def _read_infos(cursor: Cursor, count: int) -> list[_TensorInfo]:
    smallest = 8 + 1 + 4 + 8 + 4 + 8
    if count > cursor.left // smallest:
        cursor.fail(f"the header announces {count} tensors, found {cursor.left} bytes left; {DAMAGED}")
    infos: dict[str, _TensorInfo] = {}
    for index in range(count):
        info = _read_info(cursor, f"tensor {index} of {count}")
        if info.name in infos:
            cursor.fail(f"tensor {shown(info.name)} occurs twice; expected once; {DAMAGED}")
        infos[info.name] = info
    return list(infos.values())


def _read_info(cursor: Cursor, what: str) -> _TensorInfo:
    name = cursor.name(f"the name of {what}")
    what = f"tensor {shown(name)}"
    dimensions = cursor.u32(what)
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        cursor.fail(f"{what} has {dimensions} dimensions; expected 1 to {_MAX_DIMENSIONS}; {DAMAGED}")
    layout = _INFO_LAYOUTS[dimensions]
    *extents, number, offset = layout.unpack_from(cursor.buffer, cursor.take(layout.size, what))
    shape = tuple(reversed(extents))
    block_type = _block_type(cursor, what, number)
    if 0 in shape:
        cursor.fail(f"{what} has shape {shape}; expected dimensions of at least 1; {DAMAGED}")
    if shape[-1] % block_type.size:
        kind = f"a multiple of {block_type.size} for {block_type.name}"
        cursor.fail(f"{what} has rows of {shape[-1]} values; expected {kind}; {DAMAGED}")
    nbytes = block_type.nbytes
    for extent in (*shape[:-1], shape[-1] // block_type.size):
        nbytes *= extent
    if nbytes > cursor.end:
        found = f"the file has {cursor.end}"
        cursor.fail(f"{what} of shape {shape}, {block_type.name} needs {nbytes} bytes, {found}; {DAMAGED}")
    return _TensorInfo(name, shape, block_type, offset, nbytes)


def _block_type(cursor: Cursor, what: str, number: int) -> BlockType:
    block_type = BLOCK_TYPES.get(number)
    if block_type is not None:
        return block_type
    loadable = ", ".join(known.name for known in BLOCK_TYPES.values())
    if number in UNSUPPORTED_TYPES:
        name, instead = UNSUPPORTED_TYPES[number]
        problem = f"{what} is of type {name}, which is not supported: use a {instead} file of this model"
        raise UnsupportedModelError(f"{cursor.file}: {problem} (loadable types: {loadable})")
    raise CheckpointError(
        f"{cursor.file}: {what} is of unknown type {number}; expected one of {loadable}: "
        "the file is damaged, or newer than this version; use a Q4_K_M or Q8_0 file of this model"
    )


def _check_layout(cursor: Cursor, infos: list[_TensorInfo], alignment: int, data_start: int) -> None:
    """Every tensor must be aligned, inside the file, and apart from every other."""
    end, owner = 0, ""
    for info in sorted(infos, key=lambda info: info.offset):
        what = f"tensor {shown(info.name)}"
        if info.offset % alignment:
            cursor.fail(f"{what} is at offset {info.offset}; expected a multiple of {alignment}; {DAMAGED}")
        if info.offset < end:
            other = f"tensor {shown(owner)}, which ends at {end}"
            cursor.fail(f"{what} at offset {info.offset} overlaps {other}; {DAMAGED}")
        end, owner = info.offset + info.nbytes, info.name
        if data_start + end > cursor.end:
            span = f"bytes {data_start + info.offset} to {data_start + end}"
            cursor.fail(f"{what} takes {span}, but the file has {cursor.end}; {DAMAGED}")
