"""Tensor types of GGUF: how many bytes a block takes, and how blocks become canonical values without loss.

Decoding gives integers with scales (and minimums), never floats, so that a quantised weight stays quantised.
The scale of a super-block type is the product of a float16 and an integer of at most 8 bits: 11 + 8 bits fit the
24 bits of a float32, so the product is exact. So is scale times q (at most 24 bits in all), which leaves
``scale * q + minimum`` with a single rounding, the same with or without fused multiply-add, and the same as the
format's own definition ``d * q - m``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from neoserve.types.tensors import BF16, F32, WeightFormat

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Decoded:
    """Canonical arrays of some blocks; the two leading axes are (rows, blocks).

    ``values`` is [rows, blocks, block size], int8 or uint8; ``scales`` and ``minimums`` are
    [rows, blocks, groups per block], float16 or float32.
    """

    values: npt.NDArray[np.generic]
    scales: npt.NDArray[np.generic]
    minimums: npt.NDArray[np.generic] | None = None


@dataclass(frozen=True, slots=True)
class BlockType:
    """A loadable tensor type: ``size`` values along K stored in ``nbytes`` bytes, and their canonical format.

    ``halves`` are the byte positions of the block's float16 scales. ``decode`` takes [rows, blocks, nbytes].
    """

    name: str
    size: int
    nbytes: int
    native: WeightFormat
    halves: tuple[int, ...] = ()
    decode: Callable[[Bytes], Decoded] | None = None


def _half(blocks: Bytes, at: int) -> npt.NDArray[np.float16]:
    """The float16 at byte ``at`` of every block, as [rows, blocks, 1]."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2")


def _nibbles(packed: Bytes, run: int) -> Bytes:
    """Unpack runs of ``run`` bytes: their low nibbles, then their high nibbles; [..., n] -> [..., 2 n]."""
    *lead, count = packed.shape
    runs = packed.reshape(*lead, count // run, 1, run)
    out = np.empty((*lead, count // run, 2, run), np.uint8)
    np.bitwise_and(runs, 15, out=out[..., :1, :])
    np.right_shift(runs, 4, out=out[..., 1:, :])
    return out.reshape(*lead, 2 * count)


def _fifth_bits(packed: Bytes) -> Bytes:
    """Bit i of a block's 32-bit word belongs to value i: [..., 4] -> [..., 32], each 0 or 16."""
    return np.unpackbits(packed, axis=-1, bitorder="little") << np.uint8(4)


def _decode_q4_0(blocks: Bytes) -> Decoded:
    return Decoded(_nibbles(blocks[..., 2:], 16), _half(blocks, 0))


def _decode_q4_1(blocks: Bytes) -> Decoded:
    return Decoded(_nibbles(blocks[..., 4:], 16), _half(blocks, 0), _half(blocks, 2))


def _decode_q5_0(blocks: Bytes) -> Decoded:
    values = _nibbles(blocks[..., 6:], 16)
    values |= _fifth_bits(blocks[..., 2:6])
    signed = values.view(np.int8)
    signed -= 16
    return Decoded(signed, _half(blocks, 0))


def _decode_q5_1(blocks: Bytes) -> Decoded:
    values = _nibbles(blocks[..., 8:], 16)
    values |= _fifth_bits(blocks[..., 4:8])
    return Decoded(values.view(np.int8), _half(blocks, 0), _half(blocks, 2))


def _decode_q8_0(blocks: Bytes) -> Decoded:
    return Decoded(np.ascontiguousarray(blocks[..., 2:]).view(np.int8), _half(blocks, 0))


def _six_bit_pairs(packed: Bytes) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Eight 6-bit scales and eight 6-bit minimums out of twelve bytes: [..., 12] -> two of [..., 8].

    Bytes 0-3 hold scales 0-3 in their low six bits, bytes 4-7 the minimums 0-3. The pairs 4-7 have their low four
    bits in bytes 8-11 (scale low nibble, minimum high nibble) and their top two bits atop bytes 0-3 and 4-7.
    """
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 2) & 48)], axis=-1)
    minimums = np.concatenate([second & 63, (third >> 4) | ((second >> 2) & 48)], axis=-1)
    return scales.astype(np.float32), minimums.astype(np.float32)


def _super_block(blocks: Bytes, values: npt.NDArray[np.generic]) -> Decoded:
    """Scales and minimums of Q4_K and Q5_K, whose blocks both begin with d, dmin and the packed pairs."""
    scales, minimums = _six_bit_pairs(blocks[..., 4:16])
    scales *= _half(blocks, 0).astype(np.float32)
    minimums *= _half(blocks, 2).astype(np.float32)
    np.negative(minimums, out=minimums)
    return Decoded(values, scales, minimums)


def _decode_q4_k(blocks: Bytes) -> Decoded:
    return _super_block(blocks, _nibbles(blocks[..., 16:], 32))


def _decode_q5_k(blocks: Bytes) -> Decoded:
    values = _nibbles(blocks[..., 48:], 32)
    # Bit g of high byte i belongs to value i of group g.
    groups = values.reshape(*values.shape[:-1], 8, 32)
    high = blocks[..., None, 16:48]
    shifts = np.arange(8, dtype=np.uint8)[:, None]
    groups |= ((high >> shifts) & 1) << 4
    return _super_block(blocks, values.view(np.int8))


def _decode_q6_k(blocks: Bytes) -> Decoded:
    # Two halves of 128 values; a half has 64 low bytes (two runs of 32, low nibbles before high ones)
    # and 32 high bytes, whose four bit pairs belong to the half's four runs of 32 values.
    values = _nibbles(blocks[..., :128], 64)
    runs = values.reshape(*values.shape[:-1], 2, 4, 32)
    high = blocks[..., 128:192].reshape(*values.shape[:-1], 2, 1, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    runs |= ((high >> shifts) & 3) << 4
    signed = values.view(np.int8)
    signed -= 32
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).astype(np.float32)
    scales *= _half(blocks, 208).astype(np.float32)
    return Decoded(signed, scales)


_INT4_ZERO = WeightFormat("int4_group", 32, "f16", "zero")
_INT4_MINIMUM = WeightFormat("int4_group", 32, "f16", "minimum")
_INT8 = WeightFormat("int8_group", 32, "f16", "none")
_INT8_MINIMUM = WeightFormat("int8_group", 32, "f16", "minimum")
_INT4_K = WeightFormat("int4_group", 32, "f32", "minimum")
_INT8_K = WeightFormat("int8_group", 32, "f32", "minimum")
_INT8_G16 = WeightFormat("int8_group", 16, "f32", "none")

# Tensor type number -> type.
BLOCK_TYPES: dict[int, BlockType] = {
    0: BlockType("F32", 1, 4, F32),
    1: BlockType("F16", 1, 2, F32),
    2: BlockType("Q4_0", 32, 18, _INT4_ZERO, (0,), _decode_q4_0),
    3: BlockType("Q4_1", 32, 20, _INT4_MINIMUM, (0, 2), _decode_q4_1),
    6: BlockType("Q5_0", 32, 22, _INT8, (0,), _decode_q5_0),
    7: BlockType("Q5_1", 32, 24, _INT8_MINIMUM, (0, 2), _decode_q5_1),
    8: BlockType("Q8_0", 32, 34, _INT8, (0,), _decode_q8_0),
    12: BlockType("Q4_K", 256, 144, _INT4_K, (0, 2), _decode_q4_k),
    13: BlockType("Q5_K", 256, 176, _INT8_K, (0, 2), _decode_q5_k),
    14: BlockType("Q6_K", 256, 210, _INT8_G16, (208,), _decode_q6_k),
    30: BlockType("BF16", 1, 2, BF16),
}

# Known but not loadable: tensor type number -> (name, the nearest loadable file type).
UNSUPPORTED_TYPES: dict[int, tuple[str, str]] = {
    4: ("Q4_2", "Q4_0"),
    5: ("Q4_3", "Q4_1"),
    9: ("Q8_1", "Q8_0"),
    10: ("Q2_K", "Q4_K_M"),
    11: ("Q3_K", "Q4_K_M"),
    15: ("Q8_K", "Q8_0"),
    16: ("IQ2_XXS", "Q4_K_M"),
    17: ("IQ2_XS", "Q4_K_M"),
    18: ("IQ3_XXS", "Q4_K_M"),
    19: ("IQ1_S", "Q4_K_M"),
    20: ("IQ4_NL", "Q4_0"),
    21: ("IQ3_S", "Q4_K_M"),
    22: ("IQ2_S", "Q4_K_M"),
    23: ("IQ4_XS", "Q4_K_M"),
    24: ("I8", "F32"),
    25: ("I16", "F32"),
    26: ("I32", "F32"),
    27: ("I64", "F32"),
    28: ("F64", "F32"),
    29: ("IQ1_M", "Q4_K_M"),
    31: ("Q4_0_4_4", "Q4_0"),
    32: ("Q4_0_4_8", "Q4_0"),
    33: ("Q4_0_8_8", "Q4_0"),
    34: ("TQ1_0", "Q4_K_M"),
    35: ("TQ2_0", "Q4_K_M"),
    36: ("IQ4_NL_4_4", "Q4_0"),
    37: ("IQ4_NL_4_8", "Q4_0"),
    38: ("IQ4_NL_8_8", "Q4_0"),
    39: ("MXFP4", "Q4_K_M"),
    40: ("NVFP4", "Q4_K_M"),
    41: ("Q1_0", "Q4_K_M"),
}
