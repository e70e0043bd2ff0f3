"""Rows of rms_norm, quantize, rope, silu_mul, gelu_tanh_mul and add against the reference rows: equal bits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from .bench import Bench
from .rows import REFERENCE, assert_same_bits, candidates

Float32 = npt.NDArray[np.float32]
FLOAT_MAX = np.finfo(np.float32).max
WIDTHS = (1, 2, 7, 15, 16, 17, 31, 32, 33, 48, 100, 576)


def ran(bench: Bench, row: str) -> None:
    assert [name for _, _, name in bench.model.rows()] == [row]


def spread(numbers: np.random.Generator, shape: tuple[int, ...]) -> Float32:
    """Normal numbers of many magnitudes, with zeros of both signs among them."""
    x = numbers.standard_normal(shape) * 10.0 ** numbers.integers(-6, 7, shape)
    x[numbers.random(shape) < 0.05] = 0.0
    x[numbers.random(shape) < 0.05] = -0.0
    return x.astype(np.float32)


def test_every_rowwise_op_has_a_reference_row_that_runs() -> None:
    """The comparisons below are against rows of these names; none may have been renamed away."""
    for op in ("rms_norm", "quantize_bf16", "quantize_int8", "rope", "silu_mul", "gelu_tanh_mul", "add"):
        assert f"{op}_{REFERENCE}" not in candidates(op)


def rms_norm(x: Float32, weight: Float32, row: str, *, in_place: bool) -> Float32:
    """Norm of [T, columns] per ``len(weight)`` columns, on views inside wider buffers."""
    count, columns = x.shape
    bench = Bench({"x": (columns + 9, "f32"), "y": (columns + 4, "f32")}, force=row, tokens=count + 1)
    source = bench.buffers["x"].view(5, columns)
    target = source if in_place else bench.buffers["y"].view(1, columns)
    bench.op("rms_norm", target, source, bench.vector(weight), eps=1e-5, width=len(weight))
    if row != REFERENCE:
        ran(bench, row)
    bench.set_step_counts(count)
    bench.values("x")[:count, 5 : 5 + columns] = x
    bench.run(target)
    name, column = ("x", 5) if in_place else ("y", 1)
    return bench.values(name)[:count, column : column + columns].copy()


@pytest.mark.parametrize("row", candidates("rms_norm"))
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(row: str, width: int) -> None:
    numbers = np.random.default_rng([10, width])
    weight = numbers.standard_normal(width).astype(np.float32)
    for heads, in_place in ((1, False), (1, True), (3, False), (5, True)):
        x = spread(numbers, (3, heads * width))
        x[1, :width] = 0  # eps alone
        x[2] *= np.float32(1e25)  # the sum of squares overflows: r = 0
        found, wanted = (rms_norm(x, weight, r, in_place=in_place) for r in (row, REFERENCE))
        assert_same_bits(found, wanted, f"{row}, {heads} heads of {width}")


def quantize(x: Float32, fmt: str, row: str) -> tuple[npt.NDArray[np.generic], ...]:
    """(values with the row's padding, scales, sums) or (bf16 bits,)."""
    count, columns = x.shape
    bench = Bench({"x": (columns + 6, "f32"), "q": (columns, fmt)}, force=row, tokens=count + 1)
    source = bench.buffers["x"].view(2, columns)
    bench.op("quantize", bench["q"], source)
    if row != REFERENCE:
        ran(bench, row)
    bench.set_step_counts(count)
    bench.values("x")[:count, 2 : 2 + columns] = x
    bench.run(bench["q"])
    parts = [bench.values("q")] if fmt == "bf16" else [bench.values("q"), bench.scales("q"), bench.sums("q")]
    return tuple(part[:count].copy() for part in parts)


def assert_quantized_alike(x: Float32, fmt: str, row: str) -> None:
    for found, wanted, part in zip(
        quantize(x, fmt, row), quantize(x, fmt, REFERENCE), ("values", "scales", "sums"), strict=False
    ):
        assert_same_bits(found, wanted, f"{row}, {fmt}, {part}")


@pytest.mark.parametrize("row", candidates("quantize_bf16"))
def test_quantize_bf16(row: str) -> None:
    """Ties go to even; the largest floats round up to infinity; infinities and NaN stay."""
    numbers = np.random.default_rng(11)
    for columns in WIDTHS:
        assert_quantized_alike(spread(numbers, (3, columns)), "bf16", row)
    patterns = [numbers.integers(0, 2**32, (4, 512), np.uint32), np.array([[0x3F808000, 0x3F818000, 0xBF808000]] * 2)]
    patterns += [np.array([[0, 0x80000000, 1, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF]])]
    for bits in patterns:
        assert_quantized_alike(bits.astype(np.uint32).view(np.float32), "bf16", row)


INT8_SHAPES = [("int8_token", c) for c in WIDTHS] + [
    (f"int8_g{g}", g * n) for g in (16, 32, 64, 128) for n in (1, 2, 5)
]


@pytest.mark.parametrize("row", candidates("quantize_int8"))
@pytest.mark.parametrize(("fmt", "columns"), INT8_SHAPES)
def test_quantize_int8(row: str, fmt: str, columns: int) -> None:
    numbers = np.random.default_rng([12, columns])
    assert_quantized_alike(spread(numbers, (4, columns)), fmt, row)
    # Halves: with a largest value of 127 the inverse is 1, so every k + 0.5 is a tie.
    ties = numbers.integers(-126, 126, (4, columns)).astype(np.float32) + np.float32(0.5)
    ties[:, 0], ties[:, -1] = 127, -127
    assert_quantized_alike(ties, fmt, row)
    for factor in (0.0, 1e-30, 1e30, FLOAT_MAX / 4):
        assert_quantized_alike(numbers.standard_normal((2, columns)).astype(np.float32) * np.float32(factor), fmt, row)


@pytest.mark.parametrize("row", [*candidates("quantize_int8"), "quantize_int8_reference"])
@pytest.mark.parametrize("largest", [1e-36, 4e-37, 3.7e-37, 1e-38, 1e-40, 1.4e-45])
def test_quantize_int8_of_values_too_small_to_invert(row: str, largest: float) -> None:
    """127 / largest overflows below 3.73e-37. No value may be invented: zeros stay zero, magnitudes within a step."""
    x = np.zeros((2, 32), np.float32)
    x[:, ::3], x[1, 4] = np.float32(largest), -np.float32(largest)
    values, scales, sums = quantize(x, "int8_g32", row)
    assert (values[:, :32][x == 0] == 0).all()
    assert (sums[:, 0] == values[:, :32].astype(np.int32).sum(axis=1)).all()
    error = np.abs(values[:, :32] * scales.astype(np.float64) - x)
    assert (error <= np.float32(largest)).all()
    assert_quantized_alike(x, "int8_g32", row)


@pytest.mark.parametrize("row", [*candidates("quantize_int8"), "quantize_int8_reference"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_quantize_int8_shows_a_value_that_is_not_finite(row: str, bad: float) -> None:
    """No number may come out of a group with NaN or infinity in it; other groups and rows are untouched."""
    x = spread(np.random.default_rng(13), (3, 80))
    x[1, 37] = bad
    values, scales, sums = quantize(x, "int8_g16", row)
    wanted = quantize(np.where(np.isfinite(x), x, 0).astype(np.float32), "int8_g16", REFERENCE)
    hit = np.zeros(scales.shape, bool)
    hit[1, 2] = True
    assert np.isnan(scales[hit]).all()
    assert (sums[hit] == 0).all()
    assert (values[1, 32:48] == 0).all()
    assert_same_bits(scales[~hit], wanted[1][~hit], f"{row}, scales")
    assert_same_bits(sums[~hit], wanted[2][~hit], f"{row}, sums")


@pytest.mark.parametrize("op", ["silu_mul", "gelu_tanh_mul"])
def test_activations_keep_nan(op: str) -> None:
    x = np.ones((2, 64), np.float32)
    x[0, 3] = np.nan
    for row in (*candidates(op), REFERENCE):
        found = gated(op, x, row)
        assert np.argwhere(np.isnan(found)).tolist() == [[0, 3]], row


def rope(x: Float32, table: Float32, head_dim: int, row: str) -> Float32:
    count, columns = x.shape
    bench = Bench({"x": (columns + 8, "f32"), "t": (table.shape[1], "f32")}, force=row, tokens=count + 1)
    view = bench.buffers["x"].view(4, columns)
    bench.op("rope", view, view, bench["t"], head_dim=head_dim)
    if row != REFERENCE:
        ran(bench, row)
    bench.set_step_counts(count)
    bench.values("x")[:count, 4 : 4 + columns] = x
    bench.values("t")[:count] = table
    bench.run(view)
    return bench.values("x")[:count, 4 : 4 + columns].copy()


@pytest.mark.parametrize("row", candidates("rope"))
@pytest.mark.parametrize(
    ("head_dim", "dim"),
    [(64, 64), (128, 128), (80, 80), (96, 96), (64, 32), (128, 64), (80, 20), (16, 16), (16, 2), (64, 50), (256, 256)],
)
def test_rope(row: str, head_dim: int, dim: int) -> None:
    """Half widths that are no multiple of 16; heads whose tail is not rotated stay as they are."""
    numbers = np.random.default_rng([13, head_dim, dim])
    for heads in (1, 3):
        x = spread(numbers, (5, heads * head_dim))
        angles = numbers.uniform(0, 6.3, (5, dim // 2))
        table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
        found = rope(x, table, head_dim, row)
        assert_same_bits(found, rope(x, table, head_dim, REFERENCE), f"{row}, {heads} heads")
        tails = found.reshape(5, heads, head_dim)[:, :, dim:]
        assert_same_bits(tails, x.reshape(5, heads, head_dim)[:, :, dim:], "columns beyond the table")


def gated(op: str, x: Float32, row: str) -> Float32:
    count, columns = x.shape[0], x.shape[1] // 2
    bench = Bench({"x": (2 * columns, "f32"), "y": (columns + 5, "f32")}, force=row, tokens=count + 1)
    target = bench.buffers["y"].view(3, columns)
    bench.op(op, target, bench["x"])
    if row != REFERENCE:
        ran(bench, row)
    bench.set_step_counts(count)
    bench.values("x")[:count] = x
    bench.run(target)
    return bench.values("y")[:count, 3 : 3 + columns].copy()


@pytest.mark.parametrize("row", candidates("silu_mul", "gelu_tanh_mul"))
def test_gated_activations(row: str) -> None:
    op = "silu_mul" if row.startswith("silu") else "gelu_tanh_mul"
    numbers = np.random.default_rng(14)
    for columns in WIDTHS:
        x = spread(numbers, (3, 2 * columns))
        assert_same_bits(gated(op, x, row), gated(op, x, REFERENCE), f"{row}, {columns} columns")
    # Around and beyond the clamp of exp, up to the largest float.
    gates = np.concatenate([np.linspace(-100, 100, 4001), np.geomspace(1e-40, FLOAT_MAX, 300)])
    gates = np.concatenate([gates, -gates, [0.0, -0.0, np.inf, -np.inf]]).astype(np.float32)[None]
    x = np.concatenate([gates, np.ones_like(gates)], axis=1)
    assert_same_bits(gated(op, x, row), gated(op, x, REFERENCE), f"{row}, wide range")


@pytest.mark.parametrize("row", candidates("add"))
def test_add(row: str) -> None:
    numbers = np.random.default_rng(15)
    for columns in WIDTHS:
        x, y = spread(numbers, (4, columns)), spread(numbers, (4, columns))
        x[0, 0], y[0, 0] = FLOAT_MAX, FLOAT_MAX
        x[1, 0], y[1, 0] = 1e-40, -3e-41  # subnormal sums are kept: no mode of the CPU flushes them
        results = []
        for force in (row, REFERENCE):
            bench = Bench({"x": (columns + 7, "f32"), "y": (columns + 2, "f32")}, force=force, tokens=5)
            target, other = bench.buffers["x"].view(3, columns), bench.buffers["y"].view(1, columns)
            bench.op("add", target, target, other)
            if force != REFERENCE:
                ran(bench, row)
            bench.set_step_counts(4)
            bench.values("x")[:4, 3 : 3 + columns], bench.values("y")[:4, 1 : 1 + columns] = x, y
            bench.run(target)
            results.append(bench.values("x")[:4, 3 : 3 + columns].copy())
        assert_same_bits(*results, f"{row}, {columns} columns")
        with np.errstate(over="ignore"):
            assert_same_bits(results[1], x + y, "the reference is one rounded addition")


OPS = {
    "rms_norm": lambda x, row: rms_norm(x, np.ones(x.shape[1], np.float32), row, in_place=False),
    "quantize_bf16": lambda x, row: quantize(x, "bf16", row)[0],
    "quantize_int8": lambda x, row: quantize(x, "int8_token", row)[0],
    "silu_mul": lambda x, row: gated("silu_mul", x, row),
    "gelu_tanh_mul": lambda x, row: gated("gelu_tanh_mul", x, row),
}


@pytest.mark.parametrize("op", OPS)
def test_one_row_of_a_batch_gives_the_bits_of_the_batch(op: str) -> None:
    x = spread(np.random.default_rng(16), (9, 70))
    chosen = next(iter(candidates(op)), REFERENCE)
    whole = OPS[op](x, chosen)
    for t in range(len(x)):
        assert_same_bits(OPS[op](x[t : t + 1], chosen), whole[t : t + 1], f"{chosen}, token {t}")


def test_thread_count_changes_nothing() -> None:
    """70 tokens are several chunks; the norm and the quantisation run as one program, five times."""
    numbers = np.random.default_rng(17)
    x, weight = spread(numbers, (70, 48)), numbers.standard_normal(48).astype(np.float32)
    results = []
    for threads in (1, 2, 3, 7):
        bench = Bench({"x": (48, "f32"), "y": (48, "f32"), "q": (48, "int8_g16")}, force="", threads=threads, tokens=71)
        bench.op("rms_norm", bench["y"], bench["x"], bench.vector(weight), eps=1e-6, width=48)
        bench.op("quantize", bench["q"], bench["y"])
        bench.set_step_counts(70)
        for _ in range(5):
            bench.values("x")[:70] = x
            bench.run(bench["y"], bench["q"])
            results.append((bench.values("q").copy(), bench.scales("q").copy(), bench.sums("q").copy()))
    for result in results[1:]:
        for found, wanted in zip(result, results[0], strict=True):
            assert_same_bits(found, wanted, "another thread count or run")
