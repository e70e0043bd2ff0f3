"""Quantisation at load: any checkpoint's matrices rounded to int8 per channel or int4 in groups, row by row.

Round-to-nearest without calibration. int8: symmetric, one scale per output row, the scheme of LLM.int8() without its
outlier columns (Dettmers et al. 2022, section 2.1). int4: asymmetric in groups of 32, scale and minimum in f16, the
layout of GGUF's Q4_1. Rows are independent, so that a weight is quantised in blocks of rows while it streams in.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from neoserve.types.errors import CheckpointError
from neoserve.types.options import Quantization
from neoserve.types.tensors import BF16, INT8_CHANNEL, TensorRows, WeightFormat

INT4_GROUP = WeightFormat("int4_group", 32, "f16", "minimum")

_ENDS = ("embedding", "lm_head")
"""Parameters at the ends of a model: every token's logits depend on them, so int4 keeps them in int8."""

Float32Array = npt.NDArray[np.float32]


def quantized_format(name: str, k: int, native: WeightFormat, quantization: Quantization) -> WeightFormat:
    """The format of matrix ``name`` of K = ``k`` columns under ``quantization``.

    int4 leaves a matrix that is stored in int4 groups as it is, and takes int8 per channel for the embedding, the
    lm_head and matrices whose K its groups do not divide.
    """
    if quantization == "bf16":
        return BF16
    if quantization == "int8":
        return INT8_CHANNEL
    if name not in _ENDS and native.kind == "int4_group":
        return native
    return INT8_CHANNEL if name in _ENDS or k % INT4_GROUP.group else INT4_GROUP


def quantize_rows(values: Float32Array, fmt: WeightFormat, where: str) -> TensorRows:
    """float32 [n, K] rounded to ``fmt``, which is INT8_CHANNEL or INT4_GROUP.

    Raises CheckpointError, beginning with ``where``, if a value is not finite or beyond the range of the scales.
    """
    if not np.isfinite(values).all():
        row, column = np.argwhere(~np.isfinite(values))[0]
        raise CheckpointError(f"{where}: row {row} holds {values[row, column]} at {column}; the file is damaged")
    if fmt == INT8_CHANNEL:
        return _int8_channel(values)
    if fmt == INT4_GROUP:
        return _int4_group(values, where)
    raise ValueError(f"{where}: cannot quantise to {fmt}")


def _int8_channel(values: Float32Array) -> TensorRows:
    """value ~ scale * q with q in [-127, 127]; a row of zeros has scale 0."""
    scales = np.abs(values).max(axis=1) / np.float32(127)
    # Below 1e-37 a scale has no finite inverse in float32; such rows are noise and round to zero.
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 1e-37)
    quantised = np.rint(values * inverse[:, None]).clip(-127, 127).astype(np.int8)
    return TensorRows(INT8_CHANNEL, quantised, scales)


def _int4_group(values: Float32Array, where: str) -> TensorRows:
    """value ~ scale * q + minimum with q in [0, 15]; q is taken for the scale and minimum as rounded to f16."""
    n, k = values.shape
    groups = values.reshape(n, k // INT4_GROUP.group, INT4_GROUP.group)
    low, high = groups.min(axis=2), groups.max(axis=2)
    with np.errstate(over="ignore"):
        minimums, scales = low.astype(np.float16), ((high - low) / np.float32(15)).astype(np.float16)
    if not (np.isfinite(minimums).all() and np.isfinite(scales).all()):
        largest = np.abs(values).max()
        raise CheckpointError(f"{where}: values up to {largest:g} are beyond the f16 scales of int4; use int8")
    step = scales.astype(np.float32)[..., None]
    offset = groups - minimums.astype(np.float32)[..., None]
    quantised = np.rint(np.divide(offset, step, out=np.zeros_like(offset), where=step > 0)).clip(0, 15)
    return TensorRows(INT4_GROUP, quantised.astype(np.uint8).reshape(n, k), scales, minimums)
