"""Where a replay needs no barrier: chains of ops in which every row depends on the same row alone.

A thread takes its rows through the whole chain, so that a layer costs a barrier per product and per attention, not per
op. The memory plan keeps all buffers of a chain apart, since its threads are at different ops.
"""

from __future__ import annotations

from neoserve.program.ir import Instruction, Program, Symbol

_DIVIDED = ("linear", "attention")
"""Ops whose work is divided otherwise than by rows."""


def phases(program: Program) -> list[tuple[int, int]]:
    """Instructions [first, end) that run between two barriers, in order; together they are the whole program."""
    found: list[tuple[int, int]] = []
    for index, instruction in enumerate(program.instructions):
        if index and _joins(program, program.instructions[index - 1], instruction):
            found[-1] = (found[-1][0], index + 1)
        else:
            found.append((index, index + 1))
    return found


def _joins(program: Program, previous: Instruction, instruction: Instruction) -> bool:
    # gather_rows reads rows that other threads may still be writing, so it can only begin a chain.
    if instruction.op == "gather_rows" or instruction.op in _DIVIDED or previous.op in _DIVIDED:
        return False
    return _symbol(program, previous) == _symbol(program, instruction)


def _symbol(program: Program, instruction: Instruction) -> Symbol:
    if instruction.output is None:  # kv_write stores one row per token
        return "tokens"
    return program.buffers[instruction.output.buffer].rows
