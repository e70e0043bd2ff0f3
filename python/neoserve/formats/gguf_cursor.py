"""Bounded reading of a mapped GGUF file: every read is checked against the end of the file first.

A length or count in a damaged file can be any 64-bit number. Nothing here allocates or moves by such a
number before it has been compared with the bytes that are really there.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from neoserve.types.errors import CheckpointError

DAMAGED = "the file is cut short or damaged: download or convert it again"

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

_MAX_SHOWN = 80
_SCAN_WINDOW = 1 << 18
_SCALAR_RUN = 256


def shown(name: str) -> str:
    """``name`` in quotes, on one line and cut to a readable length, for error messages."""
    text = name if len(name) <= _MAX_SHOWN else name[:_MAX_SHOWN] + "..."
    return ascii(text)


def map_file(path: Path) -> mmap.mmap:
    """Map the whole file read-only. Raises CheckpointError when it is missing, not a file, unreadable or empty.

    The mapping begins at offset 0, so that no page size (4, 16 or 64 KiB) has to divide an offset.
    """
    try:
        if path.exists() and not path.is_file():
            kind = "folder" if path.is_dir() else "special file"
            raise CheckpointError(f"{path}: expected a GGUF file, found a {kind}; name the file itself")
        with path.open("rb") as stream:
            if stream.seek(0, 2) == 0:
                raise CheckpointError(f"{path}: the file is empty (0 bytes); expected a GGUF file: download it again")
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; check the path") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{path}: the file cannot be mapped: {reason}; check path and permissions") from error


class Cursor:
    """A position in a mapped file. ``what`` in each method is how an error names the value being read."""

    __slots__ = ("buffer", "end", "file", "position")

    def __init__(self, file: str, buffer: mmap.mmap) -> None:
        self.file = file
        self.buffer = buffer
        self.position = 0
        self.end = len(buffer)

    @property
    def left(self) -> int:
        """Bytes between the position and the end of the file."""
        return self.end - self.position

    def fail(self, problem: str) -> NoReturn:
        """Raise CheckpointError naming the file."""
        raise CheckpointError(f"{self.file}: {problem}")

    def take(self, count: int, what: str) -> int:
        """Step over ``count`` bytes and return where they begin."""
        start = self.position
        if count > self.end - start:
            self.fail(f"{what} needs {count} bytes at offset {start}, found {self.end - start} left; {DAMAGED}")
        self.position = start + count
        return start

    def u32(self, what: str) -> int:
        """The next unsigned 32-bit integer."""
        value: int = _U32.unpack_from(self.buffer, self.take(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        """The next unsigned 64-bit integer."""
        value: int = _U64.unpack_from(self.buffer, self.take(8, what))[0]
        return value

    def name(self, what: str) -> str:
        """The next string, which must be non-empty UTF-8 (keys and tensor names)."""
        length = self.u64(f"the length of {what}")
        start = self.take(length, f"{what} (length {length})")
        if length == 0:
            self.fail(f"{what} is empty; expected a name; {DAMAGED}")
        try:
            return self.buffer[start : start + length].decode("utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8 text; {DAMAGED}")

    def string_starts(self, count: int, what: str) -> npt.NDArray[np.int64]:
        """Step over ``count`` strings.

        Returns ``count + 1`` file offsets: where each string's 8-byte length begins, then where the last string ends.
        """
        if count > self.left // 8:
            self.fail(f"{what} has {count} strings, found {self.left} bytes left, room for {self.left // 8}; {DAMAGED}")
        parts: list[npt.NDArray[np.int64]] = []
        found = 0
        while found < count:
            starts = self._scan_window(count - found)
            if len(starts) == 0:
                starts = self._walk(min(_SCALAR_RUN, count - found), found, what)
            parts.append(starts)
            found += len(starts)
        parts.append(np.array([self.position], np.int64))
        return np.concatenate(parts)

    def _scan_window(self, wanted: int) -> npt.NDArray[np.int64]:
        """Up to ``wanted`` string starts from the position on, found together instead of one after the other.

        The length of a string below 256 bytes is one byte followed by seven zeros, which text hardly ever contains.
        All places that look like this are collected, and those are kept that form an unbroken chain from the
        position: each must begin where the one before ends. So a place is kept only if the plain walk meets it too.
        An empty result means that the next few strings must be walked.
        """
        window = np.frombuffer(self.buffer, np.uint8, min(_SCAN_WINDOW, self.left), self.position)
        zero = window == 0
        pairs = zero[:-1] & zero[1:]
        fours = pairs[:-2] & pairs[2:]
        sevens = fours[:-3] & fours[3:]
        starts = np.flatnonzero(sevens[1:])[:wanted]
        if len(starts) == 0 or starts[0] != 0:
            return np.empty(0, np.int64)
        ends = starts + 8 + window[starts]
        broken = np.flatnonzero(ends[:-1] != starts[1:])
        kept = int(broken[0]) + 1 if len(broken) else len(starts)
        # A short chain costs a whole window; the walk is then cheaper. The last string may lie behind the file's end.
        if kept < min(wanted, _SCALAR_RUN // 8) or self.position + int(ends[kept - 1]) > self.end:
            return np.empty(0, np.int64)
        base = self.position
        self.position = base + int(ends[kept - 1])
        return starts[:kept] + base

    def _walk(self, count: int, first: int, what: str) -> npt.NDArray[np.int64]:
        """Starts of exactly ``count`` strings, read one by one; ``first`` is the index of the first in its array."""
        starts: list[int] = []
        position, end, buffer = self.position, self.end, self.buffer
        for index in range(count):
            starts.append(position)
            needed: int = 8 if end - position < 8 else 8 + _U64.unpack_from(buffer, position)[0]
            if needed > end - position:
                self.position = position
                self.take(needed, f"string {first + index} of {what}")
            position += needed
        self.position = position
        return np.array(starts, np.int64)
