"""Values of options that need reading: sizes and lists of numbers."""

from __future__ import annotations

import re

from neoserve.types.errors import ConfigurationError

_UNITS = {
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "k": 2**10,
    "m": 2**20,
    "g": 2**30,
    "t": 2**40,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def parse_size(name: str, text: str) -> int:
    """Bytes of ``text``: a bare number counts GiB; suffixes are B, KiB, MiB, GiB, TiB, KB ... TB, K ... T.

    Raises ConfigurationError naming the option.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = (match[2].lower() or "gib") if match else ""
    if match is None or unit not in _UNITS:
        raise ConfigurationError(f"{name} is {text!r}; give a size such as 4 (GiB), 1.5GiB, 512MiB or 1000000B")
    size = int(float(match[1]) * _UNITS[unit])
    if size <= 0:
        raise ConfigurationError(f"{name} is {text!r}; it must be more than 0 bytes")
    return size


def parse_counts(name: str, text: str) -> list[int]:
    """Positive integers separated by commas, such as "1,2,4". Raises ConfigurationError naming the option."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and 0 < int(part) < 10**7 for part in parts):
        raise ConfigurationError(f"{name} is {text!r}; give positive numbers separated by commas, such as 1,2,4")
    return [int(part) for part in parts]
