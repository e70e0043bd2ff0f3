"""Philox 4x32-10: the counter-based generator behind every draw.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. The number is a pure function
of key and counter, so a token's randomness depends on (seed, position) alone: not on the batch, a cache or a retry.
"""

from __future__ import annotations

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)

Words4 = tuple[int, int, int, int]


def philox4x32(counter: Words4, key: tuple[int, int], rounds: int = 10) -> Words4:
    """Four random 32-bit words for a counter of four words and a key of two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & _WORD,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & _WORD,
        )
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that draws the token at ``position``: 24 bits, so exact in binary32.

    ``seed`` is an unsigned 64-bit integer (low word first in the key), ``position`` an absolute token position.
    """
    word, _, _, _ = philox4x32((position, 0, 0, 0), (seed & _WORD, seed >> 32))
    return (word >> 8) * 2.0**-24
