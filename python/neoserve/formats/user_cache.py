"""The user's cache folder, and the lock that keeps two starting processes from fetching the same model."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from neoserve.types.errors import ConfigurationError


def user_cache_folder() -> Path:
    """``$XDG_CACHE_HOME/neoserve`` or ``~/.cache/neoserve`` (a relative XDG_CACHE_HOME does not count)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "neoserve"
    try:
        return Path.home() / ".cache" / "neoserve"
    except RuntimeError:
        raise ConfigurationError("no home folder is known; set XDG_CACHE_HOME to a folder for downloads") from None


def make_folder(folder: Path) -> None:
    """Creates a folder and its parents. Raises ConfigurationError saying which variable moves it elsewhere."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"cannot create {folder}: {error.strerror}; set XDG_CACHE_HOME to a folder that can be written"
        ) from None


@contextlib.contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on a file, waiting for it; the kernel drops it when the process dies."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigurationError(
            f"cannot write {path}: {error.strerror}; set XDG_CACHE_HOME to a folder that can be written"
        ) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
