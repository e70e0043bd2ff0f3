"""Rotary embedding frequencies of every supported kind, rounded as transformers rounds them in float32."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from neoserve.program.trace import Tracer, Value
from neoserve.types.errors import CheckpointError, UnsupportedModelError
from neoserve.types.model import RopeConfig

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RopeFrequencies:
    """Inverse frequencies [rotary_dim / 2] (radians per position, float32) and the factor on cos and sin."""

    inverse: Float32Array
    attention_factor: float


def rope_frequencies(rope: RopeConfig, max_position: int, context_length: int | None = None) -> RopeFrequencies:
    """Frequencies of ``rope`` for a model trained to ``max_position`` tokens and served up to ``context_length``.

    Kind ``dynamic`` is static here: when ``context_length`` exceeds the original maximum, the NTK base of that
    length is used for all positions, because a base that grows with each sequence would make cached K depend on
    later tokens; up to the original maximum it equals the plain embedding, as in transformers.

    ``rope.frequency_factors`` divide the inverse frequencies of any kind.

    Raises CheckpointError naming a missing or impossible field, UnsupportedModelError on an unknown kind.
    """
    if rope.rotary_dim <= 0 or rope.rotary_dim % 2 or rope.theta <= 0:
        raise CheckpointError(
            f"rope has rotary_dim {rope.rotary_dim} and theta {rope.theta}; both must be positive, rotary_dim even"
        )
    match rope.kind:
        case "default":
            result = RopeFrequencies(_plain(rope.theta, rope.rotary_dim), 1.0)
        case "linear":
            factor = _positive(rope, "factor")
            plain = _plain(rope.theta, rope.rotary_dim)
            result = RopeFrequencies((plain / np.float32(factor)).astype(np.float32), 1.0)
        case "dynamic":
            result = RopeFrequencies(_dynamic(rope, max_position, context_length), 1.0)
        case "llama3":
            result = RopeFrequencies(_llama3(rope), 1.0)
        case "yarn":
            result = _yarn(rope, max_position)
        case _:
            raise UnsupportedModelError(
                f"rope kind {rope.kind!r} is not supported; known: default, linear, dynamic, llama3, yarn"
            )
    return _with_factors(result, rope.frequency_factors)


def rope_table(tracer: Tracer, rope: RopeConfig, max_position: int, context_length: int | None = None) -> Value:
    """Records the cos/sin table [T, rotary_dim] of ``rope``; layers with equal frequencies share one."""
    frequencies = rope_frequencies(rope, max_position, context_length)
    return tracer.rope_table(frequencies.inverse.tolist(), frequencies.attention_factor)


def _position_frequencies(theta: float, dim: int) -> Float32Array:
    """theta ** (i / dim) for i = 0, 2, ...: exponent and base rounded to f32, the power correctly rounded."""
    exponents = np.arange(0, dim, 2).astype(np.float32) / np.float32(dim)
    base = float(np.float32(theta))
    powers: Float32Array = np.power(base, exponents.astype(np.float64)).astype(np.float32)
    return powers


def _plain(theta: float, dim: int) -> Float32Array:
    return np.reciprocal(_position_frequencies(theta, dim))


def _dynamic(rope: RopeConfig, max_position: int, context_length: int | None) -> Float32Array:
    original = rope.original_max_position or max_position
    length = max(context_length or original, original)
    dim, factor = rope.rotary_dim, _positive(rope, "factor")
    if dim <= 2:
        raise CheckpointError(f"rope kind dynamic needs rotary_dim > 2, found {dim}")
    theta = rope.theta * ((factor * length / original) - (factor - 1)) ** (dim / (dim - 2))
    return _plain(theta, dim)


def _llama3(rope: RopeConfig) -> Float32Array:
    """Long wavelengths are divided by the factor, short ones kept, those between blended linearly."""
    factor, original = _positive(rope, "factor"), _positive(rope, "original_max_position")
    low, high = _positive(rope, "low_freq_factor"), _positive(rope, "high_freq_factor")
    if low >= high:
        raise CheckpointError(f"rope low_freq_factor {low} must be below high_freq_factor {high}")
    plain = _plain(rope.theta, rope.rotary_dim)
    wavelength = np.float32(2 * math.pi) / plain
    scaled = plain / np.float32(factor)
    smooth = (np.float32(original) / wavelength - np.float32(low)) / np.float32(high - low)
    blended = (np.float32(1) - smooth) * plain / np.float32(factor) + smooth * plain
    result = np.where(wavelength > np.float32(original / low), scaled, plain)
    between = (wavelength >= np.float32(original / high)) & (wavelength <= np.float32(original / low))
    return np.where(between, blended, result).astype(np.float32)


def _yarn(rope: RopeConfig, max_position: int) -> RopeFrequencies:
    """Interpolates slow dimensions, keeps fast ones, with a ramp between (betas are rotations over the context)."""
    factor = _positive(rope, "factor")
    original = rope.original_max_position or max_position
    fast, slow = rope.beta_fast or 32.0, rope.beta_slow or 1.0
    dim = rope.rotary_dim

    def correction(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = correction(fast), correction(slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # keeps the ramp's slope finite
    ramp = (np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    keep = np.float32(1) - np.clip(ramp, np.float32(0), np.float32(1))
    powers = _position_frequencies(rope.theta, dim)
    interpolated = np.float32(1) / (np.float32(factor) * powers)
    inverse = interpolated * (np.float32(1) - keep) + (np.float32(1) / powers) * keep
    return RopeFrequencies(inverse.astype(np.float32), _yarn_attention_factor(rope, factor))


def _yarn_attention_factor(rope: RopeConfig, factor: float) -> float:
    def magnitude(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)


def _with_factors(result: RopeFrequencies, factors: tuple[float, ...] | None) -> RopeFrequencies:
    if factors is None:
        return result
    if len(factors) != result.inverse.size or not all(math.isfinite(f) and f > 0 for f in factors):
        raise CheckpointError(
            f"rope frequency factors: found {len(factors)} values, need {result.inverse.size} positive finite ones"
        )
    divisors = np.asarray(factors, np.float32)
    return RopeFrequencies((result.inverse / divisors).astype(np.float32), result.attention_factor)


def _positive(rope: RopeConfig, field: str) -> float:
    value = getattr(rope, field)
    if value is None or not math.isfinite(value) or value <= 0:
        raise CheckpointError(f"rope kind {rope.kind} needs {field} > 0, found {value!r}; correct the model's config")
    return float(value)
