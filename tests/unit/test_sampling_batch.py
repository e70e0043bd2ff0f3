"""How the sampling inputs of a step are built from the requests that draw in it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neoserve.engine.fake import fake_limits
from neoserve.sampling.batch import SamplingBatchBuilder
from neoserve.sampling.ragged import RaggedRows
from neoserve.sampling.request_lists import TokenHistory
from neoserve.types.request import GenerateRequest
from neoserve.types.sampling import SamplingParams
from neoserve.types.step import SamplingBatch


@dataclass
class Row:
    slot: int
    request: GenerateRequest
    tokens: list[int]
    prompt_length: int


def row(slot: int, prompt: list[int], output: list[int] | None = None, **sampling: object) -> Row:
    eos = sampling.pop("eos", (0,))
    sampling.setdefault("seed", 1)
    request = GenerateRequest(
        request_id=f"r{slot}", prompt_token_ids=tuple(prompt), sampling=SamplingParams(**sampling), eos_token_ids=eos
    )
    return Row(slot, request, [*prompt, *(output or [])], len(prompt))


def segment(batch: SamplingBatch, name: str, index: int, values: str | None = None) -> list[object]:
    start = getattr(batch, f"{name}_start")
    part = slice(start[index], start[index + 1])
    tokens = getattr(batch, f"{name}_tokens")[part].tolist()
    return tokens if values is None else list(zip(tokens, getattr(batch, values)[part].tolist(), strict=True))


def test_every_number_reaches_its_row():
    builder = SamplingBatchBuilder(fake_limits())
    first = row(5, [1, 2], temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, seed=-1, logprobs=4)
    second = row(0, [1, 2, 3], [4], repetition_penalty=1.5, presence_penalty=-1.0, frequency_penalty=0.75, top_k=-1)
    batch = builder.build([first, None, second])
    assert batch.temperature.tolist() == [0.5, 0.0, 1.0]
    assert batch.top_k.tolist() == [7, 0, 0]
    assert batch.top_p.tolist() == [0.25, 1.0, 1.0]
    assert batch.min_p.tolist() == [0.125, 0.0, 0.0]
    assert batch.repetition_penalty.tolist() == [1.0, 1.0, 1.5]
    assert batch.presence_penalty.tolist() == [0.0, 0.0, -1.0]
    assert batch.frequency_penalty.tolist() == [0.0, 0.0, 0.75]
    assert batch.seed.tolist() == [2**64 - 1, 0, 1]
    assert batch.position.tolist() == [2, 0, 4]
    assert batch.num_logprobs.tolist() == [4, -1, -1]
    assert segment(batch, "history", 0) == segment(batch, "history", 1) == []
    assert segment(batch, "history", 2, "history_output_counts") == [(1, 0), (2, 0), (3, 0), (4, 1)]


def test_arrays_are_contiguous_views_of_the_rows_in_use():
    batch = SamplingBatchBuilder(fake_limits()).build([row(1, [1]), row(2, [1])])
    for field in fields(SamplingBatch):
        if field.name == "valid_vocabulary":
            continue  # a number
        array = getattr(batch, field.name)
        assert array.flags.c_contiguous
        expected = 3 if field.name.endswith("_start") else 2
        assert len(array) == (0 if field.name.split("_")[0] in ("history", "bias", "forbidden") else expected) or (
            field.name.endswith("_start") and len(array) == 3
        )


def test_a_slot_that_changes_its_request_changes_its_numbers():
    builder = SamplingBatchBuilder(fake_limits())
    builder.build([row(3, [1], temperature=0.25, logit_bias={5: 1.0}, presence_penalty=1.0)])
    batch = builder.build([row(3, [2], temperature=0.75)])
    assert batch.temperature.tolist() == [0.75]
    assert segment(batch, "bias", 0) == segment(batch, "history", 0) == []


def test_the_same_request_again_in_the_same_slot_starts_without_history():
    """A request object that a caller sends twice is two sequences: the second has not seen the first one's output."""
    builder = SamplingBatchBuilder(fake_limits())
    first = row(0, [1, 2], [5, 6], frequency_penalty=1.0)
    builder.build([first])
    again = Row(0, first.request, [1, 2], 2)
    assert segment(builder.build([again]), "history", 0, "history_output_counts") == [(1, 0), (2, 0)]


def test_bias_is_listed_by_id():
    batch = SamplingBatchBuilder(fake_limits()).build([row(0, [1], logit_bias={9: -100.0, 2: 0.5}), row(1, [1])])
    assert segment(batch, "bias", 0, "bias_values") == [(2, 0.5), (9, -100.0)]
    assert segment(batch, "bias", 1) == []


@pytest.mark.parametrize(
    ("generated", "ignore_eos", "expected"),
    [(0, False, [0, 8, 9]), (1, False, [0, 8, 9]), (2, False, []), (0, True, [8])],
)
def test_stop_ids_are_forbidden_before_min_tokens(generated, ignore_eos, expected):
    builder = SamplingBatchBuilder(fake_limits())
    subject = row(0, [1, 1], [3] * generated, min_tokens=2, stop_token_ids=(8,), eos=(0, 9), ignore_eos=ignore_eos)
    assert segment(builder.build([subject]), "forbidden", 0) == expected


def test_ids_beyond_the_tokenizer_are_always_forbidden():
    builder = SamplingBatchBuilder(fake_limits(vocab_size=12))
    builder.restrict_vocabulary(10)
    batch = builder.build([row(0, [1]), row(1, [1], min_tokens=1)])
    assert segment(batch, "forbidden", 0) == [10, 11]
    assert segment(batch, "forbidden", 1) == [0, 10, 11]
    assert batch.valid_vocabulary == builder.valid_vocabulary == 10
    builder.restrict_vocabulary(13)
    assert builder.valid_vocabulary == 12
    assert segment(builder.build([row(2, [1])]), "forbidden", 0) == []
    with pytest.raises(ValueError, match="vocabulary size is 0"):
        builder.restrict_vocabulary(0)


def test_a_request_without_a_seed_is_refused():
    with pytest.raises(ValueError, match="seed is None"):
        SamplingBatchBuilder(fake_limits()).build([row(0, [1], seed=None)])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, 9), max_size=30), st.lists(st.lists(st.integers(0, 9), max_size=200), max_size=6))
def test_history_is_kept_incrementally(prompt, chunks):
    history = TokenHistory(len(prompt))
    tokens = list(prompt)
    for chunk in chunks:
        tokens += chunk
        ids, counts = history.after(tokens)
        generated = Counter(tokens[len(prompt) :])
        assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {token: generated[token] for token in tokens}
        assert len(ids) == len(set(tokens))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.lists(st.integers(0, 1000), max_size=400), max_size=8), st.booleans())
def test_ragged_rows_grow_and_are_reused(rows, with_values):
    ragged = RaggedRows(8, np.float32 if with_values else None)
    for _ in range(2):
        ragged.clear()
        for entries in rows:
            if entries:
                ragged.append_row(
                    np.array(entries, np.int32), np.array(entries, np.float32) / 4 if with_values else None
                )
            else:
                ragged.end_row()
        start, tokens, values = ragged.views(len(rows))
        for index, entries in enumerate(rows):
            assert tokens[start[index] : start[index + 1]].tolist() == entries
            if with_values:
                assert values[start[index] : start[index + 1]].tolist() == [entry / 4 for entry in entries]


def test_ragged_rows_refuse_a_wrong_count():
    ragged = RaggedRows(2, None)
    ragged.end_row()
    with pytest.raises(ValueError, match="2 rows asked for, 1 were added"):
        ragged.views(2)
