"""Typed reading of configuration values that a model file brings along, so that each error names its field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final, cast

from neoserve.types.errors import CheckpointError

MAX_JSON_BYTES: Final = 256 << 20

# What a dimension may be at most. Far above every published model, far below what overflows or exhausts memory.
LIMITS: Final[Mapping[str, int]] = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 18,
    "intermediate_size": 1 << 20,
    "num_layers": 1 << 10,
    "num_heads": 1 << 12,
    "head_dim": 1 << 10,
    "max_position": (1 << 31) - 1,
}


class _Required:
    """Type of the mark that says a field has no default."""


REQUIRED: Final = _Required()


class Fields:
    """Values of one JSON object or GGUF header, read by name and type.

    ``file`` is the name shown in errors; ``prefix`` is put before each field name (``llama.`` in GGUF, the path of
    a nested JSON object). A JSON null counts as absent. ``used`` collects the names that were asked for.
    Every getter raises CheckpointError naming file, field, value and what is allowed.
    """

    def __init__(self, values: Mapping[str, object], file: str, prefix: str = "") -> None:
        self._values = values
        self.file = file
        self.prefix = prefix
        self.used: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return self.get(name) is not None

    def states(self, name: str) -> bool:
        """Whether the field is written at all, be it as null (which for some fields is not its default)."""
        self.used.add(self.prefix + name)
        return self.prefix + name in self._values

    def get(self, name: str) -> object | None:
        """The plain value, or None where it is absent or null."""
        self.used.add(self.prefix + name)
        return self._values.get(self.prefix + name)

    def fault(self, name: str, allowed: str) -> CheckpointError:
        """The error for a bad value of ``name``: a caller raises it where a check needs more than one field."""
        found = repr(self.get(name))
        shown = found if len(found) <= 80 else found[:77] + "..."
        return CheckpointError(f"{self.file}: {self.prefix}{name} is {shown}; it must be {allowed}")

    def integer(self, name: str, low: int, high: int, default: int | _Required = REQUIRED) -> int:
        """An integer in [low, high]; a whole float is taken as one."""
        value = self.get(name)
        if value is None:
            return cast(int, self._default(name, default))
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.fault(name, f"an integer in [{low}, {high}]")
        return value

    def number(self, name: str, low: float, high: float, default: float | _Required = REQUIRED) -> float:
        """A finite number in [low, high], as float."""
        value = self.get(name)
        if value is None:
            return float(cast(float, self._default(name, default)))
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise self.fault(name, f"a finite number in [{low:g}, {high:g}]")
        return float(value)

    def optional_number(self, name: str, low: float, high: float) -> float | None:
        """As ``number``, or None where it is absent."""
        return self.number(name, low, high) if name in self else None

    def optional_positive(self, name: str, high: float) -> float | None:
        """A number in (0, high], or None where it is absent."""
        value = self.optional_number(name, 0.0, high)
        if value == 0.0:
            raise self.fault(name, f"in (0, {high:g}]")
        return value

    def optional_integer(self, name: str, low: int, high: int) -> int | None:
        """As ``integer``, or None where it is absent."""
        return self.integer(name, low, high) if name in self else None

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fault(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str | None:
        """A string."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.fault(name, "a string")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings; empty where it is absent."""
        value = self.get(name)
        if value is None:
            return ()
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
            raise self.fault(name, "a list of strings")
        return tuple(value)

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """One token id or a list of them, each in [0, vocab_size); empty where it is absent."""
        value = self.get(name)
        if value is None:
            return ()
        items = value if isinstance(value, (list, tuple)) else [value]
        for item in items:
            if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < vocab_size:
                raise self.fault(name, f"a token id in [0, {vocab_size - 1}] or a list of them")
        return tuple(dict.fromkeys(items))

    def table(self, name: str) -> Fields | None:
        """A nested object, or None where it is absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fault(name, "an object")
        return _nested(value, self, name)

    def names(self) -> list[str]:
        """The field names present, without the prefix."""
        cut = len(self.prefix)
        return [name[cut:] for name in self._values if name.startswith(self.prefix)]

    def _default(self, name: str, default: object) -> object:
        if isinstance(default, _Required):
            raise CheckpointError(f"{self.file}: {self.prefix}{name} is missing; the model cannot be built without it")
        return default


def _nested(value: Mapping[str, object], parent: Fields, name: str) -> Fields:
    """Fields of a nested object whose errors show the dotted path."""
    path = f"{parent.prefix}{name}."
    return Fields({path + key: item for key, item in value.items()}, parent.file, path)


def parse_json(data: bytes, file: str) -> dict[str, object]:
    """A JSON object as a dictionary. Raises CheckpointError on anything else."""
    try:
        value = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not valid JSON ({error}); fetch the file again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: holds a JSON {type(value).__name__}; it must be an object")
    return value


def read_json(path: Path) -> dict[str, object]:
    """The JSON object in a file. Raises CheckpointError if it is absent, over 256 MB, or not an object."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path.name}: is {size} bytes; at most {MAX_JSON_BYTES} are read as JSON")
        return parse_json(path.read_bytes(), path.name)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None


def optional_json(path: Path) -> dict[str, object]:
    """As ``read_json``; an absent file gives an empty dictionary."""
    return read_json(path) if path.is_file() else {}
