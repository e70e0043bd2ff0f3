"""Replay of several instructions: chains that run without a barrier between them, and what may not join one."""

from __future__ import annotations

import numpy as np
import pytest

from .bench import Bench, Group, Operand, Span
from .rows import assert_same_bits
from .weights import Format, random_weight

TOKENS = 90


def chain(threads: int, *, joined: bool) -> tuple[np.ndarray, ...]:
    """embed, norm, quantize, linear, gated, norm per head in place, quantize again: values, scales and sums."""
    numbers = np.random.default_rng(80)
    bench = Bench(
        {
            "x": (64, "f32"),
            "n": (64, "f32"),
            "q": (64, "int8_token"),
            "h": (96, "f32"),
            "g": (48, "f32"),
            "z": (48, "int8_g16"),
        },
        force="",
        threads=threads,
        tokens=TOKENS + 1,
    )
    table = random_weight(numbers, Format("bf16"), 40, 64).pack("")
    projection = random_weight(numbers, Format("int8_channel"), 96, 64).pack("")

    def add(op: str, out: Operand, *inputs: Operand, joins: bool = False, **attributes: float) -> None:
        bench.model.add_op(op, [out, *inputs], attributes, op, joins and joined)

    add("embed", bench["x"], ("input", "token_ids"), bench.weight(table), scale=2.5)
    ones, heads = bench.vector(np.ones(64)), bench.vector(numbers.standard_normal(16))
    add("rms_norm", bench["n"], bench["x"], ones, joins=True, eps=1e-6, width=64)
    add("quantize", bench["q"], bench["n"], joins=True)
    add("linear", bench["h"], bench["q"], bench.weight(projection), accumulate=0)
    add("silu_mul", bench["g"], bench["h"])
    add("rms_norm", bench["g"], bench["g"], heads, joins=True, eps=1e-6, width=16)
    add("quantize", bench["z"], bench["g"], joins=True)
    bench.set_step_counts(TOKENS)
    bench.step["token_ids"][:TOKENS] = numbers.integers(0, 40, TOKENS)
    bench.run(*[bench[name] for name in bench.buffers])
    return tuple(part("z")[:TOKENS].copy() for part in (bench.values, bench.scales, bench.sums))


def test_joined_instructions_give_the_bits_of_separate_ones() -> None:
    wanted = chain(1, joined=False)
    for threads in (1, 2, 3, 7):
        for joined in (False, True):
            for found, part in zip(chain(threads, joined=joined), wanted, strict=True):
                assert_same_bits(found, part, f"{threads} threads, joined {joined}")


def test_an_op_waits_for_the_one_before() -> None:
    """Long additions with another division of the rows than the product that reads them: without the barrier between
    them a thread reads rows that another has yet to write."""
    numbers = np.random.default_rng(82)
    bench = Bench({"x": (512, "f32"), "y": (512, "f32"), "z": (16, "f32")}, force="", threads=3, tokens=512)
    weight = bench.weight(random_weight(numbers, Format("f32"), 16, 512).pack(""))
    for _ in range(6):
        bench.op("silu_mul", bench.buffers["y"].view(0, 256), bench["x"])
        bench.op("add", bench["x"], bench["x"], bench["y"])
        bench.op("linear", bench["z"], bench["x"], weight, accumulate=0)
    bench.set_step_counts(512)
    x, y = numbers.standard_normal((2, 512, 512)).astype(np.float32)
    results = set()
    for _ in range(12):
        bench.values("x")[:], bench.values("y")[:] = x, y
        bench.run(*[bench[name] for name in bench.buffers])
        results.add(bench.values("z").tobytes())
    assert len(results) == 1


def test_what_divides_otherwise_may_not_join() -> None:
    bench = Bench({"x": (32, "f32"), "y": (32, "f32"), "r": (32, "f32", "rows")}, tokens=4, groups=[Group(1, 2, 16, 1)])
    x, y, r = bench["x"], bench["y"], bench["r"]
    weight = bench.weight(random_weight(np.random.default_rng(81), Format("f32"), 32, 32).pack(""))
    heads = {"scale": 1.0, "window": 0, "heads": 2, "kv_heads": 2, "head_dim": 16}

    def refused(op: str, operands: list[Operand], attributes: dict[str, float]) -> None:
        with pytest.raises(ValueError, match=f"{op}: cannot join"):
            bench.model.add_op(op, operands, attributes, op, True)

    refused("add", [x, x, y], {})  # nothing is there to join
    bench.op("add", x, x, y)
    refused("linear", [y, x, weight], {"accumulate": 0})
    refused("attention", [y, x, ("kv", 0, 0)], heads)
    refused("gather_rows", [r, x, ("input", "logit_rows")], {})
    refused("add", [r, r, r], {})  # another number of rows
    bench.model.add_op("kv_write", [("none",), x, y, ("kv", 0, 0)], {}, "kv_write", True)
    bench.op("linear", y, x, weight, accumulate=0)
    refused("add", [x, x, y], {})
    bench.op("attention", y, x, ("kv", 0, 0), **heads)
    refused("add", [x, x, y], {})


def test_a_profiled_replay_gives_the_same_bits_and_times_every_instruction() -> None:
    bench = Bench({"x": (32, "f32"), "y": (32, "f32")}, tokens=4, force="")
    bench.model.add_op("add", [bench["x"], bench["x"], bench["y"]], {}, "first", False)
    bench.model.add_op("add", [bench["x"], bench["x"], bench["y"]], {}, "second", True)
    bench.set_step([Span(0, 4, [0])])
    for profiling in (False, True, False):
        bench.model.set_profiling(profiling)
        bench.values("x")[:], bench.values("y")[:] = 1.0, 0.25
        bench.run(bench["x"])
        assert (bench.values("x") == 1.5).all()
        times = [(label, seconds) for label, _, seconds in bench.model.profile()]
        assert [label for label, _ in times] == ["first", "second"]
        assert all((seconds > 0) == profiling for _, seconds in times)
