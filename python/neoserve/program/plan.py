"""Places the buffers of a program in one arena, so that a step allocates nothing (design D2)."""

from __future__ import annotations

from dataclasses import dataclass

from neoserve.program.ir import LOGITS, Buffer, Program, ProgramError, Symbol, View
from neoserve.program.phases import phases

ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector."""


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """Byte offsets of a buffer's parts from its start; a part that its format does not have is None.

    ``values`` is [rows, row_bytes]; for int8 formats ``scales`` is f32 and ``sums`` int32, both
    [rows, groups]. Each part starts at a multiple of 64 bytes.
    """

    row_bytes: int
    groups: int
    scales: int | None
    sums: int | None
    nbytes: int


@dataclass(frozen=True, slots=True)
class Allocation:
    """Bytes [offset, offset + nbytes) of the arena, live from instruction ``first`` to ``last`` inclusive."""

    offset: int
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where every buffer lies for steps of up to ``max_tokens`` tokens and ``max_rows`` logits rows."""

    max_tokens: int
    max_rows: int
    arena_bytes: int
    allocations: dict[str, Allocation]


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


def activation_group(fmt: str, columns: int) -> int:
    """Columns that share one scale in an int8 activation format: all, or N of ``int8_gN``."""
    if fmt == "int8_token":
        return columns
    group = int(fmt.removeprefix("int8_g")) if fmt.startswith("int8_g") and fmt[6:].isdigit() else 0
    if group <= 0 or columns % group:
        raise ProgramError(f"activation format {fmt!r} does not fit {columns} columns")
    return group


def buffer_layout(fmt: str, columns: int, rows: int) -> BufferLayout:
    """Layout of [rows, columns] in activation format ``fmt``: f32, bf16, int8_token or int8_gN.

    Raises ProgramError on an unknown format, or columns that are not a multiple of the group.
    """
    if fmt in ("f32", "bf16"):
        row_bytes = columns * (4 if fmt == "f32" else 2)
        return BufferLayout(row_bytes, 0, None, None, round_up(rows * row_bytes, ALIGNMENT))
    groups = columns // activation_group(fmt, columns)
    row_bytes = round_up(columns, ALIGNMENT)
    scales = rows * row_bytes
    sums = scales + round_up(rows * groups * 4, ALIGNMENT)
    return BufferLayout(row_bytes, groups, scales, sums, sums + round_up(rows * groups * 4, ALIGNMENT))


def buffer_rows(symbol: Symbol, max_tokens: int, max_rows: int) -> int:
    """The bound of a buffer's first dimension."""
    return max_tokens if symbol == "tokens" else max_rows


def live_ranges(program: Program) -> dict[str, tuple[int, int]]:
    """First and last instruction of the phases that touch each buffer: inside a phase, threads are at different
    instructions. The logits stay live: they are read after the step."""
    ranges: dict[str, tuple[int, int]] = {}
    bounds = [(first, end - 1) for first, end in phases(program) for _ in range(first, end)]
    for index, instruction in enumerate(program.instructions):
        views = [operand for operand in (instruction.output, *instruction.inputs) if isinstance(operand, View)]
        for view in views:
            first, _ = ranges.get(view.buffer, bounds[index])
            ranges[view.buffer] = (first, bounds[index][1])
    if LOGITS in ranges:
        ranges[LOGITS] = (ranges[LOGITS][0], len(program.instructions))
    return ranges


def plan_memory(program: Program, max_tokens: int, max_rows: int) -> MemoryPlan:
    """Offsets of all buffers, 64-byte aligned; buffers that are live at the same time never overlap.

    Largest buffers are placed first, each at the lowest offset where it fits among those it meets in time: the
    usual heuristic, near the lower bound for chains of layers. Raises ProgramError on bounds below 1.
    """
    if max_tokens < 1 or max_rows < 1:
        raise ProgramError(f"bounds max_tokens {max_tokens} and max_rows {max_rows} must be at least 1")
    ranges = live_ranges(program)
    sizes = {name: _nbytes(program.buffers[name], max_tokens, max_rows) for name in ranges}
    placed: dict[str, Allocation] = {}
    for name in sorted(ranges, key=lambda name: (-sizes[name], ranges[name], name)):
        first, last = ranges[name]
        offset = _lowest_fit(sizes[name], first, last, placed)
        placed[name] = Allocation(offset, sizes[name], first, last)
    arena = max((item.offset + item.nbytes for item in placed.values()), default=0)
    return MemoryPlan(max_tokens, max_rows, arena, placed)


def _nbytes(buffer: Buffer, max_tokens: int, max_rows: int) -> int:
    rows = buffer_rows(buffer.rows, max_tokens, max_rows)
    return buffer_layout(buffer.format, buffer.columns, rows).nbytes


def _lowest_fit(nbytes: int, first: int, last: int, placed: dict[str, Allocation]) -> int:
    meeting = [item for item in placed.values() if item.first <= last and first <= item.last]
    offset = 0
    for item in sorted(meeting, key=lambda item: item.offset):
        if offset + nbytes <= item.offset:
            break
        offset = max(offset, item.offset + item.nbytes)
    return offset
