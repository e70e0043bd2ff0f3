"""How commands print: tables that are not cut when piped, JSON, sizes."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_PIPE_WIDTH = 200


def console() -> Console:
    """A console for standard output; wide when it is not a terminal, so that no table cell is cut in a file."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    return Console(width=width, highlight=False, markup=False)


def print_json(value: object) -> None:
    """``value`` as indented JSON on standard output."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def size(nbytes: int) -> str:
    """Bytes in the largest binary unit that keeps the number at 1 or above."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes} B"
