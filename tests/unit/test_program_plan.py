"""Memory planning: buffers that are live at once never overlap, and layouts are the documented ones."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neoserve.models.registry import build_program
from neoserve.program.ir import LOGITS, Buffer, Instruction, Program, ProgramError, View
from neoserve.program.phases import phases
from neoserve.program.plan import (
    ALIGNMENT,
    Allocation,
    MemoryPlan,
    activation_group,
    buffer_layout,
    live_ranges,
    plan_memory,
)

from .program_fakes import FORMATS, catalog_of, decoder_shapes, fake_tensors, llama_config


def overlaps(plan: MemoryPlan) -> list[tuple[str, str]]:
    """Pairs of buffers that share bytes while both are live; written apart from the planner's own test."""
    items = sorted(plan.allocations.items())

    def clash(a: Allocation, b: Allocation) -> bool:
        times = set(range(a.first, a.last + 1)) & set(range(b.first, b.last + 1))
        return bool(times) and max(a.offset, b.offset) < min(a.offset + a.nbytes, b.offset + b.nbytes)

    return [(n, m) for i, (n, a) in enumerate(items) for m, b in items[i + 1 :] if clash(a, b)]


FORMAT_COLUMNS = st.one_of(
    st.tuples(st.just("f32"), st.integers(1, 300)),
    st.tuples(st.just("bf16"), st.integers(1, 300)),
    st.tuples(st.just("int8_token"), st.integers(1, 300)),
    st.tuples(st.just("int8_g32"), st.integers(1, 9).map(lambda groups: 32 * groups)),
)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Random lifetimes: each instruction writes a new buffer and reads some earlier ones."""
    count = draw(st.integers(1, 24))
    buffers, instructions = {}, []
    for index in range(count):
        fmt, columns = draw(FORMAT_COLUMNS)
        name = LOGITS if index == count - 1 else f"b{index}"
        buffers[name] = Buffer(name, draw(st.sampled_from(["tokens", "rows"])), columns, fmt)
        earlier = draw(st.lists(st.sampled_from(sorted(buffers)), max_size=3, unique=True))
        inputs = tuple(View(other, 0, buffers[other].columns) for other in earlier if other != name)
        instructions.append(Instruction("any", View(name, 0, columns), inputs))
    return Program("random", tuple(instructions), buffers, vocab_size=1)


@settings(max_examples=120, deadline=None)
@given(programs(), st.integers(1, 70), st.integers(1, 9))
def test_live_buffers_never_overlap(program: Program, tokens: int, rows: int) -> None:
    plan = plan_memory(program, tokens, rows)
    assert overlaps(plan) == []
    assert plan.allocations.keys() == program.buffers.keys()
    for item in plan.allocations.values():
        assert item.offset % ALIGNMENT == 0
        assert item.offset + item.nbytes <= plan.arena_bytes


@settings(max_examples=60, deadline=None)
@given(programs())
def test_the_arena_is_no_larger_than_all_buffers_and_no_smaller_than_the_peak(program: Program) -> None:
    plan = plan_memory(program, 16, 16)
    items = plan.allocations.values()
    peak = max(
        sum(item.nbytes for item in items if item.first <= index <= item.last)
        for index in range(len(program.instructions))
    )
    assert peak <= plan.arena_bytes <= sum(item.nbytes for item in items)


def test_overlap_check_can_fail() -> None:
    plan = MemoryPlan(1, 1, 192, {"a": Allocation(0, 128, 0, 4), "b": Allocation(64, 128, 4, 5)})
    assert overlaps(plan) == [("a", "b")]


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_models_in_every_format(fmt: object) -> None:
    config = llama_config(num_layers=6)
    program = build_program(config, catalog_of(fake_tensors(decoder_shapes(config), fmt)))  # type: ignore[arg-type]
    plan = plan_memory(program, 64, 8)
    assert overlaps(plan) == []
    deeper = llama_config(num_layers=12)
    twice = build_program(deeper, catalog_of(fake_tensors(decoder_shapes(deeper), fmt)))  # type: ignore[arg-type]
    assert plan_memory(twice, 64, 8).arena_bytes == plan.arena_bytes, "layers must share their activations' memory"


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_buffers_of_one_phase_are_apart(fmt: object, architecture: str) -> None:
    """Inside a phase threads are at different instructions: a buffer that one has finished is still read by another."""
    changes = {"architecture": "gemma3", "qk_norm": True, "post_norms": True, "activation": "gelu_tanh"}
    config = llama_config(**(changes if architecture == "gemma3" else {}))
    program = build_program(config, catalog_of(fake_tensors(decoder_shapes(config), fmt)))  # type: ignore[arg-type]
    plan, found = plan_memory(program, 320, 8), phases(program)
    assert [index for first, end in found for index in range(first, end)] == list(range(len(program.instructions)))
    assert len(found) < len(program.instructions)
    for first, end in found:
        touched = {
            operand.buffer
            for item in program.instructions[first:end]
            for operand in (item.output, *item.inputs)
            if isinstance(operand, View)
        }
        spans = sorted((plan.allocations[name].offset, plan.allocations[name].nbytes) for name in touched)
        assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(spans))


def test_the_logits_outlive_the_program() -> None:
    config = llama_config()
    program = build_program(config, catalog_of(fake_tensors(decoder_shapes(config))))
    assert live_ranges(program)[LOGITS][1] == len(program.instructions)


def test_larger_bounds_need_more_memory() -> None:
    config = llama_config()
    program = build_program(config, catalog_of(fake_tensors(decoder_shapes(config))))
    small, large = plan_memory(program, 8, 8), plan_memory(program, 512, 8)
    assert small.arena_bytes * 32 < large.arena_bytes


@pytest.mark.parametrize(("tokens", "rows"), [(0, 1), (1, 0), (-1, 1)])
def test_bounds_below_one_are_refused(tokens: int, rows: int) -> None:
    with pytest.raises(ProgramError, match="must be at least 1"):
        plan_memory(Program("empty", ()), tokens, rows)


class TestLayouts:
    def test_f32(self) -> None:
        layout = buffer_layout("f32", 100, 3)
        assert (layout.row_bytes, layout.scales, layout.sums, layout.nbytes) == (400, None, None, 1216)

    def test_bf16(self) -> None:
        assert (buffer_layout("bf16", 100, 3).row_bytes, buffer_layout("bf16", 100, 3).nbytes) == (200, 640)

    def test_int8_per_token(self) -> None:
        layout = buffer_layout("int8_token", 100, 3)
        assert (layout.row_bytes, layout.groups) == (128, 1)
        assert (layout.scales, layout.sums, layout.nbytes) == (384, 448, 512)

    def test_int8_per_group(self) -> None:
        layout = buffer_layout("int8_g32", 96, 5)
        assert (layout.row_bytes, layout.groups) == (128, 3)
        assert (layout.scales, layout.sums, layout.nbytes) == (640, 704, 768)

    @pytest.mark.parametrize("fmt", ["f32", "bf16", "int8_token", "int8_g32"])
    def test_parts_are_aligned(self, fmt: str) -> None:
        for rows in (1, 7, 64):
            layout = buffer_layout(fmt, 160, rows)
            assert all(part is None or part % ALIGNMENT == 0 for part in (layout.scales, layout.sums, layout.nbytes))

    @pytest.mark.parametrize(
        ("fmt", "columns"), [("int8_g32", 100), ("int8_g0", 64), ("int8_gx", 64), ("f16", 64), ("int8", 64)]
    )
    def test_unknown_formats_are_refused(self, fmt: str, columns: int) -> None:
        with pytest.raises(ProgramError, match=f"{fmt}.*{columns} columns"):
            buffer_layout(fmt, columns, 1)

    def test_group(self) -> None:
        assert (activation_group("int8_token", 100), activation_group("int8_g16", 96)) == (100, 16)


def test_a_view_of_part_of_a_buffer_keeps_the_whole_alive() -> None:
    buffers = {name: Buffer(name, "tokens", 32) for name in ("a", "b", LOGITS)}
    program = Program(
        "views",
        (
            Instruction("any", View("a", 0, 16), ()),
            Instruction("any", View("b", 0, 32), ()),
            Instruction("any", View(LOGITS, 0, 32), (View("a", 0, 16), View("b", 0, 32))),
        ),
        buffers,
    )
    plan = plan_memory(program, 4, 4)
    assert (plan.allocations["a"].first, plan.allocations["a"].last) == (0, 2)
    assert plan.allocations["a"].nbytes == 4 * 32 * 4
