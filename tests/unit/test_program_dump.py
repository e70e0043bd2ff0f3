"""The printed program: what people read, and what comparison of programs rests on."""

from __future__ import annotations

import re

import pytest

from neoserve.models.registry import build_program
from neoserve.program.dump import StepShape, cost, dump, program_text, weight_bytes
from neoserve.program.ir import Weight
from neoserve.program.plan import plan_memory
from neoserve.types.tensors import WeightFormat

from .program_fakes import (
    BF16,
    F32,
    INT4_MINIMUM,
    INT4_ZERO,
    INT8_CHANNEL,
    INT8_G16,
    INT8_G32,
    catalog_of,
    decoder_shapes,
    fake_tensors,
    llama_config,
)

WINDOWS = {"architecture": "mistral", "num_layers": 3, "layer_windows": (8, 8, None), "layer_ropes": (0, 0, 0)}
CONFIG = llama_config(**WINDOWS)
PROGRAM = build_program(CONFIG, catalog_of(fake_tensors(decoder_shapes(CONFIG), INT8_G32)))


def line(text: str, start: str) -> str:
    return next(item for item in text.splitlines() if start in item)


def test_every_instruction_has_a_line_with_shape_type_and_source() -> None:
    lines = program_text(PROGRAM).splitlines()
    assert len(lines) == 1 + 2 + len(PROGRAM.instructions)
    for text in lines[3:]:
        assert re.search(r"#  ?blocks/\w+\.py:\d+$", text), text
    linear = line(program_text(PROGRAM), "layers.1.attention.{q,k,v}: ")
    assert "qkv" in linear
    assert "f32[T,128] = linear(" in linear
    assert "int8_g32[T,64]" in linear
    assert "%layers.1.attention.{q,k,v}:int8_g32_f16[128,64]" in linear


def test_groups_are_described() -> None:
    text = program_text(PROGRAM)
    assert "kv group window_8: window 8, 2 layers 0-1, 2 heads x 16" in text
    assert "kv group full: full attention, 1 layers 2, 2 heads x 16" in text


def test_views_show_their_columns() -> None:
    assert re.search(r"rope\(qkv\.\d+\[:, 64:96\]:f32\[T,32\]", program_text(PROGRAM))


def test_text_differs_when_an_attribute_differs() -> None:
    other = llama_config(**WINDOWS, rms_norm_eps=1e-6)
    text = program_text(build_program(other, catalog_of(fake_tensors(decoder_shapes(other), INT8_G32))))
    assert text != program_text(PROGRAM)


def test_dump_adds_offsets_costs_rows_and_totals() -> None:
    plan = plan_memory(PROGRAM, 32, 4)
    head = len(PROGRAM.instructions) - 1
    text = dump(PROGRAM, plan=plan, shape=StepShape(4, 2, 100), rows={head: "linear_int8_avx2"})
    assert f"# @{plan.allocations['logits'].offset}  # " in line(text, "logits:f32")
    assert "# row linear_int8_avx2" in line(text, "logits:f32")
    assert f"arena: {plan.arena_bytes} B for 32 tokens and 4 logits rows" in text
    total = sum(cost(PROGRAM, item, StepShape(4, 2, 100)).flops for item in PROGRAM.instructions)
    assert f"{total} FLOP" in text.splitlines()[-1]


def test_flops_of_a_linear_and_of_attention() -> None:
    shape = StepShape(tokens=4, rows=2, context=100)
    by_label = {item.label: item for item in PROGRAM.instructions}
    assert cost(PROGRAM, by_label["layers.0.mlp.down"], shape).flops == 2 * 4 * 64 * 96
    assert cost(PROGRAM, by_label["lm_head"], shape).flops == 2 * 2 * 96 * 64
    assert cost(PROGRAM, by_label["layers.2.attention"], shape).flops == 4 * 4 * 64 * 100
    assert cost(PROGRAM, by_label["layers.0.attention"], shape).flops == 4 * 4 * 64 * 8, "a window bounds the work"
    assert cost(PROGRAM, by_label["embedding"], shape).flops == 0


def test_bytes_of_decode_are_near_the_weights() -> None:
    shape = StepShape(1, 1, 1)
    moved = sum(cost(PROGRAM, item, shape).nbytes for item in PROGRAM.instructions)
    streamed = sum(weight_bytes(weight) for name, weight in PROGRAM.weights.items() if name != "embedding")
    assert streamed < moved < 1.5 * streamed


@pytest.mark.parametrize(
    ("fmt", "row"),
    [
        (F32, 512), (BF16, 256), (INT8_CHANNEL, 128 + 4), (INT8_G32, 128 + 4 * 2), (INT8_G16, 128 + 8 * 4),
        (INT4_MINIMUM, 64 + 4 * 8), (INT4_ZERO, 64 + 4 * 3),
    ],
    ids=str,
)  # fmt: skip
def test_weight_bytes(fmt: WeightFormat, row: int) -> None:
    assert weight_bytes(Weight("w", ("w",), 10, 128, fmt)) == 10 * row
