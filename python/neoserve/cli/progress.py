"""One line of progress on standard error, only where somebody watches."""

from __future__ import annotations

import sys
from collections.abc import Callable

_CLEAR = "\r\x1b[K"


def show(text: str) -> None:
    """Replaces the progress line; an empty ``text`` removes it. Does nothing when standard error is no terminal."""
    if sys.stderr.isatty():
        print(f"{_CLEAR}{text}", end="", file=sys.stderr, flush=True)


def packing() -> Callable[[int, int, str], None]:
    """A callback for ``load_engine``: bytes packed, bytes in all, name of the weight."""

    def report(done: int, total: int, name: str) -> None:
        show(f"packing weights: {100 * done // max(total, 1)} % ({name})" if done < total else "")

    return report
