"""What the native boundary refuses when a program is bound: shapes that do not fit, and views outside the arena.

`bad` below is one change to an instruction that is otherwise good; the label of the instruction must be in the error.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from neoserve import _native

from .bench import Bench, Group, Operand
from .weights import Format, random_weight

BUFFERS: dict[str, Any] = {
    "x": (32, "f32"),
    "y": (32, "f32"),
    "wide": (64, "f32"),
    "b": (32, "bf16"),
    "q": (32, "int8_token"),
    "g": (32, "int8_g16"),
    "r": (32, "f32", "rows"),
}


@pytest.fixture
def bench() -> Bench:
    return Bench(BUFFERS, tokens=4, rows=6, groups=[Group(2, 2, 16, 1)])


def pack(kind: str = "f32", n: int = 32, k: int = 32, group: int = 0) -> _native.PackedWeight:
    fmt = Format(kind, group, "f32" if group else "")
    return random_weight(np.random.default_rng(60), fmt, n, k).pack("")


def refused(bench: Bench, op: str, output: Operand, *inputs: Operand, match: str = "", **attributes: float) -> None:
    with pytest.raises(ValueError, match=f"{op} under test.*{match}"):
        bench.op(op, output, *inputs, **attributes)
    assert bench.model.rows() == [], "a refused instruction was added"


def test_a_view_outside_its_buffer_or_the_arena(bench: Bench) -> None:
    x, y = bench["x"], bench["y"]
    size = len(bench.arena)
    for index, value in ((1, size), (1, size - 64), (1, 2**62), (1, 66), (2, 2**28), (3, -4), (3, 1), (4, 33), (4, 0)):
        view = (*x[:index], value, *x[index + 1 :])
        refused(bench, "add", view, view, y, match="view outside")
        refused(bench, "add", y, y, view, match="view outside")
    refused(bench, "add", (*x[:5], "f64", x[6]), x, y, match="f64")
    refused(bench, "add", (*x[:6], "sequences"), x, y, match="sequences")
    for fmt in ("int8_g0", "int8_g-16", "int8_g33"):
        refused(bench, "quantize", (*bench["g"][:5], fmt, "tokens"), x, match="group")
    refused(bench, "quantize", bench.buffers["q"].view(0, 16), bench.buffers["x"].view(0, 16), match="span")


@pytest.mark.parametrize("fmt", ["int8_token", "int8_g16", "int8_g32"])
def test_an_int8_buffer_counts_its_padding_scales_and_sums(fmt: str) -> None:
    """96 columns take rows of 128 bytes, then scales and sums, each rounded up to 64: the last byte must fit."""
    bench = Bench({"x": (96, "f32"), "q": (96, fmt)}, tokens=4)
    buffer = bench.buffers["q"]
    groups = buffer.groups
    needed = sum(buffer.part_bytes[:2]) + 4 * groups * 4
    start = (len(bench.arena) - needed) // 4 * 4
    fits = ("view", start, 96, 0, 96, fmt, "tokens")
    refused(bench, "quantize", ("view", start + 4, *fits[2:]), bench["x"], match="outside the arena")
    bench.op("quantize", fits, bench["x"])


def test_unknown_names(bench: Bench) -> None:
    x, y = bench["x"], bench["y"]
    refused(bench, "softmax", x, y, match="unknown op")
    refused(bench, "add", x, x, ("tensor", 0), match="tensor")


@pytest.mark.parametrize("index", [0, 5, 2**31 - 1])
def test_ids_that_were_never_added(bench: Bench, index: int) -> None:
    x, y = bench["x"], bench["y"]
    refused(bench, "rms_norm", x, y, ("vector", index), eps=1e-5, width=32, match=f"vector {index}")
    refused(bench, "linear", x, y, ("weight", index), accumulate=0, match=f"weight {index}")
    refused(bench, "linear", x, y, ("weight", index), ("vector", index), accumulate=0)
    if index:
        refused(bench, "kv_write", ("none",), x, y, ("kv", index, 0), match=f"KV group {index}")
        refused(bench, "kv_write", ("none",), x, y, ("kv", 0, index + 2), match="KV layer")


def test_missing_operands_and_attributes(bench: Bench) -> None:
    x, y, ones = bench["x"], bench["y"], bench.vector(np.ones(32))
    refused(bench, "linear", x, y, accumulate=0, match="weight is missing")
    refused(bench, "embed", x, ("input", "token_ids"), scale=1.0, match="weight is missing")
    refused(bench, "rms_norm", x, y, eps=1e-5, width=32, match="vector is missing")
    refused(bench, "rms_norm", x, y, ones, width=32, match="attribute eps")
    refused(bench, "rms_norm", x, ones, eps=1e-5, width=32)
    refused(bench, "add", x, x)
    refused(bench, "add", x)
    refused(bench, "rope", x, x, head_dim=16)
    refused(bench, "quantize", bench["q"])
    refused(bench, "gather_rows", bench["r"])
    refused(bench, "silu_mul", x)
    refused(bench, "kv_write", ("none",), x, ("kv", 0, 0))
    refused(bench, "kv_write", ("none",), x, y, match="KV layer is missing")
    refused(bench, "add", ("none",), x, y)


def test_shapes_that_do_not_fit(bench: Bench) -> None:
    x, y, wide = bench["x"], bench["y"], bench["wide"]
    ones = bench.vector(np.ones(32))
    refused(bench, "rms_norm", x, y, ones, eps=1e-5, width=16, match="weight")
    refused(bench, "rms_norm", x, wide, ones, eps=1e-5, width=32)
    refused(bench, "rms_norm", x, y, ones, eps=1e-5, width=0)
    refused(bench, "rms_norm", x, y, ones, eps=1e-5, width=-32)
    refused(bench, "rms_norm", x, y, bench.vector(np.ones(5)), eps=1e-5, width=5)
    refused(bench, "linear", x, wide, bench.weight(pack()), accumulate=0)
    refused(bench, "linear", wide, x, bench.weight(pack()), accumulate=0)
    refused(bench, "linear", x, y, bench.weight(pack()), bench.vector(np.ones(31)), accumulate=0, match="bias")
    refused(bench, "linear", x, bench["g"], bench.weight(pack("int8_channel")), accumulate=0, match="group")
    refused(bench, "linear", x, bench["g"], bench.weight(pack("int8_group", group=32)), accumulate=0, match="group")
    refused(bench, "linear", x, y, bench.weight(pack("bf16")), accumulate=0, match="format")
    refused(bench, "linear", x, bench["b"], bench.weight(pack("f32")), accumulate=0, match="format")
    refused(bench, "embed", wide, ("input", "token_ids"), bench.weight(pack()), scale=1.0)
    refused(bench, "quantize", bench["q"], wide)
    refused(bench, "add", x, x, wide)
    refused(bench, "silu_mul", x, y)
    refused(bench, "gelu_tanh_mul", wide, x)
    refused(bench, "gather_rows", bench["r"], wide)
    refused(bench, "rope_table", x, ("input", "positions"), ones, attention_factor=1.0)
    for head_dim in (0, -16, 1, 24, 31):
        refused(bench, "rope", x, x, y, head_dim=head_dim)


def test_attention_heads_that_do_not_fit(bench: Bench) -> None:
    x, y, wide = bench["x"], bench["y"], bench["wide"]
    good = {"scale": 1.0, "window": 0, "heads": 2, "kv_heads": 2, "head_dim": 16}
    for change in (
        {"heads": 3},
        {"heads": 0},
        {"heads": -2},
        {"kv_heads": 1},
        {"kv_heads": 0},
        {"head_dim": 32},
        {"head_dim": 8},
        {"window": -1},
    ):
        refused(bench, "attention", x, y, ("kv", 0, 0), **{**good, **change})
    refused(bench, "attention", x, wide, ("kv", 0, 0), **good)
    refused(bench, "attention", wide, x, ("kv", 0, 0), **good)
    refused(bench, "kv_write", ("none",), wide, wide, ("kv", 0, 0))
    refused(bench, "kv_write", ("none",), x, bench.buffers["wide"].view(0, 32), ("kv", 0, 0))


def test_formats_and_symbols_that_do_not_fit(bench: Bench) -> None:
    """bf16 or int8 read as f32, or rows of another count, would be a read past the buffer."""
    x, y, b, q, r = (bench[name] for name in ("x", "y", "b", "q", "r"))
    ones = bench.vector(np.ones(32))
    for wrong in (b, q):
        refused(bench, "rms_norm", x, wrong, ones, eps=1e-5, width=32)
        refused(bench, "rms_norm", wrong, x, ones, eps=1e-5, width=32)
        refused(bench, "add", x, x, wrong)
        refused(bench, "add", wrong, wrong, x)
        refused(bench, "rope", x, x, wrong, head_dim=32)
        refused(bench, "linear", wrong, x, bench.weight(pack()), accumulate=0)
        refused(bench, "quantize", bench["g"], wrong)
        refused(bench, "embed", wrong, ("input", "token_ids"), bench.weight(pack()), scale=1.0)
        refused(bench, "kv_write", ("none",), wrong, wrong, ("kv", 0, 0))
        refused(bench, "gather_rows", r, wrong)
    refused(bench, "quantize", y, x)
    refused(bench, "add", x, x, r)
    refused(bench, "add", r, r, x)
    refused(bench, "rms_norm", r, x, ones, eps=1e-5, width=32)
    refused(bench, "linear", r, x, bench.weight(pack()), accumulate=0)
    refused(bench, "gather_rows", x, y)
    refused(bench, "gather_rows", r, r)
    refused(bench, "embed", r, ("input", "token_ids"), bench.weight(pack()), scale=1.0)
    refused(bench, "kv_write", ("none",), r, r, ("kv", 0, 0))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"threads": 0}, "threads"),
        ({"threads": 1025}, "threads"),
        ({"threads": -1}, "threads"),
        ({"page_size": 0}, "page_size"),
        ({"page_size": 24}, "page_size"),
        ({"page_size": -16}, "page_size"),
        ({"kv_dtype": "f16"}, "kv_dtype"),
        ({"kv_dtype": ""}, "kv_dtype"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_sequences": 0}, "max_sequences"),
        ({"max_rows": -1}, "max_rows"),
        ({"max_pages_per_sequence": 0}, "max_pages_per_sequence"),
        ({"max_pages_per_sequence": 2**27 + 1}, "max_pages_per_sequence"),
    ],
)
def test_model_limits(change: dict[str, Any], name: str) -> None:
    good = {
        "threads": 1, "arena_bytes": 4096, "max_tokens": 4, "max_sequences": 2, "max_rows": 2,
        "max_pages_per_sequence": 2, "page_size": 16, "kv_dtype": "f32",
    }  # fmt: skip
    with pytest.raises(ValueError, match=name) as error:
        _native.Model(**{**good, **change})
    assert str(next(iter(change.values()))) in str(error.value)


@pytest.mark.parametrize(
    "values", [(0, 1, 16, 1), (1, 0, 16, 1), (1, 1, 0, 1), (1, 1, 16, 0), (1, 1, 24, 1), (-1, 1, 16, 1)]
)
def test_kv_groups(bench: Bench, values: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="KV group"):
        bench.model.add_group(*values)


def test_memory_that_the_system_refuses() -> None:
    with pytest.raises(MemoryError):
        _native.Model(1, 2**62, 4, 2, 2, 2, 16, "f32")
    bench = Bench({"x": (16, "f32")}, tokens=2)
    with pytest.raises(MemoryError):
        bench.model.add_group(2**15, 2**10, 256, 2**30)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("f64", 4, 4), "f64"),
        (("f32", 0, 4), r"\[0, 4\]"),
        (("f32", 4, -1), r"\[4, -1\]"),
        (("int8_group", 4, 48, 32, "f16"), "48"),
        (("int8_group", 4, 64, 0, "f16"), "group"),
        (("int4_group", 4, 64, 24, "f16"), "24"),
        (("int4_group", 4, 64, -32, "f16"), "-32"),
        (("int4_group", 4, 64, 32, "f8"), "f8"),
        (("int4_group", 4, 64, 32, "f16", "middle"), "middle"),
        (("f32", 4, 64, 32), "group"),
        (("bf16", 4, 64, 0, "", "zero"), "offset"),
        (("int8_channel", 4, 64, 0, "f16"), "f16"),
    ],
)
def test_weight_formats(arguments: tuple[Any, ...], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        _native.pack_weight(*arguments)


def test_rows_put_into_a_weight() -> None:
    packed = _native.pack_weight("int4_group", 20, 32, 16, "f16", "minimum")
    values, scales = np.zeros((4, 32), np.uint8), np.ones((4, 2), np.float16)
    packed.put_rows(16, values, scales, scales)
    for row in (-1, 17, 20, 2**31 - 1):
        with pytest.raises((ValueError, IndexError), match="outside"):
            packed.put_rows(row, values, scales, scales)
    for wrong in (
        (values[:, :16], scales, scales),
        (values.astype(np.uint16), scales, scales),
        (values.reshape(-1), scales, scales),
        (values, None, scales),
        (values, scales, None),
        (values, scales[:3], scales),
        (values, scales.astype(np.float32), scales),
        (values, scales, scales[:, :1]),
    ):
        with pytest.raises(ValueError, match=r"values|scales|minimums"):
            packed.put_rows(0, *wrong)
    with pytest.raises(ValueError, match="zeros"):
        packed.put_rows(0, values, scales, scales, np.zeros((4, 2), np.uint8))
    for index in (-1, 20):
        with pytest.raises(IndexError, match="outside"):
            packed.gather(index)
    with pytest.raises(TypeError, match="pack_weight"):
        _native.PackedWeight()
