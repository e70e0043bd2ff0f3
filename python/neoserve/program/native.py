"""Binds a program to the native library and runs it there; the only user of ``neoserve._native`` in this package."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

from neoserve import _native
from neoserve.program.ir import Instruction, KvLayer, Operand, Program, ProgramError, View, Weight
from neoserve.program.phases import phases
from neoserve.program.plan import MemoryPlan
from neoserve.program.weights import BLOCK_BYTES, RowRange, read_range, row_ranges, vector_values
from neoserve.types.errors import CheckpointError, ConfigurationError, UnsupportedModelError
from neoserve.types.step import Float32Array, SampleOutput, SamplingBatch, StepInput, StepLimits
from neoserve.types.tensors import CheckpointTensor, TensorRows

MAX_PACKERS = 16
"""Threads that pack weights: reading is soon bound by memory, and each holds a block of canonical rows."""

HEAD_DIM_MULTIPLE = 16
"""Attention kernels hold whole vectors of sixteen values of a head."""

Progress = Callable[[int, int, str], None]
"""Called while packing with (bytes packed, bytes in all, weight name)."""


class NativeExecutor:
    """Executor (types/step.py) of ``program`` on the native library.

    Weights are read from ``tensors`` in blocks of rows and packed for the kernel rows that this CPU has; ``force``
    names a row or feature set that must be used (empty: the best). ``kv_dtype`` is "f32" or "bf16". ``threads``
    counts the calling thread; ``cpus`` pins each of the others to one CPU (empty: none is pinned). ``after_weight`` is
    called when a weight is packed, so that the checkpoint may give its pages back. Raises ConfigurationError when the
    machine cannot do what is asked, CheckpointError on bad tensors.
    """

    def __init__(
        self,
        program: Program,
        tensors: Mapping[str, CheckpointTensor],
        plan: MemoryPlan,
        limits: StepLimits,
        *,
        kv_dtype: str,
        threads: int,
        force: str = "",
        cpus: Sequence[int] = (),
        progress: Progress | None = None,
        after_weight: Callable[[], None] | None = None,
    ) -> None:
        self.limits = limits
        self.program = program
        self.kv_dtype = kv_dtype
        self.threads = threads
        self._model: _native.Model | None = _create_model(plan, limits, kv_dtype, threads, cpus, force)
        self._add_groups()  # first: what cannot be served is refused before weights are read
        weight_ids = self._add_weights(tensors, force, progress, after_weight)
        vector_ids = {
            name: self._open_model().add_vector(vector_values(vector, tensors))
            for name, vector in program.vectors.items()
        }
        names = _OperandNames(program, plan, weight_ids, vector_ids)
        for first, end in phases(program):
            for index in range(first, end):
                self._add_op(program.instructions[index], names, joins=index > first)
        self.step = _step_input(self._open_model().step_arrays())

    def forward(self) -> None:
        """Runs ``step``; the GIL is released. Raises ValueError when it exceeds the limits."""
        step = self.step
        self._open_model().forward(step.num_tokens, step.num_sequences, step.num_logit_rows)

    def sample(self, batch: SamplingBatch) -> SampleOutput:
        """Draws one token per logits row of the last forward; the GIL is released."""
        arrays = {field.name: getattr(batch, field.name) for field in fields(batch)}
        return SampleOutput(*self._open_model().sample(arrays))

    def logits(self) -> Float32Array:
        """View of the logits [num_logit_rows, vocab] of the last forward; the next forward overwrites it."""
        return self._open_model().logits()

    def rows(self) -> list[tuple[str, str, str]]:
        """(label, op, name of the bound kernel row) of every instruction in order; "" for ops that only move data."""
        return self._open_model().rows()

    def set_profiling(self, on: bool) -> None:
        """Starts (from zero) or stops timing every instruction."""
        self._open_model().set_profiling(on)

    def profile(self) -> list[tuple[str, str, float]]:
        """(label, kernel row, seconds) of every instruction in order, summed since set_profiling(True)."""
        return self._open_model().profile()

    def close(self) -> None:
        """Ends the threads and frees weights and pages; later calls raise ValueError. May be called twice."""
        if self._model is not None:
            self._model.close()
            self._model = None

    def _open_model(self) -> _native.Model:
        if self._model is None:
            raise ValueError("this executor is closed")
        return self._model

    def _add_weights(
        self,
        tensors: Mapping[str, CheckpointTensor],
        force: str,
        progress: Progress | None,
        after_weight: Callable[[], None] | None,
    ) -> dict[str, int]:
        """Packs all weights, several ranges of rows at a time, and returns their ids; weights finish in order."""
        weights = self.program.weights
        sizes = {name: sum(tensors[part].nbytes for part in weight.parts) for name, weight in weights.items()}
        packed = {name: _empty_weight(weight, force) for name, weight in weights.items()}
        workers = min(self.threads, MAX_PACKERS)
        done, ids = 0, {}
        with ThreadPoolExecutor(workers, thread_name_prefix="neoserve-pack") as pool:
            tasks = {
                name: [
                    pool.submit(_pack_range, packed[name], weight, rows)
                    for rows in row_ranges(weight, tensors, BLOCK_BYTES // workers)
                ]
                for name, weight in weights.items()
            }
            try:
                for name in weights:
                    if progress is not None:
                        progress(done, sum(sizes.values()), name)
                    for task in tasks[name]:
                        task.result()
                    ids[name] = self._open_model().add_weight(packed[name])
                    if after_weight is not None:
                        after_weight()
                    done += sizes[name]
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        if progress is not None:
            progress(done, done, "")
        return ids

    def _add_groups(self) -> None:
        for group, spec in zip(self.program.kv_groups, self.limits.groups, strict=True):
            if group.head_dim % HEAD_DIM_MULTIPLE:
                raise UnsupportedModelError(
                    f"head_dim is {group.head_dim}; the native attention needs a multiple of {HEAD_DIM_MULTIPLE}"
                )
            try:
                size = self._open_model().add_group(
                    len(group.layers), group.num_kv_heads, group.head_dim, spec.num_pages
                )
            except MemoryError:
                raise ConfigurationError(
                    f"the KV cache of group {group.name} needs {spec.num_pages * spec.page_bytes} bytes, which the "
                    "system refuses; lower kv_cache_bytes"
                ) from None
            if size != spec.page_bytes:
                raise RuntimeError(f"page of group {group.name}: planned {spec.page_bytes} bytes, native has {size}")

    def _add_op(self, instruction: Instruction, names: _OperandNames, *, joins: bool) -> None:
        operands = [names.native(operand) for operand in (instruction.output, *instruction.inputs)]
        try:
            self._open_model().add_op(instruction.op, operands, dict(instruction.attributes), instruction.label, joins)
        except ValueError as error:
            raise ProgramError(f"program {self.program.name} cannot be bound: {error}") from None


def _empty_weight(weight: Weight, force: str) -> _native.PackedWeight:
    """Memory of ``weight`` in the layout of the best kernel row of this CPU, or of the forced one."""
    fmt = weight.format
    try:
        return _native.pack_weight(fmt.kind, weight.n, weight.k, fmt.group, fmt.scale_type, fmt.offset, force)
    except MemoryError:
        raise ConfigurationError(
            f"weight {weight.name} {fmt} [{weight.n}, {weight.k}] does not fit into memory; use a smaller model or "
            "a quantisation with fewer bits"
        ) from None
    except ValueError as error:
        raise CheckpointError(f"weight {weight.name} {fmt} [{weight.n}, {weight.k}]: {error}") from None


def _pack_range(packed: _native.PackedWeight, weight: Weight, rows: RowRange) -> None:
    """Reads and packs one range; runs on a packing thread (numpy and put_rows release the GIL)."""
    found = read_range(rows, weight)
    packed.put_rows(rows.row, _native_values(found), found.scales, found.minimums, found.zeros)


def _native_values(rows: TensorRows) -> npt.NDArray[np.generic]:
    """bf16 goes over the boundary as its uint16 bits: the buffer protocol has no bfloat16."""
    values = np.ascontiguousarray(rows.values)
    return values.view(np.uint16) if rows.format.kind == "bf16" else values


def _create_model(
    plan: MemoryPlan, limits: StepLimits, kv_dtype: str, threads: int, cpus: Sequence[int], force: str
) -> _native.Model | None:
    try:
        return _native.Model(
            threads=threads,
            arena_bytes=plan.arena_bytes,
            max_tokens=plan.max_tokens,
            max_sequences=limits.max_sequences,
            max_rows=plan.max_rows,
            max_pages_per_sequence=limits.max_pages_per_sequence,
            page_size=limits.page_size,
            kv_dtype=kv_dtype,
            force=force,
            cpus=list(cpus),
        )
    except MemoryError:
        raise ConfigurationError(
            f"the activations of a step need {plan.arena_bytes} bytes, which the system refuses; lower "
            "max_tokens_per_step"
        ) from None
    except (ValueError, RuntimeError) as error:  # a row that this CPU has not; threads out of range or refused
        raise ConfigurationError(str(error)) from None


def _step_input(arrays: Mapping[str, Any]) -> StepInput:
    names = ("token_ids", "positions", "query_start", "context_len", "logit_rows")
    return StepInput(block_tables=tuple(arrays["block_tables"]), **{name: arrays[name] for name in names})


class _OperandNames:
    """Translates operands of a program into the tuples that the native binding takes."""

    def __init__(
        self, program: Program, plan: MemoryPlan, weight_ids: Mapping[str, int], vector_ids: Mapping[str, int]
    ) -> None:
        self._program = program
        self._plan = plan
        self._weight_ids = weight_ids
        self._vector_ids = vector_ids

    def native(self, operand: Operand | None) -> tuple[str | int, ...]:
        """("view", offset, buffer columns, column, columns, format, symbol), ("weight", id), ("vector", id),
        ("input", step array), ("kv", group, layer) or ("none",)."""
        if operand is None:
            return ("none",)
        if isinstance(operand, View):
            buffer = self._program.buffers[operand.buffer]
            offset = self._plan.allocations[operand.buffer].offset
            return (
                "view", offset, buffer.columns, operand.column, operand.columns, buffer.format, buffer.rows
            )  # fmt: skip
        if isinstance(operand, KvLayer):
            return ("kv", operand.group, operand.index)
        name = operand[1:]
        if operand.startswith("@"):
            return ("input", name)
        if name in self._weight_ids:
            return ("weight", self._weight_ids[name])
        return ("vector", self._vector_ids[name])
