"""The reference rows of linear and embed against binary64, with bounds derived per format.

u = 2^-24 is the unit roundoff of binary32. A sum of K fused multiply-adds errs by at most gamma(K) = K u / (1 - K u)
times the sum of magnitudes, plus half the smallest subnormal for each result below the normal range.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from .bench import Bench
from .linear import run_linear
from .rows import REFERENCE, USABLE_ROWS, assert_same_bits
from .weights import FORMATS, Activation, Float64, Format, Weight, random_activation, random_weight

U = 2.0**-24
TINY = 2.0**-149


def gamma(count: float) -> float:
    return count * U / (1 - count * U)


def bound(weight: Weight, x: Activation) -> Float64:
    """Of |y - exact| for y [rows, n] before bias.

    f32 and bf16: K fused steps over exact products: gamma(K) sum |x w|.
    int8 per channel: the integer sum is exact; its conversion, sx * sw and their product round once each: gamma(3) |y|.
    grouped: a group's term errs by the conversion and by sx * sw, gamma(2), and then passes through at most G steps
    (2 G with minimums), each of which rounds the running sum: gamma(2 + 2 G) times the sum of the terms' magnitudes.
    """
    kind, k = weight.format.kind, weight.k
    if kind in ("f32", "bf16"):
        return gamma(k) * (np.abs(x.exact()) @ np.abs(weight.exact()).T) + k * TINY
    if kind == "int8_channel":
        return gamma(3) * np.abs(x.exact() @ weight.exact().T) + 3 * TINY
    group, groups = weight.format.group, k // weight.format.group
    pieces = [slice(g * group, (g + 1) * group) for g in range(groups)]
    left, right = x.exact(), weight.exact()
    minimums = 0.0 if weight.minimums is None else weight.minimums.astype(np.float64)
    terms = np.zeros((len(left), weight.n))
    for g, piece in enumerate(pieces):
        shift = left[:, piece].sum(axis=1)[:, None] * (minimums if np.isscalar(minimums) else minimums[:, g])
        product = left[:, piece] @ right[:, piece].T
        terms += np.abs(product - shift) + np.abs(shift)
    return gamma(2 + 2 * groups) * terms + (2 + 2 * groups) * TINY


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_linear_within_its_bound_of_binary64(fmt: Format) -> None:
    numbers = np.random.default_rng([30, FORMATS.index(fmt)])
    for k in [fmt.group * n for n in (1, 4)] if fmt.group else [2, 130]:
        weight, x = random_weight(numbers, fmt, 21, k), random_activation(numbers, fmt, 4, k)
        wanted = x.exact() @ weight.exact().T
        found = run_linear(weight, x, REFERENCE)
        assert (np.abs(found - wanted) <= bound(weight, x)).all()
        bias = numbers.standard_normal(21).astype(np.float32)
        into = numbers.standard_normal((4, 21)).astype(np.float32)
        plain = run_linear(weight, x, REFERENCE)
        assert_same_bits(run_linear(weight, x, REFERENCE, bias=bias), plain + bias, "bias is one rounded addition")
        both = run_linear(weight, x, REFERENCE, bias=bias, into=into)
        assert_same_bits(both, into + (plain + bias), "then the output is added")


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_the_bound_would_notice_a_wrong_value(fmt: Format) -> None:
    """One weight value off by the least step, one zero point or minimum of another group: each leaves the bound."""
    numbers = np.random.default_rng([31, FORMATS.index(fmt)])
    k = fmt.group * 2 or 64
    weight, x = random_weight(numbers, fmt, 18, k), random_activation(numbers, fmt, 3, k)
    x.values[:, 0] = 101 if x.values.dtype == np.int8 else x.values[:, 1]
    limit = bound(weight, x)
    wanted = x.exact() @ weight.exact().T
    changed = weight.values.copy()
    changed[:, 0] = changed[:, 1] if fmt.kind in ("f32", "bf16") else np.where(changed[:, 0] > 5, 4, 7)
    wrong = Weight(fmt, changed, weight.scales, weight.minimums, weight.zeros)
    assert (np.abs(x.exact() @ wrong.exact().T - wanted) > 2 * limit).mean() > 0.9


def dequantised(weight: Weight, n: int) -> npt.NDArray[np.float32]:
    """Row n as docs/ops.md defines it for embed: one rounded product, or one fused multiply-add."""
    fmt = weight.format
    if weight.scales is None:
        return weight.exact()[n].astype(np.float32)
    scales = np.repeat(np.atleast_1d(weight.scales[n]), fmt.group or weight.k).astype(np.float32)
    values = weight.values[n].astype(np.float32)
    if weight.zeros is not None:
        values = values - np.repeat(weight.zeros[n], fmt.group).astype(np.float32)
    if weight.minimums is None:
        return values * scales
    # The product of 8 and 24 bits is exact in binary64; long double keeps the sum from being rounded twice.
    minimums = np.repeat(weight.minimums[n], fmt.group).astype(np.longdouble)
    return (values.astype(np.longdouble) * scales.astype(np.longdouble) + minimums).astype(np.float32)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_packed_weights_give_back_every_value(fmt: Format) -> None:
    """Every packed layout offers row gather (a tied embedding has one copy); rows may arrive in any pieces."""
    numbers = np.random.default_rng([32, FORMATS.index(fmt)])
    rows = [row.name for row in USABLE_ROWS if row.op == fmt.op]
    for n, k in ((1, fmt.group or 2), (37, fmt.group * 3 or 50)):
        weight = random_weight(numbers, fmt, n, k)
        for row in rows:
            packed = weight.pack(row, pieces=3)
            assert packed.row_name == row
            for index in range(n):
                assert_same_bits(packed.gather(index), dequantised(weight, index), f"{row}, row {index}")


@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS if fmt.group in (0, 32)], ids=str)
def test_embed_scales_the_dequantised_row(fmt: Format) -> None:
    numbers = np.random.default_rng([33, FORMATS.index(fmt)])
    k = fmt.group * 2 or 48
    weight = random_weight(numbers, fmt, 50, k)
    ids = np.array([0, 49, 17, 17, 3], np.int32)
    for scale in (1.0, 27.712812423706055):
        bench = Bench({"x": (k, "f32")}, tokens=6)
        bench.op("embed", bench["x"], ("input", "token_ids"), bench.weight(weight.pack("")), scale=scale)
        bench.set_step_counts(5)
        bench.step["token_ids"][:5] = ids
        bench.run(bench["x"])
        wanted = np.stack([dequantised(weight, i) for i in ids.tolist()])
        wanted = wanted if scale == 1 else wanted * np.float32(scale)
        assert_same_bits(bench.values("x")[:5], wanted, f"scale {scale}")


def test_a_weight_serves_embed_and_linear_alike() -> None:
    """A tied embedding: the logits of row i against its own embedding are its squared norm."""
    numbers = np.random.default_rng(34)
    weight = random_weight(numbers, Format("f32"), 20, 16)
    bench = Bench({"x": (16, "f32"), "y": (20, "f32")}, tokens=20, force="")
    table = bench.weight(weight.pack(""))
    bench.op("embed", bench["x"], ("input", "token_ids"), table, scale=1.0)
    bench.op("linear", bench["y"], bench["x"], table, accumulate=0)
    bench.step["token_ids"][:] = range(20)
    bench.run(bench["x"], bench["y"])
    exact = weight.exact()
    assert np.abs(np.diag(bench.values("y")) - (exact**2).sum(axis=1)).max() < 1e-4


def test_packed_bytes_are_those_of_the_format() -> None:
    """Outputs are padded to 16; int4 takes half a byte; scales, minimums and zeros take their storage type."""
    blocks, k = 3, 64  # 33 outputs
    values = blocks * 16 * k
    groups = blocks * 16 * 4
    for fmt, nbytes in (
        (Format("f32"), 4 * values),
        (Format("bf16"), 2 * values),
        (Format("int8_channel"), values + 4 * blocks * 16),
        (Format("int8_group", 16, "f16"), values + 2 * groups),
        (Format("int8_group", 16, "f32", "zero"), values + 4 * groups + groups),
        (Format("int4_group", 16, "f16", "minimum"), values // 2 + 4 * groups),
    ):
        assert random_weight(np.random.default_rng(35), fmt, 33, k).pack(REFERENCE).nbytes == nbytes, str(fmt)
