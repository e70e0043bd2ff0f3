"""GGUF checkpoints, versions 2 and 3: opened in milliseconds, read lazily through a memory map.

Opening checks the whole header (every length, count, offset and shape against the size of the file) and locates
metadata and tensors; strings are decoded and weights converted only when they are asked for.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
from pathlib import Path

from neoserve.formats.gguf_cursor import DAMAGED, shown
from neoserve.formats.gguf_header import Header, read_header
from neoserve.formats.gguf_metadata import GGUFMetadata
from neoserve.formats.gguf_tensor import GGUFTensor, llama_row_order
from neoserve.types.errors import CheckpointError

__all__ = ["GGUFFile", "GGUFMetadata", "GGUFTensor", "llama_row_order"]

_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_SAMPLE = 1024
_HASH_CHUNK = 1 << 24


class GGUFFile:
    """An opened GGUF checkpoint of one or several files.

    ``metadata`` is that of the first file, ``tensors`` maps names to the tensors of all files in file order,
    ``paths`` are the files in order, ``version`` is the GGUF version of the first. The files stay mapped as long as
    this object, a tensor or an array read from one lives; nobody may shorten or overwrite them meanwhile (replacing
    a file by renaming another over it is safe). Reading is safe from several threads.
    """

    def __init__(self, headers: list[Header]) -> None:
        self._headers = headers
        self.paths: tuple[Path, ...] = tuple(header.path for header in headers)
        self.version = headers[0].version
        self.metadata: GGUFMetadata = headers[0].metadata
        self.tensors: dict[str, GGUFTensor] = {}
        for header in headers:
            for tensor in header.tensors:
                if tensor.name in self.tensors:
                    raise CheckpointError(
                        f"{tensor.file}: tensor {shown(tensor.name)} is also in {self.tensors[tensor.name].file}; "
                        "expected it once: these files are not parts of one model"
                    )
                self.tensors[tensor.name] = tensor

    @staticmethod
    def open(path: str | os.PathLike[str]) -> GGUFFile:
        """Open a checkpoint; for a split one, any of its files (NAME-00001-of-00003.gguf) opens them all.

        Raises CheckpointError, in one line that names the file and the key or tensor with what was expected and
        found, when the file is missing, damaged, cut short or inconsistent; UnsupportedModelError for a GGUF
        version, byte order or tensor type that is not supported.
        """
        paths = _split_paths(Path(path))
        headers = [read_header(part) for part in paths]
        _check_split(headers)
        return GGUFFile(headers)

    @property
    def nbytes(self) -> int:
        """Size of all tensors as stored, in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def content_digest(self, full: bool = False) -> str:
        """SHA-256 (hex) that identifies the checkpoint by content, whatever its name and place.

        Covers each file's header (metadata, names, types, offsets), its size, and of every tensor the first, middle
        and last 1024 stored bytes: milliseconds, and different for any two models that were trained or quantised
        differently. A change of single bytes elsewhere is not seen; ``full`` hashes every byte instead (seconds).
        """
        digest = hashlib.sha256(b"neoserve gguf full" if full else b"neoserve gguf sampled")
        for header in self._headers:
            size = len(header.buffer)
            digest.update(f"\n{size} {header.data_start}\n".encode())
            end = size if full else min(size, header.data_start)
            for start in range(0, end, _HASH_CHUNK):
                digest.update(header.buffer[start : min(start + _HASH_CHUNK, end)])
            for tensor in [] if full else header.tensors:
                digest.update(tensor.sample(_SAMPLE))
        return digest.hexdigest()

    def release_pages(self) -> None:
        """Take all file pages out of this process's resident memory; they are read again when needed."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for header in self._headers:
                header.buffer.madvise(mmap.MADV_DONTNEED)


def _split_paths(path: Path) -> list[Path]:
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    if count < 1 or not 1 <= int(match["number"]) <= count:
        raise CheckpointError(f"{path}: the name says part {match['number']} of {match['count']}; rename the file")
    paths = [path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    missing = [part for part in paths if not part.exists()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(
            f"{missing[0]}: this part of {count}{more} is missing; expected every part in one folder: download them"
        )
    return paths


def _check_split(headers: list[Header]) -> None:
    """``split.no``, ``split.count`` and ``split.tensors.count`` must agree with the files that were opened."""
    count = len(headers)
    if count == 1 and headers[0].metadata.get_int("split.count", 1) <= 1:
        return
    for number, header in enumerate(headers):
        expected = {"split.no": number, "split.count": count}
        if number == 0 or "split.tensors.count" in header.metadata:
            expected["split.tensors.count"] = sum(len(part.tensors) for part in headers)
        for key, value in expected.items():
            found = header.metadata.get_int(key)
            if found != value:
                raise CheckpointError(
                    f"{header.path}: key '{key}' is {found}, expected {value} for part {number + 1} of {count}: "
                    "give every part its original name (NAME-00001-of-00003.gguf) and download missing ones"
                )
        _check_same_metadata(headers[0].metadata, header.metadata)


def _check_same_metadata(first: GGUFMetadata, other: GGUFMetadata) -> None:
    """Later files may repeat keys of the first but say nothing else, as only the first file's keys are used."""
    for key in other:
        if key.startswith("split.") or key == "general.alignment":
            continue
        if key not in first or first.raw_value(key) != other.raw_value(key):
            raise CheckpointError(
                f"{other.file}: key {shown(key)} differs from the first part ({first.file}); expected the same value: "
                f"these files are not parts of one model, or {DAMAGED}"
            )
