"""What a model is and how it would be run here: the content of ``neoserve pull`` and ``neoserve inspect``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import TYPE_CHECKING

from neoserve.types.model import GenerationDefaults, ModelConfig
from neoserve.types.options import EngineOptions

if TYPE_CHECKING:
    from neoserve.formats.checkpoint import Checkpoint
    from neoserve.formats.source import ResolvedModel
    from neoserve.program.executor import PreparedModel

# The step that costs are given for: one prompt of this many tokens, which ends in one row of logits.
DEFAULT_STEP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class StoredType:
    """Tensors of one storage type of the checkpoint."""

    name: str
    tensors: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInspection:
    """Facts about a checkpoint; sizes in bytes.

    ``stored`` lists the types of its files, ``weight_formats`` what the matrices run as, with their bytes.
    ``summary`` is the line that ``neoserve serve`` prints. ``program`` is the listing, if it was asked for.
    """

    name: str
    origin: str
    path: str
    digest: str
    config: ModelConfig
    generation: GenerationDefaults
    parameters: int
    stored: tuple[StoredType, ...]
    weight_formats: Mapping[str, int]
    chat_templates: tuple[str, ...]
    context_length: int
    kv_bytes_per_token: float
    summary: str
    program: str | None

    def json_object(self) -> dict[str, object]:
        """Everything as JSON values."""
        return asdict(self)


def fetch_model(reference: str | None) -> ResolvedModel:
    """Finds a model and fetches it if need be, with progress bars on a terminal; see formats.source.resolve_model."""
    from neoserve.formats.source import resolve_model

    return resolve_model(reference)


def inspect_model(
    reference: str | None,
    options: EngineOptions | None = None,
    *,
    program: bool = False,
    bind: bool = False,
    step_tokens: int = DEFAULT_STEP_TOKENS,
) -> ModelInspection:
    """Opens a model, traces and plans it; reads no weight unless ``bind``.

    ``program`` adds the listing, with costs of a prefill step of ``step_tokens`` tokens; ``bind`` packs the weights
    and adds the kernel row of every instruction. Raises what loading raises.
    """
    from neoserve.formats.checkpoint import open_checkpoint
    from neoserve.models.registry import build_program
    from neoserve.program.dump import weight_bytes
    from neoserve.program.executor import prepare

    options = options or EngineOptions()
    found = fetch_model(reference)
    with open_checkpoint(found.path) as checkpoint:
        prepared = prepare(checkpoint, options, build_program)
        formats: Counter[str] = Counter()
        for weight in prepared.program.weights.values():
            formats[str(weight.format)] += weight_bytes(weight)
        return ModelInspection(
            name=found.served_name,
            origin=found.origin,
            path=str(found.path),
            digest=checkpoint.digest,
            config=checkpoint.config,
            generation=checkpoint.generation,
            parameters=sum(prod(tensor.shape) for tensor in checkpoint.tensors.values()),
            stored=_stored_types(checkpoint),
            weight_formats=dict(formats),
            chat_templates=tuple(checkpoint.tokenizer.chat_templates),
            context_length=prepared.limits.max_context,
            kv_bytes_per_token=sum(group.page_bytes for group in prepared.limits.groups) / prepared.limits.page_size,
            summary=prepared.summary,
            program=_listing(checkpoint, prepared, options, bind, step_tokens) if program else None,
        )


def _stored_types(checkpoint: Checkpoint) -> tuple[StoredType, ...]:
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        counts[tensor.storage_type] += 1
        sizes[tensor.storage_type] += tensor.nbytes
    return tuple(StoredType(name, counts[name], size) for name, size in sizes.most_common())


def _listing(
    checkpoint: Checkpoint, prepared: PreparedModel, options: EngineOptions, bind: bool, step_tokens: int
) -> str:
    from neoserve.program.dump import StepShape, dump

    rows = _bound_rows(checkpoint, prepared, options) if bind else None
    return dump(
        prepared.program,
        plan=prepared.plan,
        shape=StepShape(tokens=step_tokens, rows=1, context=step_tokens),
        rows=rows,
        kv_item_bytes=4 if prepared.kv_dtype == "f32" else 2,
    )


def _bound_rows(checkpoint: Checkpoint, prepared: PreparedModel, options: EngineOptions) -> dict[int, str]:
    """The kernel row of each instruction by its index, from a real binding; ops that only move data have none."""
    from neoserve.program.native import NativeExecutor

    executor = NativeExecutor(
        prepared.program,
        checkpoint.tensors,
        prepared.plan,
        prepared.limits,
        kv_dtype=prepared.kv_dtype,
        threads=1,
        force=options.kernel_force or "",
    )
    try:
        return {index: row for index, (_, _, row) in enumerate(executor.rows()) if row}
    finally:
        executor.close()
