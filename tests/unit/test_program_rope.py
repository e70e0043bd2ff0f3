"""Rotary frequencies of every kind against formulas in float64, and what a wrong config is told."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from neoserve.blocks.rope import rope_frequencies
from neoserve.types.errors import CheckpointError, UnsupportedModelError
from neoserve.types.model import RopeConfig

PLAIN = RopeConfig(theta=10000.0, rotary_dim=64)
LLAMA3 = replace(
    PLAIN,
    theta=500000.0,
    kind="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position=8192,
)
YARN = replace(PLAIN, kind="yarn", factor=4.0, original_max_position=32768, beta_fast=32.0, beta_slow=1.0)


def plain(theta: float = 10000.0, dim: int = 64) -> npt.NDArray[np.float64]:
    return theta ** -(np.arange(0, dim, 2) / dim)


def inverse(rope: RopeConfig, max_position: int = 4096, context: int | None = None) -> npt.NDArray[np.float32]:
    result = rope_frequencies(rope, max_position, context)
    assert result.inverse.dtype == np.float32
    assert result.inverse.shape == (rope.rotary_dim // 2,)
    return result.inverse


def test_default() -> None:
    np.testing.assert_allclose(inverse(PLAIN), plain(), rtol=1e-6)


def test_linear() -> None:
    np.testing.assert_allclose(inverse(replace(PLAIN, kind="linear", factor=4.0)), plain() / 4, rtol=1e-6)


class TestDynamic:
    ROPE = replace(PLAIN, kind="dynamic", factor=2.0, original_max_position=2048)

    @pytest.mark.parametrize("context", [None, 100, 2048])
    def test_up_to_the_original_length_it_is_plain(self, context: int | None) -> None:
        np.testing.assert_array_equal(inverse(self.ROPE, 2048, context), inverse(PLAIN))

    def test_beyond_it_the_base_of_that_length_is_used(self) -> None:
        theta = 10000.0 * (2 * 4096 / 2048 - 1) ** (64 / 62)
        np.testing.assert_allclose(inverse(self.ROPE, 2048, 4096), plain(theta), rtol=1e-6)

    def test_the_models_length_stands_in_for_a_missing_original(self) -> None:
        rope = replace(self.ROPE, original_max_position=None)
        np.testing.assert_array_equal(inverse(rope, 2048, 4096), inverse(self.ROPE, 4096, 4096))


def test_llama3_keeps_fast_scales_slow_and_blends_between() -> None:
    frequencies, base = inverse(LLAMA3), plain(500000.0)
    wavelength = 2 * math.pi / base
    fast, slow = wavelength < 8192 / 4, wavelength > 8192
    np.testing.assert_allclose(frequencies[fast], base[fast], rtol=1e-6)
    np.testing.assert_allclose(frequencies[slow], base[slow] / 8, rtol=1e-6)
    between = ~fast & ~slow
    assert between.any()
    assert ((frequencies[between] > base[between] / 8) & (frequencies[between] < base[between])).all()
    smooth = (8192 / wavelength[between] - 1) / 3
    np.testing.assert_allclose(
        frequencies[between], (1 - smooth) * base[between] / 8 + smooth * base[between], rtol=1e-5
    )


class TestYarn:
    def test_ends_of_the_ramp(self) -> None:
        frequencies = inverse(YARN)
        np.testing.assert_allclose(frequencies[0], plain()[0], rtol=1e-6)
        np.testing.assert_allclose(frequencies[-1], plain()[-1] / 4, rtol=1e-6)
        ratio = frequencies / plain()
        assert (np.diff(ratio) <= 1e-6).all()

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({}, 0.1 * math.log(4) + 1),
            ({"factor": 1.0}, 1.0),
            ({"attention_factor": 1.25}, 1.25),
            ({"mscale": 1.0, "mscale_all_dim": 0.5}, (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1)),
            ({"mscale": 1.0}, 0.1 * math.log(4) + 1),
        ],
    )
    def test_attention_factor(self, changes: dict[str, float], expected: float) -> None:
        assert rope_frequencies(replace(YARN, **changes), 131072).attention_factor == pytest.approx(expected, rel=1e-12)  # type: ignore[arg-type]

    def test_truncate_moves_the_ramp(self) -> None:
        assert (inverse(YARN) != inverse(replace(YARN, truncate=False))).any()

    def test_equal_betas_do_not_divide_by_zero(self) -> None:
        rope = replace(YARN, beta_fast=4.0, beta_slow=4.0, truncate=False)
        assert np.isfinite(inverse(rope)).all()


class TestFrequencyFactors:
    def test_they_divide(self) -> None:
        factors = tuple(float(value) for value in range(1, 33))
        found = inverse(replace(PLAIN, frequency_factors=factors))
        np.testing.assert_allclose(found, plain() / np.array(factors), rtol=1e-6)

    @pytest.mark.parametrize("factors", [(1.0,) * 31, (1.0,) * 31 + (0.0,), (1.0,) * 31 + (math.nan,), (-1.0,) * 32])
    def test_bad_ones_are_refused(self, factors: tuple[float, ...]) -> None:
        with pytest.raises(CheckpointError, match="frequency factors"):
            inverse(replace(PLAIN, frequency_factors=factors))


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (replace(PLAIN, rotary_dim=63), "rotary_dim 63"),
        (replace(PLAIN, rotary_dim=0), "rotary_dim 0"),
        (replace(PLAIN, theta=0.0), "theta 0"),
        (replace(PLAIN, kind="linear", factor=0.0), "kind linear needs factor > 0, found 0.0"),
        (replace(LLAMA3, low_freq_factor=None), "kind llama3 needs low_freq_factor > 0, found None"),
        (replace(LLAMA3, original_max_position=None), "kind llama3 needs original_max_position"),
        (replace(LLAMA3, low_freq_factor=4.0), "low_freq_factor 4.0 must be below"),
        (replace(YARN, factor=math.inf), "kind yarn needs factor > 0, found inf"),
        (replace(PLAIN, kind="dynamic", factor=2.0, rotary_dim=2), "needs rotary_dim > 2"),
    ],
)
def test_impossible_settings_name_the_field(rope: RopeConfig, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        rope_frequencies(rope, 4096, 8192)


def test_unknown_kind_lists_the_known() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'longrope'.*default, linear, dynamic, llama3, yarn"):
        rope_frequencies(replace(PLAIN, kind="longrope"), 4096)  # type: ignore[arg-type]
