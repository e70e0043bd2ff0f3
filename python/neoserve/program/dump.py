"""A program as text: one line per instruction, for people (``neoserve inspect --program``) and for comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from neoserve.program.ir import Instruction, KvLayer, Operand, Program, View, Weight
from neoserve.program.plan import MemoryPlan, buffer_layout, buffer_rows
from neoserve.types.tensors import WeightFormat

_COPIES = frozenset({"embed", "gather_rows", "kv_write"})


@dataclass(frozen=True, slots=True)
class StepShape:
    """The step for which costs are given: tokens, logits rows, and the context length that attention reads."""

    tokens: int
    rows: int
    context: int


@dataclass(frozen=True, slots=True)
class Cost:
    """Work of one instruction in one step: bytes moved (weights, activations, KV; no cache reuse) and FLOPs.

    A multiply-add is two FLOPs; element-wise ops count one per output value, copies none.
    """

    nbytes: int
    flops: int


def program_text(program: Program) -> str:
    """All of a program that decides its result, without plan or costs: equal texts mean equal programs."""
    lines = [f"program {program.name}, {len(program.instructions)} instructions, vocabulary {program.vocab_size}"]
    for group in program.kv_groups:
        window = "full attention" if group.window is None else f"window {group.window}"
        lines.append(
            f"kv group {group.name}: {window}, {len(group.layers)} layers {_ranges(group.layers)}, "
            f"{group.num_kv_heads} heads x {group.head_dim}"
        )
    width = len(str(len(program.instructions)))
    for index, instruction in enumerate(program.instructions):
        lines.append(f"{index:>{width}} {_instruction(program, instruction)}  # {instruction.source}")
    return "\n".join(lines) + "\n"


def dump(
    program: Program,
    *,
    plan: MemoryPlan | None = None,
    shape: StepShape | None = None,
    rows: Mapping[int, str] | None = None,
    kv_item_bytes: int = 4,
) -> str:
    """Readable listing of a program, ending with totals.

    With ``plan`` each line gives the arena offset of its output, with ``shape`` bytes and FLOPs of such a step,
    with ``rows`` (instruction index to name) the kernel row that was bound.
    """
    listing = program_text(program).splitlines()
    head = 1 + len(program.kv_groups)
    lines = listing[:head]
    total_bytes = total_flops = 0
    for index, (instruction, text) in enumerate(zip(program.instructions, listing[head:], strict=True)):
        body, _, source = text.rpartition("  # ")
        notes = []
        if plan is not None and instruction.output is not None:
            notes.append(f"@{plan.allocations[instruction.output.buffer].offset}")
        if shape is not None:
            work = cost(program, instruction, shape, kv_item_bytes)
            total_bytes, total_flops = total_bytes + work.nbytes, total_flops + work.flops
            notes.append(f"{work.nbytes} B, {work.flops} FLOP")
        if rows is not None and index in rows:
            notes.append(f"row {rows[index]}")
        lines.append("  # ".join([body, *notes, source]))
    weights = sum(weight_bytes(weight) for weight in program.weights.values())
    vectors = sum(4 * vector.size for vector in program.vectors.values())
    lines.append(f"weights: {weights} B in {len(program.weights)} matrices, {vectors} B in vectors")
    if plan is not None:
        separate = sum(item.nbytes for item in plan.allocations.values())
        lines.append(
            f"arena: {plan.arena_bytes} B for {plan.max_tokens} tokens and {plan.max_rows} logits rows "
            f"({len(plan.allocations)} buffers, {separate} B without sharing)"
        )
    if shape is not None:
        lines.append(
            f"step of {shape.tokens} tokens, {shape.rows} logits rows, context {shape.context}: "
            f"{total_bytes} B, {total_flops} FLOP"
        )
    return "\n".join(lines) + "\n"


def weight_bytes(weight: Weight) -> int:
    """Bytes of a weight in its canonical format, without the padding of packed layouts."""
    return weight.n * _row_bytes(weight.format, weight.k)


def cost(program: Program, instruction: Instruction, shape: StepShape, kv_item_bytes: int = 4) -> Cost:
    """Bytes and FLOPs of ``instruction`` in a step of ``shape``, all tokens of one sequence.

    Attention counts all positions of the context for each token, an upper bound within a prefill chunk.
    """
    views = [operand for operand in (instruction.output, *instruction.inputs) if isinstance(operand, View)]
    moved = sum(_view_bytes(program, view, shape) for view in views)
    output = instruction.output or views[0]
    rows = buffer_rows(program.buffers[output.buffer].rows, shape.tokens, shape.rows)
    flops = 0 if instruction.op in _COPIES else rows * output.columns
    for operand in instruction.inputs:
        if isinstance(operand, str) and operand[1:] in program.weights:
            weight = program.weights[operand[1:]]
            if instruction.op == "embed":
                moved += rows * _row_bytes(weight.format, weight.k)
            else:
                moved, flops = moved + weight_bytes(weight), 2 * rows * weight.n * weight.k
        elif isinstance(operand, KvLayer):
            group = program.kv_groups[operand.group]
            row = 2 * group.num_kv_heads * group.head_dim * kv_item_bytes
            visible = min(shape.context, group.window or shape.context)
            if instruction.op == "attention":
                moved, flops = moved + row * visible, 4 * rows * output.columns * visible
            else:
                moved += row * shape.tokens
    return Cost(moved, flops)


def _row_bytes(fmt: WeightFormat, k: int) -> int:
    match fmt.kind:
        case "f32":
            return 4 * k
        case "bf16":
            return 2 * k
        case "int8_channel":
            return k + 4
    values = k if fmt.kind == "int8_group" else k // 2
    per_group = (2 if fmt.scale_type == "f16" else 4) * (2 if fmt.offset == "minimum" else 1)
    return values + k // fmt.group * (per_group + (1 if fmt.offset == "zero" else 0))


def _view_bytes(program: Program, view: View, shape: StepShape) -> int:
    buffer = program.buffers[view.buffer]
    rows = buffer_rows(buffer.rows, shape.tokens, shape.rows)
    if buffer.format in ("f32", "bf16"):
        return rows * view.columns * (4 if buffer.format == "f32" else 2)
    return buffer_layout(buffer.format, buffer.columns, rows).nbytes


def _instruction(program: Program, instruction: Instruction) -> str:
    inputs = ", ".join(_operand(program, operand) for operand in instruction.inputs)
    attributes = "".join(f" {name}={value!r}" for name, value in instruction.attributes)
    output = "" if instruction.output is None else f"{_operand(program, instruction.output)} = "
    return f"{instruction.label}: {output}{instruction.op}({inputs}){attributes}"


def _operand(program: Program, operand: Operand) -> str:
    if isinstance(operand, View):
        buffer = program.buffers[operand.buffer]
        symbol = "T" if buffer.rows == "tokens" else "R"
        whole = (operand.column, operand.columns) == (0, buffer.columns)
        columns = "" if whole else f"[:, {operand.column}:{operand.column + operand.columns}]"
        return f"{operand.buffer}{columns}:{buffer.format}[{symbol},{operand.columns}]"
    if isinstance(operand, KvLayer):
        return f"kv {program.kv_groups[operand.group].name}.{operand.index}"
    if operand[1:] in program.weights:
        weight = program.weights[operand[1:]]
        return f"{operand}:{weight.format}[{weight.n},{weight.k}]"
    if operand[1:] in program.vectors:
        return f"{operand}:f32[{program.vectors[operand[1:]].size}]"
    return operand


def _ranges(layers: tuple[int, ...]) -> str:
    """``0-4,6-10`` for ascending layers."""
    parts: list[list[int]] = []
    for layer in layers:
        if parts and parts[-1][1] == layer - 1:
            parts[-1][1] = layer
        else:
            parts.append([layer, layer])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
