"""Checks a recorded program before it is bound: a fault of a model's definition is found here, not in a kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from neoserve.program import verify_ops
from neoserve.program.catalog import Catalog
from neoserve.program.dump import program_text
from neoserve.program.ir import LOGITS, Instruction, KvLayer, Program, ProgramError, Vector, View, Weight
from neoserve.program.trace import TraceBounds
from neoserve.types.errors import CheckpointError

IN_PLACE_OPS = frozenset({"add", "rope", "rms_norm"})
"""Ops whose first input may be the very view that they write; no other input may touch the output's columns."""

STEP_ARRAYS = frozenset({"@token_ids", "@positions", "@logit_rows"})


@dataclass(slots=True)
class _State:
    """What has been written so far: per buffer a mask of columns and a version; per quantised buffer its source's."""

    written: dict[str, npt.NDArray[np.bool_]] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    sources: dict[str, tuple[str, int]] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)
    kv_written: set[KvLayer] = field(default_factory=set)
    kv_read: set[KvLayer] = field(default_factory=set)


def verify(program: Program, catalog: Catalog) -> None:
    """Raises ProgramError naming the instruction unless the program keeps every rule.

    Operands are written before they are read, shapes, formats and symbols agree, no op reads what it overwrites
    (but for in-place ops), no quantised copy is older than its source, each KV layer is written and then read once,
    and every buffer, weight and vector is used. A parameter of ``catalog`` that no instruction uses, or whose K is not
    a multiple of its group, is a CheckpointError naming it.
    """
    state = _State()
    for index, instruction in enumerate(program.instructions):
        try:
            _check_instruction(program, instruction, state)
        except (ProgramError, CheckpointError) as error:
            place = f"program {program.name}, instruction {index} {instruction.op} {instruction.label}"
            raise type(error)(f"{place} ({instruction.source}): {error}") from None
    _check_result(program, state)
    _check_uses(program, catalog, state)
    _check_kv(program, state)


def check_symbolic(build: Callable[[TraceBounds], Program]) -> Program:
    """Traces with two different bounds and returns the program if both are equal, text and all.

    A Python value or branch that depends on the size of a step would be frozen into the program; it shows as a
    difference here. Raises ProgramError with the first line that differs.
    """
    first, second = build(TraceBounds(512, 64)), build(TraceBounds(37, 5))
    texts = program_text(first).splitlines(), program_text(second).splitlines()
    for one, other in zip(*texts, strict=False):
        if one != other:
            raise ProgramError(f"program {first.name} depends on the bounds of a step: {one!r} became {other!r}")
    if first != second:
        raise ProgramError(f"program {first.name} depends on the bounds of a step: traces differ in length or values")
    return first


def _check_instruction(program: Program, instruction: Instruction, state: _State) -> None:
    for operand in instruction.inputs:
        if isinstance(operand, View):
            _check_read(program, operand, state)
        elif isinstance(operand, str):
            _check_name(program, operand, state)
    verify_ops.check_shapes(program, instruction)
    _check_aliases(instruction)
    if instruction.op == "kv_write":
        _once(verify_ops.kv_operand(instruction.inputs[2]), state.kv_written, "written")
    if instruction.op == "attention":
        layer = verify_ops.kv_operand(instruction.inputs[1])
        if layer not in state.kv_written:
            raise ProgramError(f"KV {layer} is read before it is written")
        _once(layer, state.kv_read, "read")
    if instruction.output is not None:
        _note_write(program, instruction, instruction.output, state)


def _check_read(program: Program, view: View, state: _State) -> None:
    if view.buffer not in program.buffers:
        raise ProgramError(f"buffer {view.buffer} does not exist")
    written = state.written.get(view.buffer)
    if written is None or not written[view.column : view.column + view.columns].all():
        raise ProgramError(f"{view} is read before all of its columns are written")
    source = state.sources.get(view.buffer)
    if source is not None and state.versions[source[0]] != source[1]:
        raise ProgramError(f"quantised buffer {view.buffer} is stale: {source[0]} was written after it was made")
    state.read.add(view.buffer)


def _check_name(program: Program, name: str, state: _State) -> None:
    if name.startswith("@"):
        if name not in STEP_ARRAYS:
            raise ProgramError(f"step array {name} does not exist; known: {', '.join(sorted(STEP_ARRAYS))}")
    elif name.startswith("%") and (name[1:] in program.weights or name[1:] in program.vectors):
        state.used.add(name[1:])
    else:
        raise ProgramError(f"operand {name!r} names no weight, vector or step array")


def _check_aliases(instruction: Instruction) -> None:
    output = instruction.output
    for position, operand in enumerate(instruction.inputs):
        if output is None or not isinstance(operand, View) or not _overlap(operand, output):
            continue
        if not (position == 0 and operand == output and instruction.op in IN_PLACE_OPS):
            raise ProgramError(f"input {position} {operand} overlaps the output {output}")


def _overlap(a: View, b: View) -> bool:
    return a.buffer == b.buffer and a.column < b.column + b.columns and b.column < a.column + a.columns


def _note_write(program: Program, instruction: Instruction, view: View, state: _State) -> None:
    buffer = program.buffers.get(view.buffer)
    if buffer is None or view.column < 0 or view.column + view.columns > buffer.columns:
        raise ProgramError(f"output {view} lies outside its buffer")
    written = state.written.setdefault(view.buffer, np.zeros(buffer.columns, np.bool_))
    columns = written[view.column : view.column + view.columns]
    if dict(instruction.attributes).get("accumulate") and not columns.all():
        raise ProgramError(f"output {view} is accumulated into before it is written")
    columns[:] = True
    state.versions[view.buffer] = state.versions.get(view.buffer, 0) + 1
    if instruction.op == "quantize":
        source = instruction.inputs[0]
        assert isinstance(source, View)  # check_shapes has refused anything else
        state.sources[view.buffer] = (source.buffer, state.versions[source.buffer])


def _once(layer: KvLayer, seen: set[KvLayer], verb: str) -> None:
    if layer in seen:
        raise ProgramError(f"KV {layer} is {verb} twice")
    seen.add(layer)


def _check_result(program: Program, state: _State) -> None:
    logits = program.buffers.get(LOGITS)
    if logits is None or (logits.rows, logits.columns, logits.format) != ("rows", program.vocab_size, "f32"):
        raise ProgramError(f"program {program.name} needs buffer {LOGITS} f32 [rows, {program.vocab_size}]")
    if LOGITS not in state.written or not state.written[LOGITS].all():
        raise ProgramError(f"program {program.name} does not write all columns of {LOGITS}")
    unread = program.buffers.keys() - state.read - {LOGITS}
    if unread:
        raise ProgramError(f"program {program.name} never reads buffer {min(unread)}")


def _check_uses(program: Program, catalog: Catalog, state: _State) -> None:
    unused = (program.weights.keys() | program.vectors.keys()) - state.used
    if unused:
        raise ProgramError(f"program {program.name} never uses {min(unused)}")
    seen: dict[str, str] = {}
    items: list[Weight | Vector] = [*program.weights.values(), *program.vectors.values()]
    for item in items:
        for part in item.parts:
            if part in seen:
                raise ProgramError(f"parameter {part} is packed twice, in {seen[part]} and in {item.name}")
            seen[part] = item.name
    left = catalog.keys() - seen.keys()
    if left:
        raise CheckpointError(
            f"tensor {min(left)} of the checkpoint is not used by architecture {program.name} ({len(left)} such "
            "tensors); the config does not describe this checkpoint"
        )


def _check_kv(program: Program, state: _State) -> None:
    layers = [layer for group in program.kv_groups for layer in group.layers]
    if sorted(layers) != list(range(len(layers))):
        raise ProgramError(f"program {program.name}: KV groups hold layers {sorted(layers)}, not each layer once")
    expected = {KvLayer(g, i) for g, group in enumerate(program.kv_groups) for i in range(len(group.layers))}
    for verb, seen in (("written", state.kv_written), ("read", state.kv_read)):
        if seen != expected:
            raise ProgramError(f"program {program.name}: KV layers {sorted(map(str, expected ^ seen))} are not {verb}")
