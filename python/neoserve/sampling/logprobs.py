"""Log probabilities of tokens from logits: the softmax at temperature 1 of the logits as the model gave them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from neoserve.types.request import TokenLogprob
from neoserve.types.step import ALL_IDS

Float32Array = npt.NDArray[np.float32]


def log_normalizer(row: Float32Array) -> float:
    """Natural log of the sum of exp over a row of logits [vocab], in binary64."""
    wide = row.astype(np.float64)
    top = float(wide.max())
    return top + float(np.log(np.exp(wide - top).sum()))


def best_ids(row: Float32Array, count: int) -> npt.NDArray[np.intp]:
    """The ``count`` largest logits' ids, best first, the lower id first among equals."""
    count = min(count, len(row))
    if count == 0:
        return np.zeros(0, np.intp)
    border = np.partition(row, len(row) - count)[len(row) - count]
    above = np.flatnonzero(row > border)
    # Of the ties at the border the lowest ids get the places that are left.
    ties = np.flatnonzero(row == border)[: count - len(above)]
    chosen = np.concatenate([above, ties])
    return chosen[np.lexsort((chosen, -row[chosen]))]


def score_tokens(
    logits: Float32Array, tokens: Sequence[int], alternatives: int, valid_vocabulary: int = ALL_IDS
) -> list[TokenLogprob]:
    """Scores token i with logits row i: ``logits`` is [len(tokens), vocab]. The softmax and the alternatives are over
    the ids below ``valid_vocabulary``; a token beyond has probability 0.

    Each row is worked on by itself, so the result does not depend on which rows share a step.
    """
    scores = []
    for row, token in zip(logits, tokens, strict=True):
        valid = row[:valid_vocabulary]
        normalizer = log_normalizer(valid)
        top = best_ids(valid, alternatives).tolist()
        pairs = tuple((index, _logprob(valid, index, normalizer)) for index in top)
        scores.append(TokenLogprob(token, _logprob(valid, token, normalizer), pairs))
    return scores


def _logprob(row: Float32Array, token: int, normalizer: float) -> float:
    return float(np.float32(float(row[token]) - normalizer)) if token < len(row) else -np.inf
