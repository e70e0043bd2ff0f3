"""Runs a program in numpy: the oracle of the native executor, and proof that a program means what it says."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from neoserve.program import reference_ops as ops
from neoserve.program.ir import LOGITS, Instruction, KvLayer, Operand, Program, ProgramError, View
from neoserve.program.reference_ops import Precision, Quantized, ReferenceWeight
from neoserve.program.step_check import check_step
from neoserve.program.weights import row_blocks, vector_values
from neoserve.types.errors import ConfigurationError
from neoserve.types.step import Float32Array, SampleOutput, SamplingBatch, StepInput, StepLimits
from neoserve.types.tensors import CheckpointTensor

Sampler = Callable[[Float32Array, SamplingBatch], SampleOutput]
Activation = Float32Array | Quantized


class ReferenceExecutor:
    """Executor of ``program`` in numpy (types/step.py: Executor); slow, for tests and debugging.

    ``limits`` as the native executor would have them. ``kv_dtype`` "f32" or "bf16" rounds K and V as the pages would.
    ``precision`` "float32" uses numpy's own products; "contract" follows the order of docs/ops.md to the bit, slowly;
    "float64" accumulates in binary64 and rounds each op's result to float32. ``sampler`` draws tokens from
    (logits, batch); without one ``sample`` raises. ``observe`` is called with (instruction, written array) after each
    op, to find the first op that differs.
    """

    def __init__(
        self,
        program: Program,
        tensors: Mapping[str, CheckpointTensor],
        limits: StepLimits,
        *,
        kv_dtype: str = "f32",
        precision: Precision = "float32",
        sampler: Sampler | None = None,
        observe: Callable[[Instruction, Activation], None] | None = None,
    ) -> None:
        if kv_dtype not in ("f32", "bf16"):
            raise ConfigurationError(f"kv_dtype is {kv_dtype!r}; the reference has f32 and bf16")
        if precision not in ops.PRECISIONS:
            raise ConfigurationError(f"precision is {precision!r}; the reference has {', '.join(ops.PRECISIONS)}")
        self.limits = limits
        self.step = StepInput.allocate(limits)
        self._program = program
        self._precision: Precision = precision
        self._round_kv = ops.round_bf16 if kv_dtype == "bf16" else None
        self._sampler = sampler
        self._observe = observe
        self._weights = {
            name: ReferenceWeight.stack(weight.format, [rows for _, rows in row_blocks(weight, tensors)])
            for name, weight in program.weights.items()
        }
        self._vectors = {name: vector_values(vector, tensors) for name, vector in program.vectors.items()}
        # [layer of the group, k | v, page, token of the page, kv head, head_dim]
        self._pages = [
            np.zeros(
                (len(group.layers), 2, spec.num_pages, limits.page_size, group.num_kv_heads, group.head_dim),
                np.float32,
            )
            for group, spec in zip(program.kv_groups, limits.groups, strict=True)
        ]
        self._buffers: dict[str, Activation] = {}
        self._closed = False

    def forward(self) -> None:
        """Runs ``step``; see Executor."""
        self._check_open()
        check_step(self.step, self.limits)
        self._buffers = {}
        for instruction in self._program.instructions:
            _OPS[instruction.op](self, instruction)
            if self._observe is not None and instruction.output is not None:
                self._observe(instruction, self._read(instruction.output))

    def logits(self) -> Float32Array:
        """Logits [num_logit_rows, vocab] float32 of the last forward."""
        self._check_open()
        logits = self._buffers.get(LOGITS)
        if not isinstance(logits, np.ndarray):
            raise ValueError("logits() was called before the first forward()")
        return logits

    def sample(self, batch: SamplingBatch) -> SampleOutput:
        """Draws one token per logits row with the sampler given at construction."""
        if self._sampler is None:
            raise ValueError("this ReferenceExecutor was built without a sampler; pass sampler=")
        return self._sampler(self.logits(), batch)

    def close(self) -> None:
        """Frees weights and pages; later calls raise ValueError."""
        self._closed = True
        self._weights, self._vectors, self._pages, self._buffers = {}, {}, [], {}

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("this ReferenceExecutor is closed")

    # Operands.

    def _read(self, operand: Operand) -> Activation:
        if not isinstance(operand, View):
            raise ProgramError(f"operand {operand!r} is not a view")
        buffer = self._buffers[operand.buffer]
        if isinstance(buffer, Quantized):
            return buffer
        return buffer[:, operand.column : operand.column + operand.columns]

    def _floats(self, operand: Operand) -> Float32Array:
        value = self._read(operand)
        if isinstance(value, Quantized):
            raise ProgramError(f"operand {operand!r} is quantised; this op takes f32")
        return value

    def _write(self, view: View | None, value: Activation) -> None:
        if view is None:
            raise ProgramError("an op that writes has no output")
        if isinstance(value, Quantized):
            self._buffers[view.buffer] = value
            return
        buffer = self._buffers.get(view.buffer)
        if not isinstance(buffer, np.ndarray):
            shape = (len(value), self._program.buffers[view.buffer].columns)
            buffer = self._buffers[view.buffer] = np.full(shape, np.nan, np.float32)
        buffer[:, view.column : view.column + view.columns] = value

    def _weight(self, operand: Operand) -> ReferenceWeight:
        return self._weights[str(operand)[1:]]

    def _vector(self, operand: Operand) -> Float32Array:
        return self._vectors[str(operand)[1:]]

    # Ops, one method each.

    def _embed(self, op: Instruction) -> None:
        rows = self._weight(op.inputs[1]).rows(self.step.token_ids[: self.step.num_tokens])
        scale = np.float32(dict(op.attributes)["scale"])
        self._write(op.output, rows if scale == 1 else rows * scale)

    def _rms_norm(self, op: Instruction) -> None:
        attributes = dict(op.attributes)
        x, weight = self._floats(op.inputs[0]), self._vector(op.inputs[1])
        self._write(op.output, ops.rms_norm(x, weight, int(attributes["width"]), attributes["eps"], self._precision))

    def _quantize(self, op: Instruction) -> None:
        assert op.output is not None
        fmt = self._program.buffers[op.output.buffer].format
        self._write(op.output, ops.quantize(self._floats(op.inputs[0]), fmt))

    def _linear(self, op: Instruction) -> None:
        y = ops.linear(self._read(op.inputs[0]), self._weight(op.inputs[1]), self._precision)
        if len(op.inputs) > 2:
            y = y + self._vector(op.inputs[2])
        if dict(op.attributes)["accumulate"]:
            assert op.output is not None
            y = self._floats(op.output) + y
        self._write(op.output, y)

    def _rope_table(self, op: Instruction) -> None:
        positions = self.step.positions[: self.step.num_tokens]
        factor = dict(op.attributes)["attention_factor"]
        self._write(op.output, ops.rope_table(positions, self._vector(op.inputs[1]), factor))

    def _rope(self, op: Instruction) -> None:
        x, table = self._floats(op.inputs[0]), self._floats(op.inputs[1])
        self._write(op.output, ops.rope(x, table, int(dict(op.attributes)["head_dim"])))

    def _kv_write(self, op: Instruction) -> None:
        layer = _kv_layer(op.inputs[2])
        pages = self._pages[layer.group][layer.index]
        for sequence, tokens in self._sequences():
            positions = self.step.positions[tokens]
            slots = self.step.block_tables[layer.group][sequence, positions // self.limits.page_size]
            for which in (0, 1):
                value = self._floats(op.inputs[which])[tokens].reshape(len(positions), *pages.shape[3:])
                rounded = value if self._round_kv is None else self._round_kv(value)
                pages[which, slots, positions % self.limits.page_size] = rounded

    def _attention(self, op: Instruction) -> None:
        attributes = dict(op.attributes)
        layer = _kv_layer(op.inputs[1])
        pages = self._pages[layer.group][layer.index]
        q = self._floats(op.inputs[0])
        q = q.reshape(len(q), int(attributes["heads"]), int(attributes["head_dim"]))
        q = q if self._round_kv is None else self._round_kv(q)
        result = np.empty((len(q), q.shape[1] * q.shape[2]), np.float32)
        for sequence, tokens in self._sequences():
            length = int(self.step.context_len[sequence])
            used = -(-length // self.limits.page_size)
            table = self.step.block_tables[layer.group][sequence, :used]
            k, v = (pages[which, table].reshape(-1, *pages.shape[3:])[:length] for which in (0, 1))
            result[tokens] = ops.attend(
                q[tokens],
                k,
                v,
                self.step.positions[tokens],
                attributes["scale"],
                int(attributes["window"]),
                self._precision,
            )
        self._write(op.output, result)

    def _silu_mul(self, op: Instruction) -> None:
        self._write(op.output, ops.silu_mul(self._floats(op.inputs[0])))

    def _gelu_tanh_mul(self, op: Instruction) -> None:
        self._write(op.output, ops.gelu_tanh_mul(self._floats(op.inputs[0])))

    def _add(self, op: Instruction) -> None:
        self._write(op.output, self._floats(op.inputs[0]) + self._floats(op.inputs[1]))

    def _gather_rows(self, op: Instruction) -> None:
        rows: npt.NDArray[np.int32] = self.step.logit_rows[: self.step.num_logit_rows]
        self._write(op.output, self._floats(op.inputs[0])[rows])

    def _sequences(self) -> list[tuple[int, slice]]:
        """(sequence, slice of its tokens) of the step."""
        starts = self.step.query_start
        return [(s, slice(int(starts[s]), int(starts[s + 1]))) for s in range(self.step.num_sequences)]


def _kv_layer(operand: Operand) -> KvLayer:
    if not isinstance(operand, KvLayer):
        raise ProgramError(f"operand {operand!r} is not a KV layer")
    return operand


_OPS: dict[str, Callable[[ReferenceExecutor, Instruction], None]] = {
    "embed": ReferenceExecutor._embed,
    "rms_norm": ReferenceExecutor._rms_norm,
    "quantize": ReferenceExecutor._quantize,
    "linear": ReferenceExecutor._linear,
    "rope_table": ReferenceExecutor._rope_table,
    "rope": ReferenceExecutor._rope,
    "kv_write": ReferenceExecutor._kv_write,
    "attention": ReferenceExecutor._attention,
    "silu_mul": ReferenceExecutor._silu_mul,
    "gelu_tanh_mul": ReferenceExecutor._gelu_tanh_mul,
    "add": ReferenceExecutor._add,
    "gather_rows": ReferenceExecutor._gather_rows,
}
