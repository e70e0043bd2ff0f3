"""Each numpy op against a direct float64 computation, with bounds that follow from its roundings."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neoserve.program import reference_ops as ops
from neoserve.program.reference_contract import exp, fma, lane_sum
from neoserve.program.reference_ops import Quantized, ReferenceWeight
from neoserve.types.tensors import BF16, F32, TensorRows, WeightFormat

from .program_fakes import FORMATS, dequantised, random_rows

EPS = 2.0**-24
"""Unit roundoff of float32."""


def normal(*shape: int, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def activation(x: npt.NDArray[np.float32], fmt: WeightFormat) -> npt.NDArray[np.float32] | Quantized:
    return x if fmt == F32 else ops.quantize(x, fmt.activation)


def exact_activation(x: npt.NDArray[np.float32] | Quantized) -> npt.NDArray[np.float64]:
    """The values that an activation stands for."""
    if not isinstance(x, Quantized):
        return x.astype(np.float64)
    group = x.values.shape[1] // x.scales.shape[1]
    return x.values.astype(np.float64) * np.repeat(x.scales.astype(np.float64), group, axis=1)


@pytest.mark.parametrize("precision", ["float32", "float64", "contract"])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_linear_is_the_product_of_what_the_operands_stand_for(fmt: WeightFormat, precision: str) -> None:
    n, k, tokens = 24, 96, 5
    rows = random_rows(fmt, n, k, np.random.default_rng(1))
    x = activation(normal(tokens, k), fmt)
    y = ops.linear(x, ReferenceWeight.stack(fmt, [rows]), precision)  # type: ignore[arg-type]
    left, right = exact_activation(x), dequantised(rows)
    expected = left @ right.T
    # At most 2 K roundings; each is relative to a partial sum, bounded by the sum of absolute products. A minimum's
    # products are split from the values', so the bound counts their sizes apart.
    size = np.abs(left) @ np.abs(right).T
    if rows.minimums is not None:
        assert rows.scales is not None
        group = fmt.group
        parts = np.repeat(np.abs(rows.minimums.astype(np.float64)), group, axis=1) * 3
        size = np.abs(left) @ parts.T
    assert y.dtype == np.float32
    assert (np.abs(y - expected) <= 2 * k * EPS * size + 1e-30).all()


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_embedding_rows_equal_the_dequantised_values(fmt: WeightFormat) -> None:
    rows = random_rows(fmt, 20, 64, np.random.default_rng(2))
    index = np.array([3, 0, 19, 3], np.int32)
    found = ReferenceWeight.stack(fmt, [rows]).rows(index)
    np.testing.assert_array_equal(found, dequantised(rows)[index].astype(np.float32))


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_stacking_blocks_changes_nothing(fmt: WeightFormat) -> None:
    rows = random_rows(fmt, 32, 64, np.random.default_rng(3))
    parts = (rows.values, rows.scales, rows.minimums, rows.zeros)

    def block(start: int, stop: int) -> TensorRows:
        return TensorRows(fmt, *(None if part is None else part[start:stop] for part in parts))  # type: ignore[arg-type]

    whole, split = ReferenceWeight.stack(fmt, [rows]), ReferenceWeight.stack(fmt, [block(0, 16), block(16, 32)])
    index = np.arange(32, dtype=np.int32)
    np.testing.assert_array_equal(whole.rows(index), split.rows(index))


class TestQuantize:
    @settings(max_examples=60, deadline=None)
    @given(st.integers(0, 2**31), st.integers(1, 4), st.sampled_from(["int8_token", "int8_g16", "int8_g32"]))
    def test_error_is_at_most_half_a_step(self, seed: int, tokens: int, fmt: str) -> None:
        x = normal(tokens, 64, seed=seed) * np.float32(np.random.default_rng(seed).uniform(1e-3, 1e3))
        result = ops.quantize(x, fmt)
        assert isinstance(result, Quantized)
        step = np.repeat(result.scales, 64 // result.scales.shape[1], axis=1)
        assert (np.abs(exact_activation(result) - x) <= step * (0.5 + 1e-5)).all()

    @pytest.mark.parametrize("fmt", ["int8_token", "int8_g32"])
    def test_sums_are_exact_and_the_largest_is_127(self, fmt: str) -> None:
        result = ops.quantize(normal(3, 64), fmt)
        assert isinstance(result, Quantized)
        groups = result.values.reshape(3, result.scales.shape[1], -1)
        np.testing.assert_array_equal(result.sums, groups.astype(np.int64).sum(axis=-1))
        assert (np.abs(groups.astype(int)).max(axis=-1) == 127).all()

    def test_zeros_give_zeros(self) -> None:
        result = ops.quantize(np.zeros((2, 64), np.float32), "int8_g32")
        assert isinstance(result, Quantized)
        assert not result.values.any()
        assert not result.scales.any()

    def test_values_too_small_for_a_reciprocal_give_zeros(self) -> None:
        """127 / 1e-37 is infinite in float32; infinity times zero would be NaN."""
        x = np.zeros((1, 64), np.float32)
        x[0, 0], x[0, 32] = 1e-37, 1e-36
        result = ops.quantize(x, "int8_g32")
        assert isinstance(result, Quantized)
        assert result.values[0, 0] == 0
        assert result.values[0, 32] == 127

    def test_bf16_rounds_to_nearest_even(self) -> None:
        x = np.array([[1.0, 1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8)]], np.float32)
        np.testing.assert_array_equal(ops.quantize(x, "bf16"), [[1.0, 1.0, 1 + 2**-6, -1.0]])


@pytest.mark.parametrize(("columns", "width"), [(64, 64), (96, 32), (40, 40), (5, 5)])
def test_rms_norm(columns: int, width: int) -> None:
    x, weight = normal(3, columns), normal(width, seed=1)
    wide = x.astype(np.float64).reshape(3, -1, width)
    expected = (wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * weight).reshape(3, columns)
    for precision in ("float32", "float64", "contract"):
        y = ops.rms_norm(x, weight, width, 1e-5, precision)  # type: ignore[arg-type]
        np.testing.assert_allclose(y, expected, rtol=8 * EPS + width / 16 * EPS)


def test_lane_sum_has_the_contract_shape() -> None:
    """Lanes accumulate first, then fold 8, 4, 2, 1: values whose sum depends on the order show it."""
    x = normal(1, 50) * np.float32(1e4)
    lanes = [np.float32(0)] * 16
    for index, value in enumerate(x[0]):
        lanes[index % 16] = np.float32(lanes[index % 16] + value)
    for half in (8, 4, 2, 1):
        lanes = [np.float32(lanes[i] + lanes[i + half]) for i in range(half)]
    assert lane_sum(x)[0] == lanes[0]


def test_fma_rounds_once() -> None:
    a = np.array([1 + 2**-12], np.float32)
    assert fma(a, a, -a)[0] == np.float32((1 + 2.0**-12) ** 2 - (1 + 2.0**-12))
    assert fma(a, a, -a)[0] != a[0] * a[0] - a[0]


def exact_fma(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    """Nearest float32 of the exact rational value, ties to even, by comparing neighbours."""
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    guess = np.float32(float(exact))
    around = [np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(np.inf))]
    return min(around, key=lambda value: (abs(Fraction(float(value)) - exact), int(value.view(np.int32)) & 1))


def test_fma_has_no_double_rounding() -> None:
    """Sums just beside the midpoint of two float32, where float64 rounds onto the midpoint itself."""
    a, b = np.float32(1 + 2**-23), np.float32(2**-24)
    for c in (np.float32(1 + 2**-23), np.float32(1.0), np.float32(3.0), np.float32(-(1 + 2**-22))):
        assert fma(a, b, c) == exact_fma(a, b, c)
    tiny = np.float32(2**-24 + 2**-47)
    # 1 + 2^-24 + 2^-70: float64 drops the last term and leaves the midpoint between 1 and 1 + 2^-23
    one, beside = np.float32(1), np.float32(2**-24)
    assert fma(beside, np.float32(1 + 2**-23), one) == np.float32(1 + 2**-23)
    assert fma(tiny, one, one) == exact_fma(tiny, one, one)


@settings(max_examples=300, deadline=None)
@given(*(st.floats(-(2**20), 2**20, width=32) for _ in range(3)))
def test_fma_of_any_values(a: float, b: float, c: float) -> None:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0 or abs(exact) < Fraction(2) ** -120:
        return
    values = (np.float32(a), np.float32(b), np.float32(c))
    assert fma(*values) == exact_fma(*values)


def test_contract_exp_is_near() -> None:
    x = np.linspace(-87, 88, 20001, dtype=np.float32)
    exact = np.exp(x.astype(np.float64))
    # the degree-6 remainder at ln2 / 2 is one unit of the last place, rounding adds less than two
    assert (np.abs(exp(x) - exact) <= 3 * np.spacing(exact.astype(np.float32))).all()
    assert exp(np.zeros(1, np.float32))[0] == 1
    np.testing.assert_array_equal(exp(np.array([-1e9, 1e9], np.float32)), exp(np.array([-87.33654, 88.0], np.float32)))


def test_rope_rotates_pairs_and_keeps_the_rest() -> None:
    x, positions = normal(3, 40), np.array([0, 7, 1000], np.int32)
    frequencies = np.array([1.0, 0.1, 0.01], np.float32)
    y = ops.rope(x, ops.rope_table(positions, frequencies, 1.5), 20)
    heads, angles = x.astype(np.float64).reshape(3, 2, 20), np.outer(positions, frequencies.astype(np.float64))
    turned = (heads[..., :3] + 1j * heads[..., 3:6]) * 1.5 * np.exp(1j * angles)[:, None, :]
    result = y.reshape(3, 2, 20)
    np.testing.assert_allclose(result[..., :3], turned.real, atol=2e-4)
    np.testing.assert_allclose(result[..., 3:6], turned.imag, atol=2e-4)
    np.testing.assert_array_equal(result[..., 6:], x.reshape(3, 2, 20)[..., 6:])


def test_gated_activations() -> None:
    x = normal(4, 128) * 3
    gate, up = np.split(x.astype(np.float64), 2, axis=1)
    np.testing.assert_allclose(ops.silu_mul(x), gate / (1 + np.exp(-gate)) * up, rtol=1e-5, atol=1e-6)
    inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    # 1 + tanh cancels for negative gates: the error is absolute, a few roundings of gate * up
    error = np.abs(ops.gelu_tanh_mul(x) - 0.5 * gate * (1 + np.tanh(inner)) * up)
    assert (error <= 16 * EPS * np.abs(gate * up)).all()


def test_gated_activations_of_huge_values_stay_finite() -> None:
    x = np.array([[1e9, -1e9, 500.0, -500.0, 1.0, 1.0, 1.0, 1.0]], np.float32)
    np.testing.assert_allclose(ops.silu_mul(x), [[1e9, 0, 500, 0]], rtol=1e-6, atol=1e-20)
    np.testing.assert_allclose(ops.gelu_tanh_mul(x), [[1e9, 0, 500, 0]], rtol=1e-6, atol=1e-20)


class TestAttention:
    def direct(self, q, k, v, positions, scale, window):  # type: ignore[no-untyped-def]
        out = np.empty((len(q), q.shape[1] * q.shape[2]))
        share = q.shape[1] // k.shape[1]
        for t, position in enumerate(positions):
            first = max(0, position - window + 1) if window else 0
            span = slice(first, position + 1)
            heads = []
            for h in range(q.shape[1]):
                scores = scale * (k[span, h // share].astype(np.float64) @ q[t, h].astype(np.float64))
                weights = np.exp(scores - scores.max())
                heads.append(weights / weights.sum() @ v[span, h // share].astype(np.float64))
            out[t] = np.concatenate(heads)
        return out

    @pytest.mark.parametrize("precision", ["float32", "float64", "contract"])
    @pytest.mark.parametrize("window", [0, 1, 16, 300])
    @pytest.mark.parametrize("length", [1, 17, 256, 257, 600])
    def test_against_plain_softmax(self, length: int, window: int, precision: str) -> None:
        tokens = min(length, 5)
        q, k, v = normal(tokens, 4, 16), normal(length, 2, 16, seed=1), normal(length, 2, 16, seed=2)
        positions = np.arange(length - tokens, length, dtype=np.int32)
        y = ops.attend(q, k, v, positions, 0.3, window, precision)  # type: ignore[arg-type]
        np.testing.assert_allclose(y, self.direct(q, k, v, positions, 0.3, window), atol=3e-6)

    def test_long_chunk_with_a_window_across_partitions(self) -> None:
        """Queries of one chunk start in different partitions: what one must not see must not count for it."""
        q, k, v = normal(500, 2, 16), normal(700, 1, 16, seed=1), normal(700, 1, 16, seed=2)
        positions = np.arange(200, 700, dtype=np.int32)
        y = ops.attend(q, k, v, positions, 0.3, 40, "float32")
        np.testing.assert_allclose(y, self.direct(q, k, v, positions, 0.3, 40), atol=3e-6)

    def test_extreme_scores_do_not_overflow(self) -> None:
        q = np.full((1, 1, 16), 1e3, np.float32)
        k, v = normal(300, 1, 16, seed=1) * 1e3, normal(300, 1, 16, seed=2)
        y = ops.attend(q, k, v, np.array([299], np.int32), 1.0, 0, "float32")
        assert np.isfinite(y).all()


def test_bf16_weights_are_widened_exactly() -> None:
    rows = random_rows(BF16, 4, 8, np.random.default_rng(0))
    weight = ReferenceWeight.stack(BF16, [rows])
    np.testing.assert_array_equal(weight.values.astype(ml_dtypes.bfloat16), rows.values)
