"""The ops of docs/ops.md in numpy, on whole arrays.

Precision "float32" uses numpy's products and exp where the contract fixes an order, "contract" follows it to the bit
(reference_contract.py), "float64" accumulates in binary64 and rounds each op's result to float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from neoserve.program.plan import activation_group
from neoserve.program.reference_contract import (
    LANES,
    PARTITION,
    attend_partitions,
    exp,
    fma,
    fold_lanes,
    ordered_product,
)
from neoserve.types.tensors import TensorRows, WeightFormat

Array = npt.NDArray[np.float32]
AnyArray = npt.NDArray[np.floating]
Precision = Literal["float32", "float64", "contract"]
SMALLEST_QUANTIZED = np.float32(1e-36)
"""A group whose largest value is below it quantises to zeros: 127 / largest could overflow."""

PRECISIONS: tuple[Precision, ...] = ("float32", "float64", "contract")


@dataclass(slots=True)
class Quantized:
    """An int8 activation: values [T, K], scales f32 and sums int32 [T, groups]."""

    values: npt.NDArray[np.int8]
    scales: Array
    sums: npt.NDArray[np.int32]


@dataclass(slots=True)
class ReferenceWeight:
    """A weight [N, K] in plain arrays; ``values`` is float32, int8 or uint8, the rest float32 [N, groups]."""

    format: WeightFormat
    values: npt.NDArray[np.number]
    scales: Array | None = None
    minimums: Array | None = None
    zeros: Array | None = None

    @classmethod
    def stack(cls, fmt: WeightFormat, blocks: list[TensorRows]) -> ReferenceWeight:
        """Joins blocks of rows; scales, minimums and zeros are widened to float32, int8_channel scales to [N, 1]."""
        values = np.concatenate([np.asarray(block.values) for block in blocks])
        if fmt.kind in ("f32", "bf16"):
            return cls(fmt, values.astype(np.float32))

        def widened(name: str) -> Array | None:
            arrays = [getattr(block, name) for block in blocks]
            if any(array is None for array in arrays):
                return None
            return np.concatenate(arrays).astype(np.float32).reshape(len(values), -1)

        minimums = widened("minimums") if fmt.offset == "minimum" else None
        zeros = widened("zeros") if fmt.offset == "zero" else None
        return cls(fmt, values, widened("scales"), minimums, zeros)

    def rows(self, index: npt.NDArray[np.int32]) -> Array:
        """Dequantised rows [len(index), K], rounded as op ``embed`` says."""
        values = self.values[index].astype(np.float32)
        if self.scales is None:
            return values
        group = values.shape[1] // self.scales.shape[1]
        scales = np.repeat(self.scales[index], group, axis=1)
        if self.zeros is not None:
            return (values - np.repeat(self.zeros[index], group, axis=1)) * scales
        if self.minimums is not None:
            return fma(values, scales, np.repeat(self.minimums[index], group, axis=1))
        return values * scales


def as_f32(x: npt.ArrayLike) -> Array:
    """``x`` as float32."""
    return np.asarray(x, np.float32)


def round_bf16(x: Array) -> Array:
    """Nearest-even bf16, as float32."""
    return as_f32(x.astype(ml_dtypes.bfloat16))


def rms_norm(x: Array, weight: Array, width: int, eps: float, precision: Precision) -> Array:
    """RMS norm over every ``width`` columns of [T, columns]."""
    heads = x.reshape(len(x), -1, width)
    if precision == "float64":
        wide = heads.astype(np.float64)
        root = np.sqrt((wide * wide).mean(axis=-1, keepdims=True) + eps)
        return as_f32(wide / root * weight).reshape(x.shape)
    lanes = np.zeros((*heads.shape[:-1], LANES), np.float32)
    for start in range(0, width, LANES):
        part = heads[..., start : start + LANES]
        lanes[..., : part.shape[-1]] = fma(part, part, lanes[..., : part.shape[-1]])
    mean = as_f32(fold_lanes(lanes)) / np.float32(width)
    scale = np.float32(1) / np.sqrt(mean + np.float32(eps))
    return as_f32((heads * scale[..., None]) * weight).reshape(x.shape)


def quantize(x: Array, fmt: str) -> Array | Quantized:
    """``x`` [T, K] in activation format ``fmt``: bf16 (returned as rounded float32), int8_token or int8_gN."""
    if fmt == "bf16":
        return round_bf16(x)
    group = activation_group(fmt, x.shape[1])
    parts = x.reshape(len(x), -1, group)
    largest = np.abs(parts).max(axis=-1)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest >= SMALLEST_QUANTIZED)
    values = np.clip(np.rint(parts * inverse[..., None]), -127, 127).astype(np.int8)
    sums = values.sum(axis=-1, dtype=np.int32)
    return Quantized(values.reshape(x.shape), largest / np.float32(127), sums)


def linear(x: Array | Quantized, weight: ReferenceWeight, precision: Precision) -> Array:
    """x [T, K] times weight [N, K] transposed, without bias: [T, N]."""
    if not isinstance(x, Quantized):
        if precision == "float64":
            return (x.astype(np.float64) @ weight.values.T.astype(np.float64)).astype(np.float32)
        if precision == "contract":
            return ordered_product(x, weight.values.astype(np.float32))
        return x @ weight.values.T.astype(np.float32)
    assert weight.scales is not None
    if weight.format.kind == "int8_channel":
        return integer_dot(x.values, weight.values) * (x.scales * weight.scales[:, 0])
    groups = weight.scales.shape[1]
    total = np.zeros((len(x.values), len(weight.values)), np.float64 if precision == "float64" else np.float32)
    x_parts = x.values.reshape(len(x.values), groups, -1)
    w_parts = weight.values.reshape(len(weight.values), groups, -1)
    for index in range(groups):
        dot = integer_dot(x_parts[:, index], w_parts[:, index])
        activation_sum = x.sums[:, index, None].astype(np.float32)
        activation_scale = x.scales[:, index, None]
        if weight.zeros is not None:
            dot = dot - weight.zeros[:, index] * activation_sum
        total = _accumulate(dot, activation_scale * weight.scales[:, index], total, precision)
        if weight.minimums is not None:
            total = _accumulate(activation_sum, activation_scale * weight.minimums[:, index], total, precision)
    return total.astype(np.float32)


def _accumulate(a: Array, b: Array, total: AnyArray, precision: Precision) -> AnyArray:
    if precision == "contract":
        return fma(a, b, total)
    wide = a.astype(np.float64) * b + total
    return wide.astype(total.dtype)


def integer_dot(x: npt.NDArray[np.int8], w: npt.NDArray[np.number]) -> Array:
    """Exact integer dot products as float32: the working type holds every partial sum of products exactly."""
    exact = np.float32 if x.shape[1] * 127 * 127 < 1 << 24 else np.float64
    return as_f32(x.astype(exact) @ w.T.astype(exact))


def rope_table(positions: npt.NDArray[np.int32], frequencies: Array, attention_factor: float) -> Array:
    """cos then sin of float32 angles, [T, 2 * len(frequencies)]."""
    angles = (positions.astype(np.float32)[:, None] * frequencies).astype(np.float64)
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    return as_f32(table * np.float32(attention_factor))


def rope(x: Array, table: Array, head_dim: int) -> Array:
    """Rotates the first D = table columns of every head of [T, heads * head_dim]."""
    half = table.shape[1] // 2
    heads = x.reshape(len(x), -1, head_dim).copy()
    cos, sin = table[:, None, :half], table[:, None, half:]
    first, second = heads[..., :half].copy(), heads[..., half : 2 * half].copy()
    heads[..., :half] = fma(first, cos, -(second * sin))
    heads[..., half : 2 * half] = fma(second, cos, first * sin)
    return heads.reshape(x.shape)


def silu_mul(x: Array) -> Array:
    """silu(gate) * up of [T, 2 I]."""
    gate, up = np.split(x, 2, axis=1)
    return as_f32(gate / (np.float32(1) + exp(-gate)) * up)


def gelu_tanh_mul(x: Array) -> Array:
    """gelu(gate) * up of [T, 2 I], tanh form."""
    gate, up = np.split(x, 2, axis=1)
    inner = np.float32(0.7978845608) * fma(np.float32(0.044715) * gate * gate, gate, gate)
    tanh = np.float32(1) - np.float32(2) / (exp(inner + inner) + np.float32(1))
    return as_f32((np.float32(0.5) * gate) * (np.float32(1) + tanh) * up)


def attend(
    q: Array, k: Array, v: Array, positions: npt.NDArray[np.int32], scale: float, window: int, precision: Precision
) -> Array:
    """Attention of one sequence.

    ``q`` [T, heads, D] at ascending absolute ``positions`` [T]; ``k`` and ``v`` [L, kv heads, D] for positions
    0 to L - 1 (rows before the first visible partition are not read). ``window`` 0 means none. Returns [T, heads * D].
    """
    work = np.dtype(np.float64 if precision == "float64" else np.float32)
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    # [kv head, token x query head, D]: the heads of one kv head are neighbours
    grouped = q.reshape(tokens, kv_heads, -1, head_dim).transpose(1, 0, 2, 3)
    queries = grouped.reshape(kv_heads, -1, head_dim).astype(work)
    last = np.repeat(positions, heads // kv_heads)
    first = np.maximum(last - window + 1, 0) if window else np.zeros_like(last)
    if precision == "contract":
        output = attend_partitions(as_f32(queries), k, v, first, last, scale)
    else:
        output = _attend_dense(queries, k, v, first, last, scale)
    heads_apart = as_f32(output).reshape(kv_heads, tokens, -1, head_dim)
    return heads_apart.transpose(1, 0, 2, 3).reshape(tokens, heads * head_dim)


def _attend_dense(
    queries: AnyArray, k: Array, v: Array, first: npt.NDArray[np.int32], last: npt.NDArray[np.int32], scale: float
) -> AnyArray:
    """As reference_contract.attend_partitions, with numpy's products, sums and exp, in the type of ``queries``."""
    work = queries.dtype
    maximum = np.full(queries.shape[:2], -np.inf, work)
    total, output = np.zeros(queries.shape[:2], work), np.zeros(queries.shape, work)
    for start in range(int(first.min()) // PARTITION * PARTITION, len(k), PARTITION):
        span = np.arange(start, min(start + PARTITION, len(k)))
        visible = (span >= first[:, None]) & (span <= last[:, None])
        keys, values = (x[span].transpose(1, 0, 2).astype(work) for x in (k, v))
        scores = np.where(visible, work.type(scale) * (queries @ keys.transpose(0, 2, 1)), work.type(-np.inf))
        peak = scores.max(axis=-1)
        weights = np.exp(scores - _finite(peak)[..., None])
        highest = np.maximum(maximum, peak)
        before, now = np.exp(maximum - _finite(highest)), np.exp(peak - _finite(highest))
        total = total * before + weights.sum(axis=-1) * now
        output = output * before[..., None] + (weights @ values) * now[..., None]
        maximum = highest
    return np.asarray(output / total[..., None])


def _finite(maximum: AnyArray) -> AnyArray:
    """A maximum over nothing visible is -inf; 0 in its place keeps exp(-inf - it) = 0 instead of NaN."""
    return np.where(np.isfinite(maximum), maximum, np.zeros_like(maximum))
