"""Small files of /proc and /sys. They may be absent, unreadable or absurd: then there is nothing to learn from them.

``root`` arguments in this package name the root of the file system, so that tests can show another machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

ROOT = Path("/")

MOST_IDS = 1 << 20
"""No machine has so many CPUs or nodes; a longer list is damage."""


def read(path: Path) -> str:
    """Stripped text of a small system file; empty when it is absent or may not be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def read_count(path: Path) -> int | None:
    """The one number of a file; None when there is none (also for "max")."""
    return parse_count(read(path))


def parse_count(text: str) -> int | None:
    """``text`` as a number in decimal digits, or None. More than twenty digits are no 64-bit number."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 20 else None


def parse_ids(text: str) -> tuple[int, ...]:
    """CPUs or nodes from a list such as ``0-3,8,10-11`` (cpuset(7), "List format"), ascending, each once.

    Blanks around the list and an empty list are allowed. Raises ValueError naming the part that is none.
    """
    found: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        first, dash, last = part.partition("-")
        low, high = parse_count(first), parse_count(last if dash else first)
        if low is None or high is None or low > high or high >= MOST_IDS:
            raise ValueError(f"{part!r} is neither a number nor a range such as 0-3")
        found.update(range(low, high + 1))
    return tuple(sorted(found))


def read_ids(path: Path) -> tuple[int, ...] | None:
    """The list in a file; None when the file is absent, empty or damaged."""
    try:
        return parse_ids(read(path)) or None
    except ValueError:
        return None


def format_ids(ids: Iterable[int]) -> str:
    """The shortest list of ``ids`` in the same format: ``0-3,8``."""
    runs: list[list[int]] = []
    for number in sorted(set(ids)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
