"""neoserve.eval.perplexity against arithmetic that can be checked by hand, on a scripted executor."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from neoserve.eval.perplexity import perplexity, text_windows, token_nll
from neoserve.types.errors import ConfigurationError, NeoServeError
from neoserve.types.step import Float32Array, PageGroupSpec, SampleOutput, SamplingBatch, StepInput, StepLimits

VOCAB = 7


class ScriptedExecutor:
    """Logits of a token are a function of (its id, its position); notes the sizes of the steps."""

    def __init__(
        self, logits_of: Callable[[int, int], Float32Array], max_tokens: int = 8, max_logit_rows: int = 8
    ) -> None:
        group = PageGroupSpec(name="all", layers=(0,), window=None, page_bytes=64, num_pages=4)
        self.limits = StepLimits(
            max_tokens=max_tokens,
            max_sequences=2,
            max_logit_rows=max_logit_rows,
            max_context=100,
            page_size=16,
            vocab_size=VOCAB,
            groups=(group,),
        )
        self.step = StepInput.allocate(self.limits)
        self.steps: list[tuple[list[int], list[int]]] = []
        self._logits_of = logits_of

    def forward(self) -> None:
        step = self.step
        assert step.num_sequences == 1
        assert step.query_start[:2].tolist() == [0, step.num_tokens]
        assert step.context_len[0] == step.positions[step.num_tokens - 1] + 1
        pages = -(-int(step.context_len[0]) // self.limits.page_size)
        assert step.block_tables[0][0, :pages].tolist() == list(range(pages))
        ids, positions = step.token_ids[: step.num_tokens].tolist(), step.positions[: step.num_tokens].tolist()
        self.steps.append((ids, positions))
        rows = step.logit_rows[: step.num_logit_rows]
        self._logits = np.stack([self._logits_of(ids[row], positions[row]) for row in rows])

    def logits(self) -> Float32Array:
        return self._logits

    def sample(self, batch: SamplingBatch) -> SampleOutput:
        raise AssertionError("perplexity draws no tokens")

    def close(self) -> None:
        pass


def _table(token: int, position: int) -> Float32Array:
    return np.random.default_rng(100 * token + position).normal(size=VOCAB).astype(np.float32) * 5


def test_uniform_logits_give_the_vocabulary_size() -> None:
    executor = ScriptedExecutor(lambda token, position: np.zeros(VOCAB, np.float32))
    assert perplexity(executor, [[1, 2, 3], [4, 5]]) == pytest.approx(VOCAB, rel=1e-12)


@pytest.mark.parametrize("limits", [(8, 8), (3, 8), (8, 5), (1, 1), (64, 64)])
def test_each_token_is_scored_by_the_logits_before_it(limits: tuple[int, int]) -> None:
    tokens = [3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 0, 6, 2, 6, 4, 3, 3, 2, 1, 0]
    executor = ScriptedExecutor(_table, *limits)
    nll = token_nll(executor, tokens)
    for index in range(len(tokens) - 1):
        weights = [math.exp(float(value)) for value in _table(tokens[index], index)]
        assert nll[index] == pytest.approx(-math.log(weights[tokens[index + 1]] / sum(weights)), rel=1e-9)
    assert max(len(ids) for ids, _ in executor.steps) <= min(limits)
    assert [token for ids, _ in executor.steps for token in ids] == tokens[:-1]
    assert [place for _, positions in executor.steps for place in positions] == list(range(len(tokens) - 1))


def test_perplexity_weighs_tokens_not_windows() -> None:
    windows = [[1, 2, 3, 4, 5, 6], [6, 0]]
    executor = ScriptedExecutor(_table)
    parts = np.concatenate([token_nll(executor, window) for window in windows])
    assert perplexity(executor, windows) == pytest.approx(math.exp(parts.mean()), rel=1e-12)


def test_large_logits_do_not_overflow() -> None:
    row = np.array([3e4, 0, 0, 0, 0, 0, -3e4], np.float32)
    executor = ScriptedExecutor(lambda token, position: row)
    assert token_nll(executor, [1, 0, 6]).tolist() == [0.0, 6e4]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_an_error_with_their_position(bad: float) -> None:
    """Not a perplexity of NaN, or one that leaves the window out."""

    def logits_of(token: int, position: int) -> Float32Array:
        row = np.zeros(VOCAB, np.float32)
        row[2] = bad if position == 9 else 0
        return row

    with pytest.raises(NeoServeError, match="position 9 "):
        perplexity(ScriptedExecutor(logits_of), [[1] * 14])


@pytest.mark.parametrize(
    ("window", "message"),
    [
        ([1], "1 tokens"),
        ([], "0 tokens"),
        ([1] * 102, "context is 100"),
        ([1] * 70, "needs 5 pages of group 'all', which has 4"),
        ([1, VOCAB], f"token id {VOCAB}"),
        ([-1, 1], "token id -1"),
    ],
)
def test_windows_that_do_not_fit_are_refused(window: list[int], message: str) -> None:
    executor = ScriptedExecutor(_table)
    with pytest.raises(ConfigurationError, match=message):
        perplexity(executor, [window])
    assert executor.steps == []


def test_no_windows_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="token_windows is empty"):
        perplexity(ScriptedExecutor(_table), [])


def test_text_windows() -> None:
    assert text_windows(range(10), 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert text_windows(range(8), 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert text_windows(range(7), 4, bos=99) == [[99, 0, 1, 2], [99, 3, 4, 5]]
    with pytest.raises(ConfigurationError, match="window is 1;"):
        text_windows(range(7), 1)
    with pytest.raises(ConfigurationError, match="only 3 tokens"):
        text_windows(range(3), 4)
