"""Phases: which instructions run without a barrier between them, and that the memory plan allows it."""

from __future__ import annotations

from itertools import combinations

import pytest

from neoserve.models.registry import build_program
from neoserve.program.ir import Program, View
from neoserve.program.phases import phases
from neoserve.program.plan import plan_memory
from neoserve.types.tensors import F32, WeightFormat

from .program_fakes import INT4_MINIMUM, INT8_G16, catalog_of, decoder_shapes, fake_tensors, llama_config


def llama_program(fmt: WeightFormat) -> Program:
    config = llama_config()
    return build_program(config, catalog_of(fake_tensors(decoder_shapes(config), fmt)))


def buffers_of(program: Program, first: int, end: int) -> set[str]:
    operands = [
        operand
        for instruction in program.instructions[first:end]
        for operand in (instruction.output, *instruction.inputs)
    ]
    return {operand.buffer for operand in operands if isinstance(operand, View)}


@pytest.mark.parametrize("fmt", [F32, INT8_G16, INT4_MINIMUM], ids=str)
def test_phases_cover_the_program_in_order(fmt: WeightFormat) -> None:
    program = llama_program(fmt)
    found = phases(program)
    assert [first for first, _ in found] == [0, *(end for _, end in found[:-1])]
    assert found[-1][1] == len(program.instructions)


@pytest.mark.parametrize("fmt", [F32, INT8_G16, INT4_MINIMUM], ids=str)
def test_products_attention_and_gathers_stand_behind_a_barrier(fmt: WeightFormat) -> None:
    program = llama_program(fmt)
    starts = {first for first, _ in phases(program)}
    alone = {first for first, end in phases(program) if end == first + 1}
    for index, instruction in enumerate(program.instructions):
        if instruction.op in ("linear", "attention"):
            assert index in alone
        if instruction.op == "gather_rows":
            assert index in starts
    assert len(starts) < len(program.instructions)


@pytest.mark.parametrize("fmt", [F32, INT8_G16, INT4_MINIMUM], ids=str)
def test_buffers_of_one_phase_never_share_memory(fmt: WeightFormat) -> None:
    program = llama_program(fmt)
    plan = plan_memory(program, max_tokens=48, max_rows=5)
    for first, end in phases(program):
        for one, other in combinations(sorted(buffers_of(program, first, end)), 2):
            a, b = plan.allocations[one], plan.allocations[other]
            assert a.offset + a.nbytes <= b.offset or b.offset + b.nbytes <= a.offset, (one, other)
