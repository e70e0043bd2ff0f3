"""The invariance harness on the fake executor, and proof that the harness notices what it is for."""

from __future__ import annotations

import numpy as np
import pytest

from neoserve.engine.core import EngineCore
from neoserve.engine.fake import FakeExecutor, fake_limits
from neoserve.types.options import EngineOptions
from neoserve.types.request import GenerateRequest
from neoserve.types.sampling import SamplingParams

from ..serve.invariance import Answer, assert_same_answer, assert_same_answer_cached, run

PROMPTS = [[1], [2, 3, 4], list(range(5, 38)), [9] * 70, list(range(100, 20, -1))]


def make_core(chunk: int, **changes: int) -> EngineCore:
    limits = fake_limits(max_tokens=512, max_context=128, max_logit_rows=64, num_pages=40, window=24, **changes)
    return EngineCore(FakeExecutor(limits=limits), EngineOptions(max_tokens_per_step=chunk), strict=True)


def test_no_way_of_running_changes_an_answer():
    answers = assert_same_answer(make_core, PROMPTS)
    assert len({answer.token_ids for answer in answers.values()}) == len(answers)
    assert answers["greedy-2"].prompt_logprobs is None
    assert len(answers["greedy-3"].prompt_logprobs or ()) == 70


@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_the_page_size_does_not_change_an_answer(page_size):
    def answers(size: int) -> dict[str, Answer]:
        return assert_same_answer(lambda chunk: make_core(chunk, page_size=size), PROMPTS[:3], chunks=(512, 5))

    assert answers(page_size) == answers(16)


@pytest.mark.parametrize("chunk", [512, 21])
@pytest.mark.parametrize("pages", [128, 12])
def test_what_is_cached_does_not_change_an_answer(chunk, pages):
    """Ample memory, and a pool several times too small: then what is found changes from request to request."""

    def make(step_tokens: int) -> EngineCore:
        limits = fake_limits(max_tokens=512, max_context=160, max_logit_rows=64, num_pages=pages, window=24)
        return EngineCore(FakeExecutor(limits=limits), EngineOptions(max_tokens_per_step=step_tokens), strict=True)

    stats = assert_same_answer_cached(make, PROMPTS, chunk=chunk, page_size=16)
    assert stats.cached_tokens > 500
    assert (stats.evicted_pages > 100) == (pages == 12)


class _ForgetsItsPages(FakeExecutor):
    """Its logits depend on how many tokens of the sequence this step computes, as if cached KV had other bits."""

    def forward(self) -> None:
        super().forward()
        step = self.step
        starts = step.query_start[1 : step.num_sequences + 1] - step.query_start[: step.num_sequences]
        cached = bool((step.context_len[: step.num_sequences] > starts + 1).any())
        self._logits[: step.num_logit_rows] *= np.float32(1 + 2.0**-20 * (cached and step.num_tokens > 4))


def test_the_harness_notices_logits_that_depend_on_the_cache():
    def make_faulty(chunk: int) -> EngineCore:
        executor = _ForgetsItsPages(limits=fake_limits(max_tokens=512, max_context=160, num_pages=80))
        return EngineCore(executor, EngineOptions(max_tokens_per_step=chunk))

    with pytest.raises(AssertionError, match=r"other log probabilities|other tokens"):
        assert_same_answer_cached(make_faulty, PROMPTS, chunk=512, page_size=16)


class _BatchDependent(FakeExecutor):
    """Its logits depend, in the last bit, on the number of tokens in the step: the fault that the harness is for."""

    def forward(self) -> None:
        super().forward()
        self._logits[: self.step.num_logit_rows] *= np.float32(1 + 2.0**-20 * (self.step.num_tokens > 1))


def test_the_harness_notices_logits_that_depend_on_the_batch():
    def make_faulty(chunk: int) -> EngineCore:
        executor = _BatchDependent(limits=fake_limits(max_tokens=512, max_context=128, num_pages=40))
        return EngineCore(executor, EngineOptions(max_tokens_per_step=chunk))

    with pytest.raises(AssertionError, match=r"other log probabilities|other tokens"):
        assert_same_answer(make_faulty, PROMPTS)


def test_answers_under_memory_pressure_equal_solo_runs():
    """B17: a tiny pool, 200 requests, half of them with a common prefix, random lengths, some aborted."""
    numbers = np.random.default_rng(17)
    prefix = tuple(range(1, 41))
    requests = [
        GenerateRequest(
            request_id=f"r{number}",
            prompt_token_ids=(prefix if number % 2 else ())
            + tuple(numbers.integers(1, 128, numbers.integers(1, 40)).tolist()),
            sampling=SamplingParams(temperature=0.0, max_tokens=int(numbers.integers(1, 12)), seed=0),
        )
        for number in range(200)
    ]
    core = EngineCore(FakeExecutor(limits=fake_limits(num_pages=14, max_context=128)), strict=True)
    solo: dict[str, Answer] = {}
    for request in requests:
        solo |= run(core, [request])
    assert run(core, requests, every=1) == solo
    assert core.stats().used_pages == 0


@pytest.mark.parametrize("seed", [0, 42, -1, 2**63, 2**64 - 1])
def test_a_seed_decides_the_tokens(seed):
    """B40: alone, again, and with seven others; another seed gives another answer."""

    def request(name: str, number: int) -> GenerateRequest:
        return GenerateRequest(
            request_id=name, prompt_token_ids=(1, 2, 3), sampling=SamplingParams(seed=number, max_tokens=20)
        )

    core = make_core(64)
    alone = run(core, [request("a", seed)])["a"]
    assert run(core, [request("a", seed)])["a"] == alone
    others = [request(f"other-{number}", number + 1000) for number in range(7)]
    crowd = run(core, [*others[:4], request("a", seed), *others[4:]])
    assert crowd["a"] == alone
    assert len({answer.token_ids for answer in crowd.values()}) == 8
