"""The native sampler against the reference, on random logits and parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from neoserve.engine.load import load_engine
from neoserve.sampling.philox import uniform
from neoserve.sampling.reference import NO_TOKEN, row_distribution, sample_reference
from neoserve.types.options import EngineOptions
from neoserve.types.step import Executor, Float32Array, SampleOutput, SamplingBatch

_native = pytest.importorskip("neoserve._native")

TINY = Path(__file__).parents[1] / "models" / "golden" / "tiny" / "llama"
ROWS = 64
# Sums of a few hundred binary64 terms in another order differ by less than this.
TOLERANCE = 1e-9


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    options = EngineOptions(
        max_running_requests=ROWS, max_tokens_per_step=ROWS, context_length=64, kv_cache_bytes=4 << 20, num_threads=2
    )
    loaded = load_engine(str(TINY), options)
    yield loaded.core.executor
    loaded.close()


def sample_native(executor: Executor, logits: Float32Array, batch: SamplingBatch) -> SampleOutput:
    """Draws natively from given logits: a forward of as many rows, whose logits are then overwritten."""
    rows, step = len(logits), executor.step
    step.token_ids[:rows], step.positions[:rows], step.logit_rows[:rows] = 1, range(rows), range(rows)
    step.query_start[:2], step.context_len[0] = (0, rows), rows
    for table in step.block_tables:
        table[0, :4] = range(4)
    step.num_tokens, step.num_sequences, step.num_logit_rows = rows, 1, rows
    executor.forward()
    executor.logits()[:] = logits
    return executor.sample(batch)


def ragged(rows: list[dict[int, float]], dtype: type[np.generic]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    start = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    tokens = np.array([token for row in rows for token in row], np.int32)
    return start, tokens, np.array([value for row in rows for value in row.values()], dtype)


def random_batch(numbers: np.random.Generator, rows: int, vocab: int) -> SamplingBatch:
    def pick(*values: float) -> Float32Array:
        return numbers.choice(np.array(values, np.float32), rows)

    def lists(longest: int) -> list[dict[int, float]]:
        sizes = numbers.integers(0, longest, rows) * numbers.integers(0, 2, rows)
        return [dict.fromkeys(numbers.choice(vocab, size, replace=False).tolist(), 0) for size in sizes]

    history, bias, forbidden = lists(30), lists(5), lists(20)
    for row in history:
        row.update({token: int(numbers.integers(0, 4)) for token in row})
    for row in bias:
        row.update({token: float(numbers.uniform(-5, 5)) for token in row})
    history_start, history_tokens, counts = ragged(history, np.int32)
    bias_start, bias_tokens, bias_values = ragged(bias, np.float32)
    forbidden_start, forbidden_tokens, _ = ragged(forbidden, np.int32)
    return SamplingBatch(
        temperature=pick(0, 0.3, 1, 1, 2.5),
        top_k=numbers.choice(np.array([0, 0, 1, 3, 40, 1000], np.int32), rows),
        top_p=pick(1, 1, 0.05, 0.7, 0.95),
        min_p=pick(0, 0, 0.02, 0.5),
        repetition_penalty=pick(1, 1.2, 0.8),
        presence_penalty=pick(0, 0.6, -1),
        frequency_penalty=pick(0, 0.2, -0.3),
        seed=numbers.integers(0, 2**64 - 1, rows, np.uint64, endpoint=True),
        position=numbers.integers(0, 2**31 - 1, rows).astype(np.int32),
        num_logprobs=numbers.choice(np.array([-1, 0, 1, 20], np.int32), rows),
        history_start=history_start,
        history_tokens=history_tokens,
        history_output_counts=counts,
        bias_start=bias_start,
        bias_tokens=bias_tokens,
        bias_values=bias_values,
        forbidden_start=forbidden_start,
        forbidden_tokens=forbidden_tokens,
    )


def assert_equal_draws(logits: Float32Array, batch: SamplingBatch, found: SampleOutput) -> int:
    """Asserts that ``found`` is what the reference gives; a draw may fall to the other side of a border only if u is
    within TOLERANCE of it. Returns the number of draws that did."""
    expected = sample_reference(logits, batch)
    differing = 0
    for row in range(len(logits)):
        token = int(found.token_ids[row])
        if token != expected.token_ids[row]:
            u = uniform(int(batch.seed[row]), int(batch.position[row]))
            assert row_distribution(logits, batch, row).accepts(token, u, TOLERANCE), f"row {row} drew {token}"
            differing += 1
        count = min(int(batch.num_logprobs[row]), logits.shape[1])
        assert np.isnan(found.logprobs[row]) == (count < 0 or token == NO_TOKEN)
        if count >= 0 and token == expected.token_ids[row] != NO_TOKEN:
            assert found.logprobs[row] == pytest.approx(expected.logprobs[row], abs=2e-6)
            assert found.top_ids[row, :count].tolist() == expected.top_ids[row, :count].tolist()
            assert found.top_logprobs[row, :count] == pytest.approx(expected.top_logprobs[row, :count], abs=2e-6)
    return differing


@pytest.mark.parametrize("seed", range(12))
def test_native_draws_equal_the_reference(executor, seed):
    numbers = np.random.default_rng(seed)
    vocab = executor.limits.vocab_size
    logits = (numbers.standard_normal((ROWS, vocab)) * numbers.choice([0.1, 2, 10], (ROWS, 1))).astype(np.float32)
    batch = random_batch(numbers, ROWS, vocab)
    assert assert_equal_draws(logits, batch, sample_native(executor, logits, batch)) <= 1


def test_native_breaks_ties_as_the_reference(executor):
    """Rows of three different values: greedy, top-k and top-p borders all fall on ties."""
    numbers = np.random.default_rng(99)
    vocab = executor.limits.vocab_size
    logits = numbers.choice(np.float32([-1, 0, 2]), (ROWS, vocab))
    batch = random_batch(numbers, ROWS, vocab)
    assert assert_equal_draws(logits, batch, sample_native(executor, logits, batch)) <= 1


def test_native_meets_non_finite_logits_as_the_reference(executor):
    numbers = np.random.default_rng(7)
    vocab = executor.limits.vocab_size
    logits = numbers.standard_normal((8, vocab)).astype(np.float32)
    logits[0], logits[1], logits[2, ::2], logits[3, ::3] = np.nan, -np.inf, np.nan, -np.inf
    logits[4, 5] = np.inf
    batch = random_batch(numbers, 8, vocab)
    for name in ("temperature", "repetition_penalty"):
        getattr(batch, name)[:] = 1
    batch.num_logprobs[:] = -1
    found = sample_native(executor, logits, batch)
    assert_equal_draws(logits, batch, found)
    assert found.token_ids[:2].tolist() == [NO_TOKEN, NO_TOKEN]


def test_native_uniform_equals_the_reference():
    numbers = np.random.default_rng(0)
    for seed in [0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1, *numbers.integers(0, 2**63, 50).tolist()]:
        for position in (0, 1, 2, 2**20, 2**31 - 1):
            assert _native.uniform(seed, position) == uniform(seed, position)


@pytest.mark.parametrize("name", ["history_tokens", "bias_tokens", "forbidden_tokens"])
@pytest.mark.parametrize("bad", [-1, 10**6])
def test_native_refuses_ids_outside_the_vocabulary(executor, name, bad):
    """B74: such an id must never become a write into a neighbour's logits."""
    numbers = np.random.default_rng(3)
    vocab = executor.limits.vocab_size
    batch = random_batch(numbers, ROWS, vocab)
    getattr(batch, name)[-1] = bad
    with pytest.raises(ValueError, match=f"{name} has id {bad}"):
        sample_native(executor, np.zeros((ROWS, vocab), np.float32), batch)


def test_every_array_of_the_batch_is_read(executor):
    """Halving any array must be noticed: none is ignored."""
    numbers = np.random.default_rng(4)
    vocab = executor.limits.vocab_size
    for field in fields(SamplingBatch):
        if field.name == "valid_vocabulary":
            continue  # a number
        batch = random_batch(numbers, ROWS, vocab)
        setattr(batch, field.name, getattr(batch, field.name)[: len(getattr(batch, field.name)) // 2])
        with pytest.raises(ValueError, match=rf"{field.name} has \d+ entries"):
            sample_native(executor, np.zeros((ROWS, vocab), np.float32), batch)
