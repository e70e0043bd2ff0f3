"""Quantisation at load: formats chosen, values within half a step in float64, damage named, every path reads alike."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neoserve.program.quantize import INT4_GROUP, quantize_rows, quantized_format
from neoserve.types.errors import CheckpointError, ConfigurationError
from neoserve.types.options import EngineOptions
from neoserve.types.tensors import BF16, F32, INT8_CHANNEL, WeightFormat

INT4_K_QUANT = WeightFormat("int4_group", 32, "f32", "minimum")


@pytest.mark.parametrize(
    ("name", "k", "native", "quantization", "kept"),
    [
        ("layers.0.q", 64, F32, "int8", INT8_CHANNEL),
        ("layers.0.q", 64, INT4_K_QUANT, "int8", INT8_CHANNEL),
        ("layers.0.q", 64, BF16, "int4", INT4_GROUP),
        ("layers.0.q", 64, INT4_K_QUANT, "int4", INT4_K_QUANT),
        ("layers.0.q", 72, BF16, "int4", INT8_CHANNEL),
        ("embedding", 64, INT4_K_QUANT, "int4", INT8_CHANNEL),
        ("lm_head", 64, BF16, "int4", INT8_CHANNEL),
        ("lm_head", 64, INT4_K_QUANT, "bf16", BF16),
    ],
)
def test_format(name: str, k: int, native: WeightFormat, quantization: str, kept: WeightFormat) -> None:
    assert quantized_format(name, k, native, quantization) == kept  # type: ignore[arg-type]


def matrices() -> st.SearchStrategy[np.ndarray]:
    """float32 [n, 64] with rows of very different sizes, zeros and constants among them."""
    return st.builds(
        lambda seed, exponents: (
            np.random.default_rng(seed).standard_normal((len(exponents), 64)) * 10.0 ** np.array(exponents)[:, None]
        ).astype(np.float32),
        st.integers(0, 2**32 - 1),
        st.lists(st.integers(-44, 30), min_size=1, max_size=5),
    )


@settings(deadline=None)
@given(matrices())
def test_int8_is_within_half_a_step(values: np.ndarray) -> None:
    rows = quantize_rows(values, INT8_CHANNEL, "w")
    assert rows.scales is not None
    scales = rows.scales.astype(np.float64)[:, None]
    error = np.abs(rows.values.astype(np.float64) * scales - values.astype(np.float64))
    # Half a step, the float32 rounding of w / scale near 127, and rows so small that float32 has no inverse of a scale.
    assert (error <= 0.5 * scales * (1 + 1e-4) + 2e-35).all()


@settings(deadline=None)
@given(matrices().map(lambda values: values.clip(-30000, 30000)))
def test_int4_is_within_half_a_step(values: np.ndarray) -> None:
    rows = quantize_rows(values, INT4_GROUP, "w")
    assert rows.scales is not None
    assert rows.minimums is not None
    scales, minimums = (np.repeat(part.astype(np.float64), 32, axis=1) for part in (rows.scales, rows.minimums))
    error = np.abs(rows.values * scales + minimums - values.astype(np.float64))
    # Half a step inside the range; at its ends what rounding scale and minimum to f16 took away (11 bits, or one
    # denormal of f16).
    ends = 15 * (np.abs(scales) * 2.0**-11 + 2.0**-25) + np.abs(minimums) * 2.0**-11 + 2.0**-25
    assert (error <= 0.5 * scales + ends).all()


def test_extremes_use_every_level() -> None:
    values = np.linspace(-1, 1, 32, dtype=np.float32)[None]
    assert set(quantize_rows(values, INT4_GROUP, "w").values.ravel()) == set(range(16))
    assert quantize_rows(values, INT8_CHANNEL, "w").values.min() == -127


def test_zeros_stay_zero() -> None:
    zero = np.zeros((2, 32), np.float32)
    assert not quantize_rows(zero, INT8_CHANNEL, "w").values.any()
    rows = quantize_rows(zero, INT4_GROUP, "w")
    assert rows.scales is not None
    assert rows.minimums is not None
    assert not rows.scales.any()
    assert not rows.minimums.any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_damage_is_named(bad: float) -> None:
    values = np.ones((3, 32), np.float32)
    values[2, 5] = bad
    with pytest.raises(CheckpointError, match=r"^model.gguf: tensor q: row 2 holds -?(nan|inf) at 5"):
        quantize_rows(values, INT8_CHANNEL, "model.gguf: tensor q")


def test_values_beyond_f16_are_refused() -> None:
    values = np.full((1, 32), 1e5, np.float32)
    with pytest.raises(CheckpointError, match=r"100000.*use int8"):
        quantize_rows(values, INT4_GROUP, "w")


def test_option_is_checked() -> None:
    with pytest.raises(ConfigurationError, match=r"quantization is 'int3'; it must be one of int8, int4, bf16"):
        EngineOptions(quantization="int3")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"dtype is 'float32' and quantization is 'int8'"):
        EngineOptions(dtype="float32", quantization="int8")
