"""Perplexity of a model over windows of tokens, through any executor.

The measure is the usual one: every window is run alone from position 0, the first token of a window is given and every
later one is scored, and perplexity = exp(mean negative log likelihood in nats over all scored tokens). Logits are
float32 as the executor gives them; the log softmax is taken in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from neoserve.types.errors import ConfigurationError, NeoServeError
from neoserve.types.step import Executor, StepLimits

Float64Array = npt.NDArray[np.float64]

_ROWS_AT_ONCE = 64  # float64 copies of logits rows; a vocabulary of 262144 makes 134 MB of them


def text_windows(token_ids: Sequence[int], window: int, bos: int | None = None) -> list[list[int]]:
    """Cuts ``token_ids`` into consecutive windows of ``window`` tokens; a last part that is not full is dropped.

    With ``bos`` every window starts with it and holds ``window - 1`` tokens of the text, as models expect whose
    prompts always start with BOS. Raises ConfigurationError if ``window`` is below 2 or longer than the text.
    """
    head = [] if bos is None else [bos]
    if window < 2:
        raise ConfigurationError(f"window is {window}; it must be at least 2: the first token is given, not scored")
    step = window - len(head)
    if len(token_ids) < step:
        raise ConfigurationError(
            f"window is {window}, but the text has only {len(token_ids)} tokens; shorten the window"
        )
    starts = range(0, len(token_ids) - step + 1, step)
    return [head + list(token_ids[start : start + step]) for start in starts]


def token_nll(executor: Executor, tokens: Sequence[int]) -> Float64Array:
    """Negative log likelihood (nats) of tokens 1 to n - 1 of one window: float64 [n - 1].

    The window is run as the only sequence, in chunks as large as the executor's limits allow, and overwrites the first
    pages of every page group. Raises ConfigurationError if it has fewer than 2 tokens or does not fit the limits,
    NeoServeError if a logit is not finite.
    """
    _check_window(executor.limits, tokens)
    # The last token is scored, never run: nothing is predicted from it.
    last = len(tokens) - 1
    chunk = min(executor.limits.max_tokens, executor.limits.max_logit_rows)
    parts = []
    for start in range(0, last, chunk):
        stop = min(start + chunk, last)
        executor.step.fill_single(tokens, start, stop, executor.limits.page_size)
        executor.forward()
        parts.append(_nll_of_rows(executor.logits(), np.asarray(tokens[start + 1 : stop + 1]), start))
    return np.concatenate(parts)


def perplexity(executor: Executor, token_windows: Iterable[Sequence[int]]) -> float:
    """exp of the mean negative log likelihood over the scored tokens of all windows.

    Raises ConfigurationError if there are no windows or one does not fit, NeoServeError on logits that are not finite.
    """
    total, count = 0.0, 0
    for window in token_windows:
        nll = token_nll(executor, window)
        total += float(nll.sum())
        count += len(nll)
    if count == 0:
        raise ConfigurationError("token_windows is empty; perplexity needs at least one window of 2 tokens")
    return math.exp(total / count)


def _check_window(limits: StepLimits, tokens: Sequence[int]) -> None:
    if len(tokens) < 2:
        raise ConfigurationError(f"a window has {len(tokens)} tokens; it needs at least 2, for the first is not scored")
    if len(tokens) - 1 > limits.max_context:
        raise ConfigurationError(
            f"a window has {len(tokens)} tokens; the executor's context is {limits.max_context}: shorten the window"
        )
    bad = [token for token in tokens if not 0 <= token < limits.vocab_size]
    if bad:
        raise ConfigurationError(f"a window has token id {bad[0]}; ids must be in [0, {limits.vocab_size})")
    pages = -(-(len(tokens) - 1) // limits.page_size)
    for group in limits.groups:
        if pages > group.num_pages:
            raise ConfigurationError(
                f"a window of {len(tokens)} tokens needs {pages} pages of group {group.name!r}, which has "
                f"{group.num_pages}: shorten the window or raise kv_cache_bytes"
            )


def _nll_of_rows(
    logits: npt.NDArray[np.float32], targets: npt.NDArray[np.integer], position: int
) -> npt.NDArray[np.float64]:
    """-log softmax(logits[r])[targets[r]] for every row; ``position`` is the first row's, for the message."""
    result = np.empty(len(targets), np.float64)
    for start in range(0, len(targets), _ROWS_AT_ONCE):
        rows = logits[start : start + _ROWS_AT_ONCE].astype(np.float64)
        finite = np.isfinite(rows).all(axis=1)
        if not finite.all():
            row = position + start + int(np.argmin(finite))
            raise NeoServeError(f"the logits at position {row} are not finite; the weights or a kernel are at fault")
        top = rows.max(axis=1)
        log_sum = top + np.log(np.exp(rows - top[:, None]).sum(axis=1))
        wanted = targets[start : start + len(rows)]
        result[start : start + len(rows)] = log_sum - rows[np.arange(len(rows)), wanted]
    return result
