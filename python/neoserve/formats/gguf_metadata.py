"""Metadata of a GGUF file: typed access by key, decoded only when asked for.

A tokenizer's arrays hold hundreds of thousands of strings; opening a file notes where they are and no more.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NoReturn, TypeVar, overload

import numpy as np
import numpy.typing as npt

from neoserve.formats.gguf_cursor import DAMAGED, Cursor, shown
from neoserve.types.errors import CheckpointError

Scalar = int | float | bool | str
MetadataValue = Scalar | list[int] | list[float] | list[bool] | list[str]
T = TypeVar("T")

_MAX_KEY = 65535
_STRING = 8
_ARRAY = 9
_BOOL = 7

# Value type number -> (name in the GGUF specification, numpy type of one value).
_NUMBERS: dict[int, tuple[str, np.dtype[np.generic]]] = {
    0: ("uint8", np.dtype("<u1")),
    1: ("int8", np.dtype("<i1")),
    2: ("uint16", np.dtype("<u2")),
    3: ("int16", np.dtype("<i2")),
    4: ("uint32", np.dtype("<u4")),
    5: ("int32", np.dtype("<i4")),
    6: ("float32", np.dtype("<f4")),
    7: ("bool", np.dtype("<u1")),
    10: ("uint64", np.dtype("<u8")),
    11: ("int64", np.dtype("<i8")),
    12: ("float64", np.dtype("<f8")),
}
_INTEGERS = frozenset((0, 1, 2, 3, 4, 5, 10, 11))
_FLOATS = frozenset((6, 12))


class _Required:
    """Type of the mark for "no default": a missing key is then an error."""


_REQUIRED = _Required()


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one value lies: bytes [start, end) of the file.

    ``kind`` is the value type number, for arrays that of the items. ``count`` is the number of items, or -1 for
    a single value. ``starts`` are the offsets of an array of strings (see ``Cursor.string_starts``).
    """

    kind: int
    count: int
    start: int
    end: int
    starts: npt.NDArray[np.int64] | None = None

    @property
    def type_name(self) -> str:
        """For instance ``uint32`` or ``array of 32000 string``."""
        name = "string" if self.kind == _STRING else _NUMBERS[self.kind][0]
        return name if self.count < 0 else f"array of {self.count} {name}"


def _type_exists(kind: int) -> bool:
    return kind in _NUMBERS or kind in (_STRING, _ARRAY)


def _read_entry(cursor: Cursor, what: str) -> Entry:
    kind = cursor.u32(f"the type of {what}")
    count = -1
    if kind == _ARRAY:
        kind = cursor.u32(f"the item type of {what}")
        count = cursor.u64(f"the item count of {what}")
        if kind == _ARRAY:
            cursor.fail(f"{what} is an array of arrays (depth 2); only arrays of depth 1 are supported")
    if not _type_exists(kind):
        cursor.fail(f"{what} has value type {kind}; expected 0 to 12; {DAMAGED}")
    if kind != _STRING:
        itemsize = _NUMBERS[kind][1].itemsize
        start = cursor.take(itemsize * max(count, 1 if count < 0 else 0), what)
        return Entry(kind, count, start, cursor.position)
    if count < 0:
        length = cursor.u64(f"the length of {what}")
        start = cursor.take(length, f"{what} (string of length {length})")
        return Entry(kind, count, start, cursor.position)
    start = cursor.position
    starts = cursor.string_starts(count, what)
    return Entry(kind, count, start, cursor.position, starts)


def read_metadata(cursor: Cursor, count: int) -> GGUFMetadata:
    """Read ``count`` key-value pairs at the cursor; values are located and bounded, not decoded."""
    smallest = 8 + 1 + 4 + 1
    if count > cursor.left // smallest:
        cursor.fail(f"the header announces {count} keys, found {cursor.left} bytes left; {DAMAGED}")
    entries: dict[str, Entry] = {}
    for index in range(count):
        key = cursor.name(f"key {index} of {count}")
        if len(key) > _MAX_KEY:
            cursor.fail(f"key {index} ({shown(key)}) has length {len(key)}; expected at most {_MAX_KEY}; {DAMAGED}")
        if key in entries:
            cursor.fail(f"key {shown(key)} occurs twice; expected once; {DAMAGED}")
        entries[key] = _read_entry(cursor, f"key {shown(key)}")
    return GGUFMetadata(cursor.file, cursor.buffer, entries)


class GGUFMetadata(Mapping[str, MetadataValue]):
    """Read-only mapping of metadata keys to Python values.

    ``metadata[key]`` decodes on every access (arrays become lists) and raises KeyError as any mapping does.
    The typed getters are for code that knows what a key must hold: they raise CheckpointError, naming file, key,
    expected and found type, when the key is missing and no default is given, or when its type is another.
    Integer getters take any integer width and refuse bool and float; ``get_float`` takes both float widths.
    """

    def __init__(self, file: str, buffer: mmap.mmap, entries: dict[str, Entry]) -> None:
        self.file = file
        self._buffer = buffer
        self._entries = entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __getitem__(self, key: str) -> MetadataValue:
        entry = self._entries[key]
        return self._scalar(key, entry) if entry.count < 0 else self._list(key, entry)

    def type_name(self, key: str) -> str:
        """The stored type, such as ``uint32`` or ``array of 32000 string``; KeyError when the key is missing."""
        return self._entries[key].type_name

    def is_array(self, key: str) -> bool:
        """Whether the key holds an array; KeyError when the key is missing."""
        return self._entries[key].count >= 0

    def array_length(self, key: str) -> int:
        """Number of items of an array, without decoding it."""
        return self._array(key).count

    @overload
    def get_int(self, key: str) -> int: ...
    @overload
    def get_int(self, key: str, default: T) -> int | T: ...
    def get_int(self, key: str, default: object = _REQUIRED) -> object:
        """An integer of any width, or ``default`` when the key is missing."""
        return self._typed(key, _INTEGERS, "an integer", default)

    @overload
    def get_float(self, key: str) -> float: ...
    @overload
    def get_float(self, key: str, default: T) -> float | T: ...
    def get_float(self, key: str, default: object = _REQUIRED) -> object:
        """A finite float32 or float64, or ``default`` when the key is missing."""
        value = self._typed(key, _FLOATS, "a float", default)
        if key in self._entries and isinstance(value, float) and not math.isfinite(value):
            self._fail(key, f"expected a finite number, found {value}; {DAMAGED}")
        return value

    @overload
    def get_bool(self, key: str) -> bool: ...
    @overload
    def get_bool(self, key: str, default: T) -> bool | T: ...
    def get_bool(self, key: str, default: object = _REQUIRED) -> object:
        """A bool, or ``default`` when the key is missing."""
        return self._typed(key, frozenset((_BOOL,)), "a bool", default)

    @overload
    def get_str(self, key: str) -> str: ...
    @overload
    def get_str(self, key: str, default: T) -> str | T: ...
    def get_str(self, key: str, default: object = _REQUIRED) -> object:
        """A string, or ``default`` when the key is missing."""
        return self._typed(key, frozenset((_STRING,)), "a string", default)

    def get_array(self, key: str) -> list[int] | list[float] | list[bool] | list[str]:
        """The items of an array of any type as a new list."""
        return self._list(key, self._array(key))

    def get_strings(self, key: str) -> list[str]:
        """The items of an array of strings as a new list."""
        entry = self._array(key)
        if entry.kind != _STRING:
            self._fail(key, f"expected an array of string, found {entry.type_name}")
        return self._strings(key, entry)

    def get_numbers(self, key: str) -> npt.NDArray[np.generic]:
        """The items of an array of numbers as a new numpy array of the stored type, shape (count,)."""
        entry = self._array(key)
        if entry.kind in (_STRING, _BOOL):
            self._fail(key, f"expected an array of numbers, found {entry.type_name}")
        return self._numbers(entry)

    def raw_value(self, key: str) -> tuple[int, int, bytes]:
        """(value type, item count or -1, stored bytes): equal for equal values; KeyError when the key is missing."""
        entry = self._entries[key]
        return entry.kind, entry.count, self._buffer[entry.start : entry.end]

    def _fail(self, key: str, problem: str) -> NoReturn:
        raise CheckpointError(f"{self.file}: key {shown(key)}: {problem}")

    def _missing(self, key: str, expected: str) -> CheckpointError:
        return CheckpointError(
            f"{self.file}: key {shown(key)} is missing; expected {expected}: convert the model again with a recent tool"
        )

    def _typed(self, key: str, kinds: frozenset[int], expected: str, default: object) -> object:
        entry = self._entries.get(key)
        if entry is None:
            if default is _REQUIRED:
                raise self._missing(key, expected)
            return default
        if entry.count >= 0 or entry.kind not in kinds:
            self._fail(key, f"expected {expected}, found {entry.type_name}")
        return self._scalar(key, entry)

    def _array(self, key: str) -> Entry:
        entry = self._entries.get(key)
        if entry is None:
            raise self._missing(key, "an array")
        if entry.count < 0:
            self._fail(key, f"expected an array, found {entry.type_name}")
        return entry

    def _scalar(self, key: str, entry: Entry) -> Scalar:
        if entry.kind == _STRING:
            try:
                return self._buffer[entry.start : entry.end].decode("utf-8")
            except UnicodeDecodeError as error:
                self._fail(key, f"expected UTF-8 text, found {error.reason} at byte {error.start}; {DAMAGED}")
        dtype = _NUMBERS[entry.kind][1]
        value: int | float = np.frombuffer(self._buffer, dtype, 1, entry.start)[0].item()
        return self._bools(key, [value])[0] if entry.kind == _BOOL else value

    def _list(self, key: str, entry: Entry) -> list[int] | list[float] | list[bool] | list[str]:
        if entry.kind == _STRING:
            return self._strings(key, entry)
        values: list[int] = self._numbers(entry).tolist()
        return self._bools(key, values) if entry.kind == _BOOL else values

    def _numbers(self, entry: Entry) -> npt.NDArray[np.generic]:
        # The file does not align metadata, so the items are copied into an aligned array.
        return np.frombuffer(self._buffer, _NUMBERS[entry.kind][1], entry.count, entry.start).copy()

    def _bools(self, key: str, values: list[int] | list[int | float]) -> list[bool]:
        for value in values:
            if value not in (0, 1):
                self._fail(key, f"expected a bool stored as 0 or 1, found {value}; {DAMAGED}")
        return [value == 1 for value in values]

    def _strings(self, key: str, entry: Entry) -> list[str]:
        assert entry.starts is not None, "an array of strings has its offsets"
        data = self._buffer[entry.start : entry.end]
        bounds = (entry.starts - entry.start).tolist()
        items: list[str] = []
        try:
            # A list comprehension in one go: this runs over every token and merge of a vocabulary.
            items = [data[start + 8 : stop].decode("utf-8") for start, stop in pairwise(bounds)]
        except UnicodeDecodeError:
            self._fail(key, f"item {self._first_bad(data, bounds)}: expected UTF-8 text; {DAMAGED}")
        return items

    @staticmethod
    def _first_bad(data: bytes, bounds: list[int]) -> int:
        for index, (start, stop) in enumerate(pairwise(bounds)):
            try:
                data[start + 8 : stop].decode("utf-8")
            except UnicodeDecodeError:
                return index
        return -1
