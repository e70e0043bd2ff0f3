"""Finds the published models that some tests need, and opens them; a test whose model is absent is skipped by name."""

from __future__ import annotations

import hashlib
import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from neoserve.formats.checkpoint import open_checkpoint
from neoserve.models.registry import build_program
from neoserve.program.executor import Checkpoint, build_executor
from neoserve.types.options import EngineOptions
from neoserve.types.step import Executor

GOLDEN = Path(__file__).parent / "golden" / "real"
MODELS = ("smollm2", "qwen", "gemma")
DEFAULT_MODEL = "smollm2"


@lru_cache
def golden(name: str) -> dict[str, Any]:
    """Contents of golden/real/NAME.json."""
    loaded: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    return loaded


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "neoserve" / "models"


@lru_cache
def _search(name: str) -> Path | None:
    """The file by its name in NEOSERVE_TEST_MODELS; the default model also under any name there or in the cache."""
    wanted = golden(name)["model"]
    folder = os.environ.get("NEOSERVE_TEST_MODELS")
    places = [Path(folder).expanduser()] if folder else []
    for place in places:
        if (place / wanted["file"]).is_file():
            return place / wanted["file"]
    if name != DEFAULT_MODEL:
        return None
    for place in [*places, _cache_folder()]:
        for file in sorted(place.rglob("*.gguf")) if place.is_dir() else []:
            if file.stat().st_size == wanted["bytes"] and _sha256(file) == wanted["sha256"]:
                return file
    return None


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def model_file(name: str) -> Path:
    """Path of the model, or a skip that says which file is missing and where it belongs."""
    found = _search(name)
    if found is None:
        file = golden(name)["model"]["file"]
        pytest.skip(f"{file} not found; put it into a folder and name that in NEOSERVE_TEST_MODELS")
    return found


def open_model(name: str) -> Any:
    """The opened checkpoint (neoserve.formats.checkpoint.Checkpoint) of a real model, or a skip."""
    return open_checkpoint(model_file(name))


def real_executor(checkpoint: Checkpoint, **changes: object) -> Executor:
    """The native executor for up to 8 sequences of 1024 tokens, with 2 threads unless told otherwise."""
    values: dict[str, object] = {
        "max_running_requests": 8,
        "max_tokens_per_step": 512,
        "context_length": 1024,
        "num_threads": 2,
    }
    return build_executor(checkpoint, EngineOptions(**{**values, **changes}), build_program)  # type: ignore[arg-type]
