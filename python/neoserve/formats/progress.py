"""Progress of long file work: a callback, or bars on a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

# (what is being done, bytes done, bytes in all or None while unknown). Called often; must return quickly.
Progress = Callable[[str, int, "int | None"], None]


def _silent(label: str, done: int, total: int | None) -> None:
    return None


@contextlib.contextmanager
def shown_progress(progress: Progress | None) -> Iterator[Progress]:
    """The caller's callback if there is one; else bars on standard error when it is a terminal; else nothing."""
    if progress is not None:
        yield progress
        return
    if not sys.stderr.isatty():
        yield _silent
        return
    # Imported here: a start that downloads nothing does not pay for it.
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bars(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bars:
        tasks: dict[str, object] = {}

        def report(label: str, done: int, total: int | None) -> None:
            if label not in tasks:
                tasks[label] = bars.add_task(label, total=total)
            bars.update(tasks[label], completed=done, total=total)  # type: ignore[arg-type]

        yield report
