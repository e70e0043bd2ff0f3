"""The shapes, formats and symbols that each op of docs/ops.md demands of its operands."""

from __future__ import annotations

from collections.abc import Callable

from neoserve.program.ir import Buffer, Instruction, KvLayer, Operand, Program, ProgramError, Vector, View, Weight
from neoserve.program.plan import activation_group
from neoserve.types.errors import CheckpointError


def check_shapes(program: Program, instruction: Instruction) -> None:
    """Raises ProgramError (CheckpointError for a weight whose K does not fit its group) unless operands agree."""
    check = _CHECKS.get(instruction.op)
    if check is None:
        raise ProgramError(f"op {instruction.op!r} does not exist; known: {', '.join(sorted(_CHECKS))}")
    check(_Op(program, instruction))


def kv_operand(operand: Operand) -> KvLayer:
    """``operand`` as a KV layer. Raises ProgramError otherwise."""
    _demand(isinstance(operand, KvLayer), f"operand {operand!r} is not a KV layer")
    assert isinstance(operand, KvLayer)
    return operand


def _demand(condition: bool, text: str) -> None:
    if not condition:
        raise ProgramError(text)


class _Op:
    """Typed access to the operands of one instruction."""

    def __init__(self, program: Program, instruction: Instruction) -> None:
        self.program = program
        self.instruction = instruction
        self.attributes = dict(instruction.attributes)

    def count(self, *allowed: int) -> None:
        found = len(self.instruction.inputs)
        _demand(found in allowed, f"has {found} inputs, expected {' or '.join(map(str, allowed))}")

    def names(self, *expected: str) -> None:
        _demand(set(self.attributes) == set(expected), f"has attributes {sorted(self.attributes)}, not {expected}")

    def view(self, index: int | None, fmt: str = "f32") -> tuple[View, Buffer]:
        """Input ``index``, or the output for None, and its buffer, which must be in format ``fmt``."""
        operand = self.instruction.output if index is None else self.instruction.inputs[index]
        what = "output" if index is None else f"input {index}"
        _demand(isinstance(operand, View), f"{what} {operand!r} is not a view")
        assert isinstance(operand, View)
        buffer = self.program.buffers.get(operand.buffer)
        _demand(buffer is not None, f"{what}: buffer {operand.buffer} does not exist")
        assert buffer is not None
        inside = operand.columns > 0 and operand.column >= 0 and operand.column + operand.columns <= buffer.columns
        _demand(inside, f"{what} {operand} lies outside its {buffer.columns} columns")
        _demand(buffer.format == fmt, f"{what} {operand.buffer} is {buffer.format}, expected {fmt}")
        return operand, buffer

    def weight(self, index: int) -> Weight:
        name = self.instruction.inputs[index]
        weight = self.program.weights.get(str(name)[1:])
        _demand(weight is not None, f"input {index} {name!r} is not a weight")
        assert weight is not None
        group = weight.format.group
        if group and weight.k % group:
            raise CheckpointError(
                f"weight {weight.name}: K {weight.k} is not a multiple of its group {group} ({weight.format}); "
                "use dtype bfloat16 or another quantisation of the model"
            )
        return weight

    def vector(self, index: int) -> Vector:
        name = self.instruction.inputs[index]
        vector = self.program.vectors.get(str(name)[1:])
        _demand(vector is not None, f"input {index} {name!r} is not a vector")
        assert vector is not None
        return vector

    def step_array(self, index: int, name: str) -> None:
        found = self.instruction.inputs[index]
        _demand(found == name, f"input {index} is {found!r}, expected {name}")

    def group(self, index: int) -> tuple[int, int]:
        """(kv heads, head_dim) of the KV layer that is input ``index``."""
        layer = kv_operand(self.instruction.inputs[index])
        groups = self.program.kv_groups
        exists = 0 <= layer.group < len(groups) and 0 <= layer.index < len(groups[layer.group].layers)
        _demand(exists, f"{layer} does not exist")
        return groups[layer.group].num_kv_heads, groups[layer.group].head_dim

    def same_rows(self, *buffers: Buffer) -> None:
        _demand(len({buffer.rows for buffer in buffers}) == 1, "operands mix [tokens, ...] and [rows, ...]")


def _columns(what: str, found: int, expected: int) -> None:
    _demand(found == expected, f"{what} has {found} columns, expected {expected}")


def _embed(op: _Op) -> None:
    op.count(2)
    op.names("scale")
    op.step_array(0, "@token_ids")
    out, buffer = op.view(None)
    _columns("output", out.columns, op.weight(1).k)
    _demand(buffer.rows == "tokens", "output must be [tokens, ...]")


def _rms_norm(op: _Op) -> None:
    op.count(2)
    op.names("width", "eps")
    (x, source), (out, target) = op.view(0), op.view(None)
    width = int(op.attributes["width"])
    _columns("output", out.columns, x.columns)
    _demand(width > 0 and x.columns % width == 0, f"width {width} does not divide {x.columns} columns")
    _demand(op.vector(1).size == width, f"weight has {op.vector(1).size} values, width is {width}")
    op.same_rows(source, target)


def _quantize(op: _Op) -> None:
    op.count(1)
    op.names()
    x, source = op.view(0)
    output = op.instruction.output
    target = op.program.buffers.get(output.buffer) if output is not None else None
    _demand(target is not None and target.format != "f32", "output must be a buffer of another format than f32")
    assert output is not None
    assert target is not None
    op.view(None, target.format)
    _demand((output.column, output.columns) == (0, target.columns), "output must be a whole buffer")
    _columns("output", output.columns, x.columns)
    if target.format != "bf16":
        activation_group(target.format, x.columns)
    op.same_rows(source, target)


def _linear(op: _Op) -> None:
    op.count(2, 3)
    op.names("accumulate")
    weight = op.weight(1)
    x, source = op.view(0, weight.format.activation)
    out, target = op.view(None)
    _columns("input", x.columns, weight.k)
    _columns("output", out.columns, weight.n)
    if len(op.instruction.inputs) == 3:
        _demand(op.vector(2).size == weight.n, f"bias has {op.vector(2).size} values, the weight {weight.n} rows")
    op.same_rows(source, target)


def _rope_table(op: _Op) -> None:
    op.count(2)
    op.names("attention_factor")
    op.step_array(0, "@positions")
    out, buffer = op.view(None)
    _columns("output", out.columns, 2 * op.vector(1).size)
    _demand(buffer.rows == "tokens", "output must be [tokens, ...]")


def _rope(op: _Op) -> None:
    op.count(2)
    op.names("head_dim")
    (x, source), (table, angles) = op.view(0), op.view(1)
    head_dim = int(op.attributes["head_dim"])
    _demand(op.instruction.output == x, "output must be the first input")
    _demand(head_dim > 0 and x.columns % head_dim == 0, f"head_dim {head_dim} does not divide {x.columns} columns")
    fits = table.columns <= head_dim and table.columns % 2 == 0
    _demand(fits, f"a table of {table.columns} columns does not fit head_dim {head_dim}")
    op.same_rows(source, angles)


def _kv_write(op: _Op) -> None:
    op.count(3)
    op.names()
    _demand(op.instruction.output is None, "writes pages, not a buffer")
    heads, head_dim = op.group(2)
    for index in (0, 1):
        view, buffer = op.view(index)
        _columns(f"input {index}", view.columns, heads * head_dim)
        _demand(buffer.rows == "tokens", f"input {index} must be [tokens, ...]")


def _attention(op: _Op) -> None:
    op.count(2)
    op.names("scale", "window", "heads", "kv_heads", "head_dim")
    (q, source), (out, target) = op.view(0), op.view(None)
    heads, kv_heads, head_dim = (int(op.attributes[name]) for name in ("heads", "kv_heads", "head_dim"))
    _demand((kv_heads, head_dim) == op.group(1), f"kv heads {kv_heads} x {head_dim} differ from its pages")
    _demand(heads > 0 and heads % kv_heads == 0, f"{heads} heads are not a multiple of {kv_heads} kv heads")
    _columns("input", q.columns, heads * head_dim)
    _columns("output", out.columns, q.columns)
    layer = kv_operand(op.instruction.inputs[1])
    window = op.program.kv_groups[layer.group].window or 0
    _demand(op.attributes["window"] == window, f"window {op.attributes['window']} differs from its pages' {window}")
    _demand(source.rows == target.rows == "tokens", "operands must be [tokens, ...]")


def _gated(op: _Op) -> None:
    op.count(1)
    op.names()
    (x, source), (out, target) = op.view(0), op.view(None)
    _columns("input", x.columns, 2 * out.columns)
    op.same_rows(source, target)


def _add(op: _Op) -> None:
    op.count(2)
    op.names()
    (x, first), (y, second) = op.view(0), op.view(1)
    _demand(op.instruction.output == x, "output must be the first input")
    _columns("input 1", y.columns, x.columns)
    op.same_rows(first, second)


def _gather_rows(op: _Op) -> None:
    op.count(2)
    op.names()
    op.step_array(1, "@logit_rows")
    (x, source), (out, target) = op.view(0), op.view(None)
    _columns("output", out.columns, x.columns)
    _demand((source.rows, target.rows) == ("tokens", "rows"), "copies from [tokens, ...] to [rows, ...]")


_CHECKS: dict[str, Callable[[_Op], None]] = {
    "embed": _embed,
    "rms_norm": _rms_norm,
    "quantize": _quantize,
    "linear": _linear,
    "rope_table": _rope_table,
    "rope": _rope,
    "kv_write": _kv_write,
    "attention": _attention,
    "silu_mul": _gated,
    "gelu_tanh_mul": _gated,
    "add": _add,
    "gather_rows": _gather_rows,
}
