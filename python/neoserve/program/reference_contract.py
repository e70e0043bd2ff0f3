"""The float arithmetic of docs/ops.md to the bit: exact fused multiply-add, the contract's exp, ordered accumulation.

Slow (a Python loop over K), for small models: what these functions give, every kernel row must give, bit for bit.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

PARTITION = 256
"""Positions per attention partition, a constant of the contract."""
LANES = 16

_EXP_LOW, _EXP_HIGH = np.float32(-87.33654), np.float32(88.0)
_LOG2_E = np.float32(1.44269504)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_EXP_POLYNOMIAL = tuple(np.float32(1) / np.float32(n) for n in (720, 120, 24, 6, 2, 1, 1))


def fma(a: npt.ArrayLike, b: npt.ArrayLike, c: npt.ArrayLike) -> Array:
    """a * b + c of float32 values, rounded once to float32.

    The product is exact in float64. The sum is rounded to odd there (its error, by Knuth's two-sum, tells whether it
    was inexact), so that the second rounding, to float32, gives what a single one would.
    """
    product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
    addend = np.asarray(c, np.float64)
    total = np.asarray(product + addend)
    back = total - product
    error = (product - (total - back)) + (addend - back)
    even = (total.view(np.int64) & 1) == 0
    odd = np.where(even & (error != 0), np.nextafter(total, np.copysign(np.inf, error)), total)
    return np.asarray(odd, np.float32)


def exp(x: Array) -> Array:
    """The contract's exp."""
    clamped = np.clip(x, _EXP_LOW, _EXP_HIGH)
    n = np.rint(clamped * _LOG2_E)
    r = fma(n, -_LN2_LOW, fma(n, -_LN2_HIGH, clamped))
    result = np.broadcast_to(_EXP_POLYNOMIAL[0], r.shape)
    for coefficient in _EXP_POLYNOMIAL[1:]:
        result = fma(result, r, coefficient)
    power = ((n.astype(np.int32) + 127) << 23).view(np.float32)
    return np.asarray(result * power, np.float32)


def ordered_product(x: Array, w: Array) -> Array:
    """x [..., M, K] times w [..., N, K] transposed: one accumulator per output, k ascending."""
    total = np.zeros((*x.shape[:-1], w.shape[-2]), np.float32)
    for k in range(x.shape[-1]):
        total = fma(x[..., :, None, k], w[..., None, :, k], total)
    return total


def fold_lanes(lanes: Array) -> Array:
    """The tree that ends a sixteen-lane sum, over the last axis (size 16)."""
    for half in (8, 4, 2, 1):
        lanes = lanes[..., :half] + lanes[..., half : 2 * half]
    return lanes[..., 0]


def lane_sum(x: Array) -> Array:
    """Sixteen-lane sum over the last axis."""
    lanes = np.zeros((*x.shape[:-1], LANES), np.float32)
    for start in range(0, x.shape[-1], LANES):
        part = x[..., start : start + LANES]
        lanes[..., : part.shape[-1]] += part
    return fold_lanes(lanes)


def attend_partitions(
    queries: Array, k: Array, v: Array, first: npt.NDArray[np.int32], last: npt.NDArray[np.int32], scale: float
) -> Array:
    """Attention of ``queries`` [kv heads, R, D]; row r sees positions [first[r], last[r]] of k, v [L, kv heads, D]."""
    maximum = np.full(queries.shape[:2], -np.inf, np.float32)
    total, output = np.zeros(queries.shape[:2], np.float32), np.zeros(queries.shape, np.float32)
    for start in range(int(first.min()) // PARTITION * PARTITION, len(k), PARTITION):
        span = np.arange(start, min(start + PARTITION, len(k)))
        visible = (span >= first[:, None]) & (span <= last[:, None])
        seen = visible.any(axis=1)
        keys, values = (np.ascontiguousarray(x[span].transpose(1, 0, 2)) for x in (k, v))
        scores = np.where(visible, np.float32(scale) * ordered_product(queries, keys), np.float32(-np.inf))
        peak = np.where(seen, scores.max(axis=-1), np.float32(0))
        weights = np.where(visible, exp(np.where(visible, scores - peak[..., None], np.float32(0))), np.float32(0))
        part_total = lane_sum(weights)
        part = ordered_product(weights, values.transpose(0, 2, 1))
        fresh, merged = seen & np.isinf(maximum), seen & ~np.isinf(maximum)
        safe = np.where(merged, maximum, peak)
        highest = np.maximum(safe, peak)
        before, now = exp(safe - highest), exp(peak - highest)
        joined = fma(total, before, part_total * now)
        joined_output = fma(output, before[..., None], part * now[..., None])
        total = np.where(fresh, part_total, np.where(merged, joined, total))
        output = np.where(fresh[..., None], part, np.where(merged[..., None], joined_output, output))
        maximum = np.where(fresh, peak, np.where(merged, highest, maximum))
    return np.asarray(output / total[..., None], np.float32)
