"""The reference rows of all ops but linear against binary64 or plain numpy; u = 2^-24 throughout."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from neoserve import _native

from .bench import Bench
from .paged import Paged, Shape, Tokens, plain_steps, random_tokens
from .rows import REFERENCE, assert_same_bits
from .test_rows_rowwise import gated, quantize, rms_norm, rope, spread
from .weights import from_bf16, to_bf16

U = 2.0**-24
Float64 = npt.NDArray[np.float64]


@pytest.mark.parametrize("width", [1, 16, 33, 576, 4096])
def test_rms_norm(width: int) -> None:
    """Sixteen lanes take width / 16 fused steps each and 4 additions, all positive: relative error (width / 16 + 4) u
    of the sum, halved by the root; division, eps, root, reciprocal and two products add at most 6 u."""
    numbers = np.random.default_rng([40, width])
    weight = numbers.standard_normal(width).astype(np.float32)
    x = (numbers.standard_normal((3, 2 * width)) * 10.0 ** numbers.integers(-8, 9, (3, 1))).astype(np.float32)
    heads = x.reshape(3, 2, width).astype(np.float64)
    wanted = heads / np.sqrt((heads**2).mean(axis=2, keepdims=True) + float(np.float32(1e-5))) * weight
    found = rms_norm(x, weight, REFERENCE, in_place=False).reshape(3, 2, width)
    relative = ((width / 16 + 5) / 2 + 6) * U
    assert (np.abs(found - wanted) <= relative * np.abs(wanted) + 2.0**-149).all()


def test_quantize_bf16_rounds_to_nearest_even() -> None:
    numbers = np.random.default_rng(41)
    x = numbers.integers(0, 2**32, (20, 256), np.uint32).view(np.float32)
    (found,) = quantize(x, "bf16", REFERENCE)
    finite = ~np.isnan(x)
    assert (found[finite] == to_bf16(x)[finite]).all()
    assert np.isnan(from_bf16(found)[~finite]).all()


@pytest.mark.parametrize(("fmt", "group"), [("int8_token", 96), ("int8_g16", 16), ("int8_g32", 32)])
def test_quantize_int8_is_the_formula(fmt: str, group: int) -> None:
    """s = a / 127; q = nearest-even(x * (127 / a)), in binary32; q * s is within half a step and its roundings of x."""
    x = spread(np.random.default_rng(42), (6, 96))
    x[3] = 0
    values, scales, sums = quantize(x, fmt, REFERENCE)
    parts = x.reshape(6, -1, group)
    largest = np.abs(parts).max(axis=2)
    assert_same_bits(scales, largest / np.float32(127), "scales")
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest >= np.float32(1e-36))
    wanted = np.rint(parts * inverse[..., None])
    assert np.abs(wanted).max() == 127
    assert (values[:, :96].reshape(parts.shape) == wanted).all()
    assert (sums == wanted.sum(axis=2)).all()
    assert (values[:, 96:] == 0).all(), "padding is zero: packed layouts read it"
    error = np.abs(wanted * scales[..., None].astype(np.float64) - parts)
    assert (error <= (0.5 + 127 * 3 * U) * scales[..., None]).all()


@pytest.mark.parametrize(("head_dim", "dim"), [(64, 64), (80, 20)])
def test_rope(head_dim: int, dim: int) -> None:
    """x1 * s is rounded, then the fused result: at most 2 u (|x0 c| + |x1 s|)."""
    numbers = np.random.default_rng(43)
    x = numbers.standard_normal((4, 3 * head_dim)).astype(np.float32)
    table = numbers.uniform(-1, 1, (4, dim)).astype(np.float32)
    found = rope(x, table, head_dim, REFERENCE).reshape(4, 3, head_dim)
    half, heads = dim // 2, x.reshape(4, 3, head_dim).astype(np.float64)
    c, s = (part.astype(np.float64)[:, None] for part in (table[:, :half], table[:, half:]))
    x0, x1 = heads[..., :half], heads[..., half:dim]
    for part, wanted, size in (
        (found[..., :half], x0 * c - x1 * s, np.abs(x0 * c) + np.abs(x1 * s)),
        (found[..., half:dim], x1 * c + x0 * s, np.abs(x1 * c) + np.abs(x0 * s)),
    ):
        assert (np.abs(part - wanted) <= 2.01 * U * size).all()


def activation(op: str, gates: npt.NDArray[np.float64]) -> tuple[Float64, Float64]:
    """(gates as binary32, op of them with up = 1)."""
    g = gates.astype(np.float32)[None]
    return g[0].astype(np.float64), gated(op, np.concatenate([g, np.ones_like(g)], axis=1), REFERENCE)[0].astype(
        np.float64
    )


def test_silu_accuracy() -> None:
    """exp errs by at most 5 u: the Taylor remainder r^7 / 5040 at ln 2 / 2 is 2 u, Horner and the reduction 3 u more.
    Addition and division round once each: 7 u, where exp is not clamped; below, the value is g / exp(88)."""
    g, found = activation("silu_mul", np.linspace(-86.5, 87, 40001))
    wanted = g / (1 + np.exp(-g))
    assert (np.abs(found - wanted) <= 7.1 * U * np.abs(wanted)).all()
    g, found = activation("silu_mul", -np.geomspace(89, 3e38, 200))
    assert (found <= 0).all()
    assert (found >= g / np.exp(87.9)).all()
    g, found = activation("silu_mul", np.geomspace(89, 3e38, 200))
    assert (found == g).all()


def test_gelu_accuracy() -> None:
    """tanh(u) and 1 + tanh(u) err by at most 12 u in all, of which |g| / 2 is taken: u itself errs by 5 u relative,
    which tanh damps below 3 u; exp 5 u, three roundings; the product with g / 2 rounds once more."""
    g, found = activation("gelu_tanh_mul", np.linspace(-12, 12, 40001))
    wanted = 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)))
    assert (np.abs(found - wanted) <= 7 * U * np.abs(g)).all()
    g, found = activation("gelu_tanh_mul", np.geomspace(12, 3e38, 200))
    assert (found == g).all()
    g, found = activation("gelu_tanh_mul", -np.geomspace(12, 3e38, 200))
    assert (found == 0).all()


def softmax_attention(shape: Shape, tokens: Tokens) -> tuple[Float64, float]:
    """(exact attention [T, heads * dim], bound of the reference's error). A score errs by at most
    delta = (dim + 1) u scale |q| . |k|, which changes weights by a factor within exp(+-2 delta); exp adds 5 u, the
    sums over n positions n u each, the merge of partitions 8 u; an output is an average of V."""
    count = len(tokens)
    parts = [p.copy() for p in (tokens.q, tokens.k, tokens.v)]
    if shape.kv == "bf16":
        parts = [from_bf16(to_bf16(p)) for p in parts]
    q, k, v = (p.astype(np.float64).reshape(count, -1, shape.dim) for p in parts)
    k, v = (np.repeat(p, shape.heads // shape.kv_heads, axis=1) for p in (k, v))
    scores = np.einsum("thd,shd->hts", q, k) * shape.scale
    sizes = np.einsum("thd,shd->hts", np.abs(q), np.abs(k)) * shape.scale
    t, s = np.arange(count)[:, None], np.arange(count)[None]
    visible = (s <= t) & ((s > t - shape.window) if shape.window else True)
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    delta = (shape.dim + 1) * U * float(sizes.max())
    bound = float(np.abs(v).max()) * (np.expm1(2 * delta) + (5 + 2 * count + 8) * U)
    return np.einsum("hts,shd->thd", weights, v).reshape(count, -1), bound


@pytest.mark.parametrize("kv", ["f32", "bf16"])
@pytest.mark.parametrize(("window", "count"), [(0, 40), (7, 40), (0, 300), (100, 300)])
def test_attention(kv: str, window: int, count: int) -> None:
    shape = Shape(16, 4, 2, window, 16, kv)
    tokens = random_tokens(np.random.default_rng(44), shape, count)
    wanted, bound = softmax_attention(shape, tokens)
    found = Paged(shape, [tokens], REFERENCE).run(plain_steps([count], 64))[0]
    assert bound < 1e-3
    assert np.abs(found - wanted).max() <= bound


def rope_table(positions: npt.NDArray[np.int32], frequencies: npt.NDArray[np.float32], factor: float) -> Float64:
    count = len(positions)
    bench = Bench({"t": (2 * len(frequencies), "f32")}, tokens=count, sequences=count, table_width=1 << 20)
    bench.op("rope_table", bench["t"], ("input", "positions"), bench.vector(frequencies), attention_factor=factor)
    for index, position in enumerate(positions.tolist()):  # each token is a sequence of its own
        bench.step["query_start"][index + 1] = index + 1
        bench.step["positions"][index], bench.step["context_len"][index] = position, position + 1
    bench.counts = (count, count, 0)
    bench.run(bench["t"])
    return bench.values("t").astype(np.float64)


def test_rope_table() -> None:
    """Angles are binary32 products; cos and sin are rounded once, then multiplied by the factor in binary32."""
    positions = np.array([0, 1, 2, 100, 4095, 131071, 1 << 20, (1 << 24) - 1], np.int32)
    frequencies = np.float32([1.0, 0.5, 0.013, 1e-4, 1e-9])
    for factor in (1.0, 1.2079441541679836):
        found = rope_table(positions, frequencies, factor)
        angles = (positions.astype(np.float32)[:, None] * frequencies).astype(np.float64)
        exact = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
        wanted = exact * float(np.float32(factor))
        assert (
            np.abs(found - wanted) <= 2.1 * U * np.abs(wanted) + 1e-8 * (np.abs(angles).max(axis=1)[:, None] > 1e6)
        ).all()
        for row, angle in enumerate(angles):
            exact_row = np.array([_native.cos_sin(a) for a in angle.tolist()])
            once = exact_row.astype(np.float32) * np.float32(factor)
            assert (found[row] == np.concatenate([once[:, 0], once[:, 1]])).all()


def test_cos_sin_over_all_positions_a_model_can_have() -> None:
    """Within 2^-52 of binary64's own up to a million radians; 1e-9 (far below half an ulp of binary32) to 2^24."""
    numbers = np.random.default_rng(45)
    for limit, tolerance in ((7.0, 3e-16), (1e6, 1e-14), (2.0**24, 3e-9)):
        angles = numbers.uniform(-limit, limit, 3000).astype(np.float32).astype(np.float64)
        found = np.array([_native.cos_sin(a) for a in angles.tolist()])
        assert np.abs(found[:, 0] - np.cos(angles)).max() <= tolerance, limit
        assert np.abs(found[:, 1] - np.sin(angles)).max() <= tolerance, limit
    multiples = (np.arange(-2000, 2000) * (np.pi / 2)).astype(np.float32).astype(np.float64)
    found = np.array([_native.cos_sin(a) for a in multiples.tolist()])
    assert np.abs(found[:, 0] - np.cos(multiples)).max() <= 1e-14
    assert np.abs((found**2).sum(axis=1) - 1).max() < 1e-15 * 4


def test_gather_rows_copies() -> None:
    x = spread(np.random.default_rng(46), (7, 37))
    bench = Bench({"x": (40, "f32"), "y": (37, "f32", "rows")}, tokens=7, rows=5)
    bench.op("gather_rows", bench["y"], bench.buffers["x"].view(2, 37), ("input", "logit_rows"))
    bench.values("x")[:, 2:39] = x
    bench.set_step_counts(7, 4)
    bench.step["logit_rows"][:4] = [6, 0, 3, 3]
    bench.run(bench["y"])
    assert_same_bits(bench.values("y")[:4], x[[6, 0, 3, 3]], "rows")
    assert_same_bits(bench.model.logits(), x[[6, 0, 3, 3]], "logits of the last op")
