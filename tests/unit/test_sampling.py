"""The reference sampler against docs/ops.md ("Sampling"): known answers, statistics with fixed seeds, properties."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neoserve.sampling.logprobs import best_ids, log_normalizer, score_tokens
from neoserve.sampling.philox import philox4x32, uniform
from neoserve.sampling.reference import RowDistribution, modified_logits, row_distribution, sample_reference
from neoserve.types.step import SamplingBatch

# Upper 0.1 % points of the chi-square distribution.
CHI_SQUARE = {4: 18.467, 5: 20.515, 9: 27.877, 63: 103.442}

Lists = dict[int, float]


def make_batch(
    rows: int = 1,
    *,
    seed: int | list[int] = 1,
    position: int | list[int] = 0,
    history: dict[int, int] | None = None,
    bias: Lists | None = None,
    forbidden: tuple[int, ...] = (),
    **columns: float,
) -> SamplingBatch:
    """A batch whose rows are alike but for seed and position. Neutral unless told otherwise (temperature 1)."""
    values = {
        "temperature": 1.0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "top_k": 0,
        "num_logprobs": -1,
    } | columns
    whole = ("top_k", "num_logprobs")
    arrays = {name: np.full(rows, value, np.int32 if name in whole else np.float32) for name, value in values.items()}
    history, bias = history or {}, bias or {}

    def flat(entries: object, dtype: type[np.generic]) -> np.ndarray:
        return np.array(list(entries) * rows, dtype)

    def starts(count: int) -> np.ndarray:
        return np.arange(rows + 1, dtype=np.int32) * count

    return SamplingBatch(
        **arrays,
        seed=np.broadcast_to(np.asarray(seed, np.uint64), rows),
        position=np.broadcast_to(np.asarray(position, np.int32), rows),
        history_start=starts(len(history)),
        history_tokens=flat(history, np.int32),
        history_output_counts=flat(history.values(), np.int32),
        bias_start=starts(len(bias)),
        bias_tokens=flat(bias, np.int32),
        bias_values=flat(bias.values(), np.float32),
        forbidden_start=starts(len(forbidden)),
        forbidden_tokens=flat(forbidden, np.int32),
    )


def draws(logits: list[float], count: int, **batch: object) -> list[int]:
    """Tokens drawn at the positions 0..count-1."""
    rows = np.tile(np.array(logits, np.float32), (count, 1))
    positions = list(range(count))
    return sample_reference(rows, make_batch(count, position=positions, **batch)).token_ids.tolist()


def chi_square(counts: Counter[int], probabilities: dict[int, float]) -> float:
    total = counts.total() if hasattr(counts, "total") else sum(counts.values())
    assert set(counts) <= set(probabilities)
    return sum((counts[token] - total * p) ** 2 / (total * p) for token, p in probabilities.items())


# Known-answer vectors that the authors of Philox publish with their library Random123 (philox4x32, 10 rounds).
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, expected):
    assert philox4x32(counter, key) == expected


def test_uniform_takes_the_top_24_bits_of_the_first_word():
    assert uniform(0, 0) == (0x6627E8D5 >> 8) / 2**24
    assert all(float(np.float32(uniform(5, position))) == uniform(5, position) for position in range(100))


def test_uniform_uses_both_words_of_the_seed_and_the_position():
    values = {uniform(seed, position) for seed in (1, 2, 2**32, 2**32 + 1, 2**64 - 1) for position in range(20)}
    assert len(values) == 100


def test_uniform_is_uniform():
    """64 equal cells over 4000 positions of one seed, and over 4000 seeds of one position."""
    for numbers in ([uniform(42, p) for p in range(4000)], [uniform(s, 7) for s in range(4000)]):
        cells = Counter(int(64 * number) for number in numbers)
        assert chi_square(cells, dict.fromkeys(range(64), 1 / 64)) < CHI_SQUARE[63]


LOGITS = [1.0, 0.0, -1.0, 2.0, 0.5, -0.5]


def softmax(logits: list[float], temperature: float = 1.0) -> dict[int, float]:
    weights = [math.exp(value / temperature) for value in logits]
    return {token: weight / sum(weights) for token, weight in enumerate(weights)}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature):
    counts = Counter(draws(LOGITS, 4000, temperature=temperature))
    assert chi_square(counts, softmax(LOGITS, temperature)) < CHI_SQUARE[5]


def test_frequencies_over_seeds_follow_the_softmax():
    rows = np.tile(np.array(LOGITS, np.float32), (4000, 1))
    tokens = sample_reference(rows, make_batch(4000, seed=list(range(4000)), position=3)).token_ids
    assert chi_square(Counter(tokens.tolist()), softmax(LOGITS)) < CHI_SQUARE[5]


def test_frequencies_within_top_k_follow_the_renormalised_softmax():
    p = softmax(LOGITS)
    kept = {token: p[token] for token in (3, 0, 4, 1, 5)}
    expected = {token: value / sum(kept.values()) for token, value in kept.items()}
    assert chi_square(Counter(draws(LOGITS, 4000, top_k=5)), expected) < CHI_SQUARE[4]


def test_temperature_zero_takes_the_lowest_id_of_the_maxima():
    assert draws([1.0, 3.0, 3.0, 2.0], 50, temperature=0.0) == [1] * 50


@pytest.mark.parametrize("temperature", [1e-38, 1e-6])
def test_tiny_temperatures_do_not_overflow(temperature):
    assert set(draws([1e30, 3e30, -3e38, 2.9e30], 50, temperature=temperature)) == {1}


def test_top_k_keeps_the_lowest_ids_of_a_tie_at_the_border():
    batch = make_batch(top_k=3)
    assert row_distribution(np.float32([[1, 5, 1, 1, 7, 1]]), batch, 0).ids.tolist() == [4, 1, 0]
    assert set(draws([1.0] * 6, 300, top_k=2)) == {0, 1}


def test_top_k_larger_than_the_vocabulary_is_off():
    assert len(row_distribution(np.float32([LOGITS]), make_batch(top_k=100), 0).ids) == 6


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.01, [2]), (0.49, [2]), (0.51, [2, 0]), (0.74, [2, 0]), (0.76, [2, 0, 1]), (0.999, [2, 0, 1, 3])],
)
def test_top_p_keeps_the_smallest_prefix_that_reaches_it(top_p, kept):
    logits = np.log(np.array([[0.25, 0.125, 0.5, 0.125]])).astype(np.float32)
    assert row_distribution(logits, make_batch(top_p=top_p), 0).ids.tolist() == kept


@pytest.mark.parametrize(("min_p", "kept"), [(0.0, 4), (0.2, 4), (0.3, 2), (0.6, 1), (1.0, 1)])
def test_min_p_is_relative_to_the_best_token(min_p, kept):
    logits = np.log(np.array([[0.25, 0.125, 0.5, 0.125]])).astype(np.float32)
    assert len(row_distribution(logits, make_batch(min_p=min_p), 0).ids) == kept


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits():
    batch = make_batch(history={0: 0, 2: 3}, repetition_penalty=2.0)
    assert modified_logits(np.float32([[4, 4, -3, -3]]), batch, 0).tolist() == [2, 4, -6, -3]


def test_frequency_and_presence_penalties_count_generated_tokens_only():
    batch = make_batch(history={0: 0, 1: 1, 2: 3}, frequency_penalty=0.5, presence_penalty=0.25)
    assert modified_logits(np.float32([[1, 1, 1, 1]]), batch, 0).tolist() == [1.0, 0.25, -0.75, 1.0]


def test_bias_comes_before_the_penalties():
    batch = make_batch(bias={0: 3.0}, history={0: 0}, repetition_penalty=2.0)
    assert modified_logits(np.float32([[-1, 0]]), batch, 0).tolist() == [1.0, 0.0]


def test_forbidden_ids_are_never_drawn_even_if_biased():
    assert set(draws(LOGITS, 500, forbidden=(3, 0), bias={3: 100.0})) <= {1, 2, 4, 5}


@pytest.mark.parametrize("logits", [[np.nan] * 4, [-np.inf] * 4])
def test_a_row_without_a_finite_logit_draws_minus_one(logits):
    assert draws(logits, 2) == [-1, -1]
    assert draws(logits, 1, temperature=0.0, num_logprobs=2) == [-1]
    assert draws([1.0, 2.0], 1, forbidden=(0, 1)) == [-1]


def test_nan_logits_are_never_drawn():
    assert set(draws([np.nan, 1.0, np.nan, 1.0], 200)) == {1, 3}


def test_logprobs_are_of_the_unmodified_softmax():
    batch = make_batch(
        num_logprobs=2, temperature=0.0, bias={2: 100.0}, history={3: 5}, presence_penalty=2.0, forbidden=(3,)
    )
    output = sample_reference(np.float32([LOGITS]), batch)
    p = softmax(LOGITS)
    assert output.token_ids.tolist() == [2]
    assert output.logprobs[0] == pytest.approx(math.log(p[2]), abs=1e-6)
    assert output.top_ids.tolist() == [[3, 0]]
    assert output.top_logprobs[0].tolist() == pytest.approx([math.log(p[3]), math.log(p[0])], abs=1e-6)


def test_logprobs_off_is_nan_and_zero_alternatives_is_a_number():
    both = sample_reference(np.float32([LOGITS] * 2), make_batch(2))
    assert np.isnan(both.logprobs).all()
    assert both.top_ids.shape == (2, 0)
    none = sample_reference(np.float32([LOGITS]), make_batch(num_logprobs=0))
    assert np.isfinite(none.logprobs).all()
    assert none.top_ids.shape == (1, 0)


def test_more_alternatives_than_tokens_gives_all_tokens():
    assert sample_reference(np.float32([[1, 2]]), make_batch(num_logprobs=20)).top_ids.tolist() == [[1, 0]]


def test_best_ids_breaks_ties_by_the_lower_id():
    assert best_ids(np.float32([2, 5, 2, 2, 9]), 3).tolist() == [4, 1, 0]
    assert best_ids(np.float32([1, 1]), 0).tolist() == []


def test_score_tokens_against_the_definition():
    rows = np.float32([LOGITS, LOGITS[::-1]])
    scores = score_tokens(rows, [2, 2], 1)
    for score, row in zip(scores, rows, strict=True):
        assert score.logprob == pytest.approx(float(row[2]) - math.log(sum(math.exp(x) for x in row)), abs=1e-6)
        assert score.top == ((int(row.argmax()), pytest.approx(float(row.max()) - log_normalizer(row), abs=1e-6)),)


logit_rows = st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=30)
parameters = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.1, 0.7, 1.0, 5.0]),
        "top_k": st.integers(0, 8),
        "top_p": st.sampled_from([0.05, 0.5, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.1, 0.9]),
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.3]),
        "presence_penalty": st.sampled_from([-1.0, 0.0, 1.5]),
        "frequency_penalty": st.sampled_from([0.0, 0.3]),
    }
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(logit_rows, parameters, st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1))
def test_every_draw_is_a_token_that_the_filters_keep(logits, columns, seed, position):
    rows = np.array([logits], np.float32)
    batch = make_batch(seed=seed, position=position, history={0: 1}, **columns)
    kept = row_distribution(rows, batch, 0)
    token = int(sample_reference(rows, batch).token_ids[0])
    assert token in kept.ids
    assert 1 <= len(kept.ids) <= (columns["top_k"] or len(logits))
    assert (np.diff(kept.probabilities) <= 0).all()
    assert kept.accepts(token, uniform(seed, position), 1e-12)
    modified = modified_logits(rows, batch, 0)
    assert kept.ids[0] == int(np.argmax(modified))
    if columns["temperature"] == 0:
        assert token == int(np.argmax(modified))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(logit_rows, st.integers(0, 2**64 - 1), st.integers(0, 1000), st.integers(1, 6))
def test_a_row_draws_the_same_alone_and_in_any_company(logits, seed, position, others):
    """B40: an equal seed and position give an equal token, whatever else is in the batch."""
    row = np.array([logits], np.float32)
    alone = sample_reference(row, make_batch(seed=seed, position=position, num_logprobs=3))
    noise = np.random.default_rng(0).standard_normal((others, len(logits))).astype(np.float32)
    batch = make_batch(
        others + 1,
        seed=[*range(others), seed],
        position=[*range(others), position],
        num_logprobs=3,
    )
    together = sample_reference(np.concatenate([noise, row]), batch)
    assert together.token_ids[-1] == alone.token_ids[0]
    assert together.logprobs[-1] == alone.logprobs[0]
    assert together.top_ids[-1].tolist() == alone.top_ids[0].tolist()
    assert together.top_logprobs[-1].tolist() == alone.top_logprobs[0].tolist()


def test_a_draw_takes_the_first_token_whose_running_sum_exceeds_u():
    halves = RowDistribution(np.array([7, 3, 5]), np.array([0.5, 0.25, 0.25]))
    assert [halves.draw(u) for u in (0.0, 0.49, 0.5, 0.74, 0.75, 1 - 2.0**-24)] == [7, 7, 3, 3, 5, 5]


def test_accepts_knows_the_borders():
    kept = row_distribution(np.log(np.array([[0.25, 0.75]])).astype(np.float32), make_batch(), 0)
    assert kept.ids.tolist() == [1, 0]
    assert kept.accepts(1, 0.7501, 1e-3)
    assert not kept.accepts(1, 0.76, 1e-3)
    assert kept.accepts(0, 0.7499, 1e-3)
    assert not kept.accepts(0, 0.74, 1e-3)
    assert not kept.accepts(7, 0.5, 1.0)
