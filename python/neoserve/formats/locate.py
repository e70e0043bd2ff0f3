"""Tells what kind of checkpoint a local path is, without reading weights. Pickle files are never opened."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from neoserve.formats.config_hf import CONFIG_FILE
from neoserve.formats.weights_hf import PICKLE_SUFFIXES
from neoserve.types.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError

_SPLIT: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
# Image encoders that are published beside language models.
_PROJECTOR: Final = re.compile(r"(^|[-_.])mmproj([-_.]|$)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Located:
    """``gguf`` is the (first) GGUF file, or None for a folder with config.json and safetensors."""

    path: Path
    gguf: Path | None


def locate_checkpoint(path: Path) -> Located:
    """What is to be opened at ``path``. Raises ModelNotFoundError or CheckpointError saying what was found instead."""
    try:
        if path.is_dir():
            return _in_folder(path)
        if path.is_file():
            return _file(path)
    except OSError as error:
        raise ModelNotFoundError(f"{path}: cannot be read: {error.strerror}") from None
    raise ModelNotFoundError(f"{path}: no such file or folder; check the spelling")


def gguf_models(names: Iterable[str]) -> dict[str, list[str]]:
    """GGUF file names grouped by model: the first part of each -> all its parts. Image projectors are left out."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        base = name.rsplit("/", 1)[-1]
        if not base.lower().endswith(".gguf") or _PROJECTOR.search(base):
            continue
        match = _SPLIT.fullmatch(name)
        first = f"{match['stem']}-00001-of-{match['count']}.gguf" if match else name
        models.setdefault(first, []).append(name)
    return models


def _file(path: Path) -> Located:
    suffix = path.suffix.lower()
    if suffix in PICKLE_SUFFIXES:
        raise _pickle(path.name)
    if suffix == ".safetensors" or path.name == CONFIG_FILE:
        raise CheckpointError(f"{path.name}: is a part of a checkpoint; give the folder that holds it")
    return Located(path, path)


def _in_folder(folder: Path) -> Located:
    names = sorted(entry.name for entry in folder.iterdir())
    safetensors = [name for name in names if name.endswith((".safetensors", ".safetensors.index.json"))]
    if CONFIG_FILE in names and safetensors:
        return Located(folder, None)
    models = gguf_models(names)
    if len(models) > 1:
        listed = ", ".join(list(models)[:12])
        raise CheckpointError(f"{folder.name}: holds {len(models)} GGUF models; give the path of one: {listed}")
    if models:
        (first,) = models
        return Located(folder, folder / (first if first in names else models[first][0]))
    if safetensors:
        raise CheckpointError(
            f"{folder.name}: has {safetensors[0]} but no {CONFIG_FILE}; fetch the complete checkpoint"
        )
    pickles = [name for name in names if Path(name).suffix.lower() in PICKLE_SUFFIXES]
    if pickles:
        raise _pickle(pickles[0])
    found = ", ".join(names[:8]) or "nothing"
    raise CheckpointError(
        f"{folder.name}: has no model; expected {CONFIG_FILE} with .safetensors files, or a .gguf file; found {found}"
    )


def _pickle(name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{name}: pickle files can run code when they are loaded and are never read; use the model's safetensors or "
        "GGUF files, or convert it to safetensors first"
    )
