"""The verifier finds each kind of broken program, and names the instruction."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from neoserve.models.registry import build_program
from neoserve.program.ir import LOGITS, Buffer, Instruction, KvLayer, Program, ProgramError, Vector, View
from neoserve.program.verify import verify
from neoserve.types.errors import CheckpointError
from neoserve.types.tensors import WeightFormat

from .program_fakes import BF16, INT8_G32, catalog_of, decoder_shapes, fake_tensors, llama_config

CONFIG = llama_config(num_layers=2)
CATALOG = catalog_of(fake_tensors(decoder_shapes(CONFIG), INT8_G32))
GOOD = build_program(CONFIG, CATALOG)


def find(op: str, nth: int = 0) -> int:
    return [index for index, item in enumerate(GOOD.instructions) if item.op == op][nth]


def with_instructions(items: list[Instruction]) -> Program:
    return replace(GOOD, instructions=tuple(items))


def changed(op_name: str, nth: int = 0, /, **changes: object) -> Program:
    """GOOD with fields of one instruction replaced."""
    items = list(GOOD.instructions)
    index = find(op_name, nth)
    items[index] = replace(items[index], **changes)  # type: ignore[arg-type]
    return with_instructions(items)


def attribute(op: str, name: str, value: int | float) -> Program:
    old = GOOD.instructions[find(op)].attributes
    return changed(op, attributes=tuple((key, value if key == name else kept) for key, kept in old))


def input_of(op: str, position: int, operand: object) -> Program:
    inputs = list(GOOD.instructions[find(op)].inputs)
    inputs[position] = operand  # type: ignore[call-overload]
    return changed(op, inputs=tuple(inputs))


def without(op: str, nth: int = 0) -> Program:
    return with_instructions([item for index, item in enumerate(GOOD.instructions) if index != find(op, nth)])


def view_of(op: str, position: int | None = None) -> View:
    item = GOOD.instructions[find(op)]
    operand = item.output if position is None else item.inputs[position]
    assert isinstance(operand, View)
    return operand


def swap_with_next(op: str, nth: int = 0) -> Program:
    items, index = list(GOOD.instructions), find(op, nth)
    items[index], items[index + 1] = items[index + 1], items[index]
    return with_instructions(items)


def with_late_write() -> Program:
    """Adds to the hidden buffer between a quantise of a buffer and the linear that reads the copy."""
    items, index = list(GOOD.instructions), find("quantize")
    source = items[index].inputs[0]
    assert isinstance(source, View)
    items.insert(index + 1, Instruction("add", source, (source, view_of("embed"))))
    return with_instructions(items)


def with_buffer(name: str, **changes: object) -> Program:
    buffers = dict(GOOD.buffers)
    buffers[name] = replace(buffers[name], **changes)  # type: ignore[arg-type]
    return replace(GOOD, buffers=buffers)


HIDDEN = view_of("embed").buffer
NARROW = View(view_of("linear").buffer, 0, 64)
GAP = replace(GOOD.kv_groups[0], layers=(0, 2))

BROKEN: list[tuple[str, Callable[[], Program], str]] = [
    ("unknown op", lambda: changed("rope", op="rope2"), r"op 'rope2' does not exist; known: add"),
    ("read before written", lambda: without("embed"), "read before all of its columns are written"),
    ("order of quantise and linear", lambda: swap_with_next("quantize"), "read before all of its columns are written"),
    ("missing accumulate target", lambda: without("silu_mul"), "read before all of its columns are written"),
    ("no such buffer", lambda: input_of("silu_mul", 0, View("nowhere", 0, 192)), "buffer nowhere does not exist"),
    ("view outside", lambda: input_of("kv_write", 0, View(view_of("kv_write", 0).buffer, 120, 32)), "outside|columns"),
    ("no such weight", lambda: input_of("linear", 1, "%nothing"), "'%nothing' names no weight"),
    ("no such step array", lambda: input_of("embed", 0, "@tokens"), "step array @tokens does not exist"),
    ("wrong step array", lambda: input_of("embed", 0, "@positions"), "input 0 is '@positions', expected @token_ids"),
    ("vector as weight", lambda: input_of("embed", 1, "%final_norm"), "'%final_norm' is not a weight"),
    ("weight as vector", lambda: input_of("rms_norm", 1, "%embedding"), "'%embedding' is not a vector"),
    ("wrong norm weight", lambda: input_of("rms_norm", 1, "%rope_frequencies.0"), "8 values, width is 64"),
    ("norm width", lambda: attribute("rms_norm", "width", 48), "width 48 does not divide 64 columns"),
    ("attribute missing", lambda: changed("rms_norm", attributes=(("width", 64),)), r"has attributes \['width'\]"),
    ("attribute too many", lambda: changed("quantize", attributes=(("a", 1),)), r"has attributes \['a'\]"),
    ("inputs missing", lambda: changed("rope", inputs=(view_of("rope", 0),)), "has 1 inputs, expected 2"),
    ("f32 into a quantised linear", lambda: input_of("linear", 0, view_of("rms_norm")), "is f32, expected int8_g32"),
    ("linear of another K", lambda: input_of("linear", 1, "%layers.0.mlp.down"), "input has 64 columns, expected 96"),
    ("linear of another N", lambda: changed("linear", output=NARROW), "output has 64 columns, expected 128"),
    ("stale quantised copy", with_late_write, "is stale"),
    ("rope of another width", lambda: attribute("rope", "head_dim", 48), "head_dim 48 does not divide 64 columns"),
    ("rope table too wide", lambda: attribute("rope", "head_dim", 8), "table of 16 columns does not fit head_dim 8"),
    ("rope not in place", lambda: changed("rope", output=view_of("linear")), "output must be the first input"),
    ("attention heads", lambda: attribute("attention", "heads", 3), "3 heads are not a multiple of 2 kv heads"),
    ("attention shape", lambda: attribute("attention", "head_dim", 32), "differ from its pages"),
    ("attention window", lambda: attribute("attention", "window", 8), "window 8 differs from its pages' 0"),
    ("KV read first", lambda: swap_with_next("kv_write"), "is read before it is written"),
    ("KV written twice", lambda: input_of_nth("kv_write", 1, 2, KvLayer(0, 0)), "is written twice"),
    ("KV read twice", lambda: input_of_nth("attention", 1, 1, KvLayer(0, 0)), "is read twice"),
    ("no such KV layer", lambda: input_of("kv_write", 2, KvLayer(0, 7)), "does not exist"),
    ("KV operand", lambda: input_of("kv_write", 2, view_of("kv_write", 0)), "is not a KV layer"),
    ("kv_write writes a buffer", lambda: changed("kv_write", output=view_of("embed")), "writes pages, not a buffer"),
    ("gated width", lambda: input_of("silu_mul", 0, view_of("embed")), "input has 64 columns, expected 192"),
    ("rows into tokens", lambda: with_buffer(HIDDEN, rows="rows"), r"must be \[tokens, ...\]"),
    ("format of a buffer", lambda: with_buffer(HIDDEN, format="bf16"), "is bf16, expected f32"),
    ("logits missing", lambda: without("linear", -1), "does not write all columns of logits|never reads"),
    ("logits format", lambda: replace(GOOD, vocab_size=95), r"needs buffer logits f32 \[rows, 95\]"),
    ("unread buffer", lambda: without("attention"), "KV layers|read before"),
    ("KV group incomplete", lambda: replace(GOOD, kv_groups=(GAP,)), r"layers \[0, 2\]"),
]  # fmt: skip


def input_of_nth(op: str, nth: int, position: int, operand: object) -> Program:
    inputs = list(GOOD.instructions[find(op, nth)].inputs)
    inputs[position] = operand  # type: ignore[call-overload]
    return changed(op, nth, inputs=tuple(inputs))


def test_the_unchanged_program_passes() -> None:
    verify(GOOD, CATALOG)


@pytest.mark.parametrize(("build", "message"), [pytest.param(b, m, id=name) for name, b, m in BROKEN])
def test_broken_program_is_refused(build: Callable[[], Program], message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        verify(build(), CATALOG)


def test_the_error_names_program_index_label_and_source() -> None:
    index = find("rms_norm")
    with pytest.raises(ProgramError) as error:
        verify(attribute("rms_norm", "width", 48), CATALOG)
    assert re.match(
        rf"program llama, instruction {index} rms_norm layers\.0\.input_norm \(blocks/\w+\.py:\d+\): ", str(error.value)
    )


@pytest.mark.parametrize("op", ["linear", "silu_mul", "attention", "gather_rows", "rms_norm"])
def test_output_may_not_overlap_an_input(op: str) -> None:
    """Two views of one buffer that share columns: the op would read what it has already overwritten."""
    index = find(op)
    item = GOOD.instructions[index]
    source, target = item.inputs[0], item.output
    assert isinstance(source, View)
    assert target is not None
    fmt = GOOD.buffers[source.buffer].format
    wide = Buffer("wide", GOOD.buffers[source.buffer].rows, source.columns + target.columns, fmt)
    shifted = View("wide", 1, target.columns) if op != "rms_norm" else View("wide", 1, source.columns)
    items = [
        *GOOD.instructions[:index],
        replace(item, inputs=(View("wide", 0, source.columns), *item.inputs[1:]), output=shifted),
        *GOOD.instructions[index + 1 :],
    ]
    program = replace(GOOD, instructions=tuple(items), buffers={**GOOD.buffers, "wide": wide})
    with pytest.raises(ProgramError):
        verify(program, CATALOG)


def test_alias_rule_by_itself() -> None:
    """The one rule the shapes do not imply: an in-place norm must read exactly the view that it writes."""
    index = find("rms_norm")
    item = GOOD.instructions[index]
    shift = replace(item, inputs=(View(HIDDEN, 0, 32), *item.inputs[1:]), output=View(HIDDEN, 16, 32))
    shift = replace(shift, inputs=(shift.inputs[0], "%half"), attributes=(("width", 32), ("eps", 1e-5)))
    items = [*GOOD.instructions[:index], shift, *GOOD.instructions[index:]]
    half = Vector("half", (), 32, (1.0,) * 32)
    program = replace(GOOD, instructions=tuple(items), vectors={**GOOD.vectors, "half": half})
    with pytest.raises(ProgramError, match="overlaps the output"):
        verify(program, CATALOG)


def test_unused_weight_and_vector() -> None:
    vector = Vector("spare", (), 4, (1.0,) * 4)
    with pytest.raises(ProgramError, match="never uses spare"):
        verify(replace(GOOD, vectors={**GOOD.vectors, "spare": vector}), CATALOG)


def test_unused_tensor_of_the_checkpoint_is_named() -> None:
    extra = catalog_of(fake_tensors({"layers.0.attention.q_bias": (64,)}))
    with pytest.raises(CheckpointError, match=r"layers\.0\.attention\.q_bias .* is not used by architecture llama"):
        verify(GOOD, {**CATALOG, **extra})


def test_parameter_packed_twice() -> None:
    twice = replace(GOOD.weights["lm_head"], parts=("embedding",))
    with pytest.raises(ProgramError, match="parameter embedding is packed twice"):
        verify(replace(GOOD, weights={**GOOD.weights, "lm_head": twice}), CATALOG)


def test_k_must_be_a_multiple_of_the_group() -> None:
    fmt = WeightFormat("int4_group", 128, "f16", "zero")
    catalog = {name: spec if len(spec.shape) == 1 else replace(spec, format=fmt) for name, spec in CATALOG.items()}
    program = build_program(CONFIG, catalog)
    with pytest.raises(CheckpointError, match=r"K 64 is not a multiple of its group 128 .*dtype bfloat16"):
        verify(program, catalog)


def test_bf16_program_passes() -> None:
    catalog = catalog_of(fake_tensors(decoder_shapes(CONFIG), BF16))
    verify(build_program(CONFIG, catalog), catalog)


def test_logits_are_the_only_unread_buffer() -> None:
    buffer = Buffer("spare", "tokens", 64)
    items = [*GOOD.instructions]
    last_norm = GOOD.instructions[find("rms_norm")]
    items.insert(find("rms_norm"), replace(last_norm, output=View("spare", 0, 64)))
    program = replace(GOOD, instructions=tuple(items), buffers={**GOOD.buffers, "spare": buffer})
    with pytest.raises(ProgramError, match="never reads buffer spare"):
        verify(program, CATALOG)
    assert LOGITS in GOOD.buffers
