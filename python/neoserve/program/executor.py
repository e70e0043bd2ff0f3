"""From a checkpoint to something that runs: choose formats, trace, verify, plan memory, pack, bind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from neoserve.program.catalog import Catalog, build_catalog
from neoserve.program.dump import weight_bytes
from neoserve.program.ir import Program
from neoserve.program.machine import memory_available
from neoserve.program.memory import KvPlan, plan_kv
from neoserve.program.plan import MemoryPlan, plan_memory
from neoserve.program.reference import ReferenceExecutor, Sampler
from neoserve.program.reference_ops import Precision
from neoserve.program.trace import TraceBounds
from neoserve.program.verify import check_symbolic, verify
from neoserve.types.errors import ConfigurationError
from neoserve.types.model import ModelConfig
from neoserve.types.options import EngineOptions
from neoserve.types.step import PageGroupSpec, StepLimits
from neoserve.types.tensors import CheckpointTensor

if TYPE_CHECKING:
    from neoserve.program.machine.placement import Placement
    from neoserve.program.native import NativeExecutor, Progress

MIN_LOGIT_ROWS = 64
"""Rows of logits that a step can give even with few requests, so that prompt logprobs come in chunks of use."""


_DEFAULTS = EngineOptions()


class Checkpoint(Protocol):
    """What is needed of an opened checkpoint: its config, and its tensors by canonical name."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def tensors(self) -> Mapping[str, CheckpointTensor]: ...

    def release_pages(self) -> None:
        """Takes the pages of the mapped files out of resident memory; called after each packed weight."""
        ...


class ProgramBuilder(Protocol):
    """``neoserve.models.registry.build_program``; an argument here because models build upon this package."""

    def __call__(
        self, config: ModelConfig, catalog: Catalog, *, context_length: int | None, bounds: TraceBounds
    ) -> Program: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedModel:
    """A verified program with all sizes decided; what every kind of executor is made from.

    ``kv_dtype`` is "f32" or "bf16". ``summary`` says in one line what was chosen and why.
    """

    program: Program
    plan: MemoryPlan
    kv: KvPlan
    kv_dtype: str
    limits: StepLimits
    summary: str


def prepare(
    checkpoint: Checkpoint,
    options: EngineOptions,
    build_program: ProgramBuilder,
    *,
    available_bytes: int | None = None,
) -> PreparedModel:
    """Chooses weight formats (see catalog.choose_format), traces, verifies and plans; reads no weight.

    KV is f32 with dtype float32, else bf16. Without ``options.kv_cache_bytes`` the KV cache takes up to half of what
    the weights leave of ``available_bytes`` (default: what this process may still take); see memory.plan_kv.

    Raises CheckpointError, UnsupportedModelError or ConfigurationError naming what does not fit.
    """
    config = checkpoint.config
    catalog = build_catalog(checkpoint.tensors, options.dtype, options.quantization)
    kv_dtype = "f32" if options.dtype == "float32" else "bf16"
    _check_context(config, options.context_length)
    context = options.context_length or config.max_position
    program = _trace(config, catalog, build_program, context)
    room = memory_available().bytes if available_bytes is None else available_bytes
    kv = plan_kv(
        program.kv_groups,
        page_size=options.page_size,
        kv_dtype=kv_dtype,
        max_context=config.max_position,
        context_length=options.context_length,
        max_sequences=options.max_running_requests,
        kv_cache_bytes=options.kv_cache_bytes,
        available_bytes=max(0, room - sum(weight_bytes(weight) for weight in program.weights.values())),
    )
    if kv.context_length != context:  # dynamic rope depends on it
        program = _trace(config, catalog, build_program, kv.context_length)
    limits = _limits(program, kv, options)
    plan = plan_memory(program, limits.max_tokens, limits.max_logit_rows)
    _check_room(sum(weight_bytes(weight) for weight in program.weights.values()), plan, kv, room)
    formats = sorted({str(weight.format) for weight in program.weights.values()})
    activations = sorted({weight.format.activation for weight in program.weights.values()})
    summary = f"{config.architecture}: weights {', '.join(formats)}, activations {', '.join(activations)}; {kv.reason}"
    return PreparedModel(program=program, plan=plan, kv=kv, kv_dtype=kv_dtype, limits=limits, summary=summary)


def build_executor(
    checkpoint: Checkpoint,
    options: EngineOptions,
    build_program: ProgramBuilder,
    *,
    available_bytes: int | None = None,
    progress: Progress | None = None,
) -> NativeExecutor:
    """The native executor of ``checkpoint``: prepare(), then pack the weights and bind kernel rows.

    ``progress`` is called while weights are packed. Threads and memory are placed by
    machine.placement. The executor's ``limits`` hold the context length and page counts that were chosen.
    """
    from neoserve.program.machine.placement import choose_placement  # loads the native library

    prepared = prepare(checkpoint, options, build_program, available_bytes=available_bytes)
    return bind_executor(checkpoint, prepared, choose_placement(options), options, progress)


def bind_executor(
    checkpoint: Checkpoint,
    prepared: PreparedModel,
    placement: Placement,
    options: EngineOptions,
    progress: Progress | None = None,
) -> NativeExecutor:
    """Packs the weights where ``placement`` puts memory, starts its threads and binds kernel rows."""
    # These load the native library, which inspect can do without.
    from neoserve.program.machine.placement import placed
    from neoserve.program.native import NativeExecutor

    with placed(placement):
        return NativeExecutor(
            prepared.program,
            checkpoint.tensors,
            prepared.plan,
            prepared.limits,
            kv_dtype=prepared.kv_dtype,
            threads=placement.threads.count,
            force=options.kernel_force or "",
            cpus=placement.pinned,
            progress=progress,
            after_weight=checkpoint.release_pages,
        )


def build_reference_executor(
    checkpoint: Checkpoint,
    options: EngineOptions,
    build_program: ProgramBuilder,
    *,
    available_bytes: int | None = None,
    precision: Precision = "float32",
    sampler: Sampler | None = None,
) -> ReferenceExecutor:
    """The numpy executor of the same program, formats and limits; options of the machine must be at their defaults."""
    for name in ("num_threads", "kernel_force", "numa", "huge_pages"):
        if getattr(options, name) != getattr(_DEFAULTS, name):
            raise ConfigurationError(f"{name} is {getattr(options, name)!r}; the reference executor has no such choice")
    prepared = prepare(checkpoint, options, build_program, available_bytes=available_bytes)
    return ReferenceExecutor(
        prepared.program,
        checkpoint.tensors,
        prepared.limits,
        kv_dtype=prepared.kv_dtype,
        precision=precision,
        sampler=sampler,
    )


def _trace(config: ModelConfig, catalog: Catalog, build_program: ProgramBuilder, context: int) -> Program:
    program = check_symbolic(lambda bounds: build_program(config, catalog, context_length=context, bounds=bounds))
    verify(program, catalog)
    return program


def _check_room(weights: int, plan: MemoryPlan, kv: KvPlan, room: int) -> None:
    """The system would hand out more memory than it has and end the process later, so the sum is checked here."""
    needed = weights + plan.arena_bytes + kv.total_bytes
    if needed > room:
        mib = [round(size / 2**20) for size in (needed, weights, plan.arena_bytes, kv.total_bytes, room)]
        raise ConfigurationError(
            f"the model needs {mib[0]} MiB (weights {mib[1]}, activations {mib[2]}, KV cache {mib[3]}), but {mib[4]} "
            "MiB are available; lower kv_cache_bytes, context_length or max_tokens_per_step, or use a smaller model"
        )


def _check_context(config: ModelConfig, context_length: int | None) -> None:
    """Beyond its trained length a model gives noise; only dynamic rope is made to be stretched, by its factor."""
    stretch = max((rope.factor for rope in config.ropes if rope.kind == "dynamic"), default=1.0)
    limit = int(config.max_position * stretch)
    if context_length is not None and context_length > limit:
        raise ConfigurationError(f"context_length is {context_length}; the model holds at most {limit} tokens")


def _limits(program: Program, kv: KvPlan, options: EngineOptions) -> StepLimits:
    groups = tuple(
        PageGroupSpec(
            name=group.name, layers=group.layers, window=group.window, page_bytes=size, num_pages=kv.num_pages
        )
        for group, size in zip(program.kv_groups, kv.page_bytes, strict=True)
    )
    return StepLimits(
        max_tokens=options.max_tokens_per_step,
        max_sequences=options.max_running_requests,
        max_logit_rows=min(options.max_tokens_per_step, max(options.max_running_requests, MIN_LOGIT_ROWS)),
        max_context=kv.context_length,
        page_size=options.page_size,
        vocab_size=program.vocab_size,
        groups=groups,
    )
