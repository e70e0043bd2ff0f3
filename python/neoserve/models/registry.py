"""Finds a model's file by the name of its architecture and records its program."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable

from neoserve import models
from neoserve.program.catalog import Catalog
from neoserve.program.ir import Program
from neoserve.program.trace import DEFAULT_BOUNDS, TraceBounds, Tracer
from neoserve.types.errors import CheckpointError, UnsupportedModelError
from neoserve.types.model import ModelConfig

ALIASES = {"llama2": "llama", "llama3": "llama", "smollm2": "llama", "qwen2.5": "qwen2", "gemma3_text": "gemma3"}
"""Other names of an architecture; the name itself is the module's."""

_NOT_ARCHITECTURES = frozenset({"registry", "checks"})


def known_architectures() -> tuple[str, ...]:
    """Names of the architectures that have a file here, sorted."""
    found = (module.name for module in pkgutil.iter_modules(models.__path__))
    return tuple(sorted(name for name in found if name not in _NOT_ARCHITECTURES))


def build_program(
    config: ModelConfig,
    catalog: Catalog,
    *,
    context_length: int | None = None,
    bounds: TraceBounds = DEFAULT_BOUNDS,
) -> Program:
    """Records the program of ``config`` over the parameters of ``catalog``.

    ``context_length`` (tokens; default ``config.max_position``) is the longest sequence that will be served.
    Raises UnsupportedModelError on an unknown architecture or property, CheckpointError on a missing or
    mis-shaped tensor or inconsistent config.
    """
    _check_config(config)
    build = _find(config.architecture)
    return build(Tracer(config.architecture, catalog, bounds), config, context_length or config.max_position)


def _find(architecture: str) -> Callable[[Tracer, ModelConfig, int], Program]:
    name = ALIASES.get(architecture, architecture)
    if name not in known_architectures():
        raise UnsupportedModelError(
            f"architecture {architecture!r} is not supported; known: {', '.join(known_architectures())}"
        )
    build: Callable[[Tracer, ModelConfig, int], Program] = importlib.import_module(f"neoserve.models.{name}").build
    return build


def _check_config(config: ModelConfig) -> None:
    """Relations between fields that every decoder needs; each error names the fields."""
    for field in ("layer_ropes", "layer_windows"):
        if len(getattr(config, field)) != config.num_layers:
            raise CheckpointError(
                f"config {field} has {len(getattr(config, field))} entries, num_layers is {config.num_layers}"
            )
    if config.num_kv_heads <= 0 or config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"config num_heads {config.num_heads} is not a multiple of num_kv_heads {config.num_kv_heads}"
        )
    if not all(0 <= index < len(config.ropes) for index in config.layer_ropes):
        raise CheckpointError(f"config layer_ropes {config.layer_ropes} points outside its {len(config.ropes)} ropes")
    for rope in config.ropes:
        if rope.rotary_dim > config.head_dim:
            raise CheckpointError(f"config rotary_dim {rope.rotary_dim} exceeds head_dim {config.head_dim}")
    for window in config.layer_windows:
        if window is not None and window <= 0:
            raise CheckpointError(f"config layer_windows has {window}; a window is a positive number of tokens")
