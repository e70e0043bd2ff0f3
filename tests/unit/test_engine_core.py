"""EngineCore with the scripted fake model: what comes out, what is refused, what it counts."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from neoserve.cache.allocator import PageAccountingError
from neoserve.engine.core import EngineCore
from neoserve.engine.fake import FakeExecutor, fake_limits, next_token
from neoserve.types.errors import ConfigurationError, ContextLengthError, EngineDeadError, InvalidRequestError
from neoserve.types.options import EngineOptions
from neoserve.types.request import GenerateRequest, TokenDelta
from neoserve.types.sampling import SamplingParams


def make_request(name: str = "a", prompt: tuple[int, ...] = (1, 2, 3), **changes: object) -> GenerateRequest:
    prompt_logprobs = changes.pop("prompt_logprobs", None)
    eos = changes.pop("eos", (0,))
    changes.setdefault("seed", 0)
    return GenerateRequest(
        request_id=name,
        prompt_token_ids=prompt,
        sampling=SamplingParams(**changes),
        eos_token_ids=eos,
        prompt_logprobs=prompt_logprobs,
    )


def run(core: EngineCore) -> list[TokenDelta]:
    deltas = []
    while core.has_work:
        deltas += core.step()
    core.scheduler.check_integrity()
    return deltas


def tokens(deltas: list[TokenDelta], name: str = "a") -> list[int]:
    return [token for delta in deltas if delta.request_id == name for token in delta.token_ids]


def test_the_step_is_plan_run_commit_in_under_forty_lines():
    source = inspect.getsource(EngineCore.step)
    assert len(source.splitlines()) < 40
    assert [source.find(verb) > 0 for verb in (".plan(", "._run(", ".commit(")] == [True] * 3


def test_a_scripted_answer_ends_with_eos():
    core = EngineCore(FakeExecutor([5, 6, 7], eos_token_id=0), strict=True)
    core.add(make_request(max_tokens=10))
    deltas = run(core)
    assert tokens(deltas) == [5, 6, 7, 0]
    assert (deltas[-1].finish_reason, deltas[-1].stop_token_id) == ("stop", 0)


def test_prompts_get_their_own_scripts():
    core = EngineCore(FakeExecutor({(1, 2): [9, 8], (1, 2, 3): [7]}), strict=True)
    core.add(make_request("long", (1, 2, 3)))
    core.add(make_request("short", (1, 2)))
    deltas = run(core)
    assert (tokens(deltas, "long"), tokens(deltas, "short")) == ([7, 0], [9, 8, 0])


def test_a_script_may_repeat_tokens():
    assert [next_token([5, 5, 5, 6], (1,) + (5,) * n, 0) for n in range(4)] == [5, 5, 5, 6]
    assert next_token([5, 5, 5, 6], (1, 5, 5, 5, 6), 0) == 0


def test_logit_bias_changes_the_drawn_token():
    core = EngineCore(FakeExecutor([5, 6]), strict=True)
    core.add(make_request(max_tokens=1, logit_bias={77: 100.0}, temperature=0.0))
    assert tokens(run(core)) == [77]


def test_min_tokens_keeps_eos_away():
    core = EngineCore(FakeExecutor([5], eos_token_id=0), strict=True)
    core.add(make_request(max_tokens=8, min_tokens=3))
    found = tokens(run(core))
    assert found[0] == 5
    assert 0 not in found[:3]


def test_ids_beyond_the_tokenizer_are_never_drawn():
    core = EngineCore(FakeExecutor([120]), strict=True)
    core.restrict_vocabulary(100)
    core.add(make_request(max_tokens=30, temperature=5.0, ignore_eos=True))
    assert max(tokens(run(core))) < 100


def test_logprobs_come_with_every_token():
    core = EngineCore(FakeExecutor(), strict=True)
    core.add(make_request(max_tokens=3, logprobs=2, ignore_eos=True))
    core.add(make_request("zero", max_tokens=1, logprobs=0))
    core.add(make_request("off", max_tokens=1))
    deltas = run(core)
    mine = [delta for delta in deltas if delta.request_id == "a"]
    assert [delta.logprobs[0].token_id for delta in mine] == [delta.token_ids[0] for delta in mine]
    for delta in mine:
        best, second = delta.logprobs[0].top
        assert 0 >= best[1] >= second[1]
        assert delta.logprobs[0].logprob <= best[1]
    assert [delta.logprobs[0].top for delta in deltas if delta.request_id == "zero"] == [()]
    assert [delta.logprobs for delta in deltas if delta.request_id == "off"] == [()]


def test_ids_beyond_the_tokenizer_are_in_no_log_probability():
    """B61: neither alternatives nor part of the sum, for drawn and for prompt tokens."""
    core = EngineCore(FakeExecutor([23, 23, 23], limits=fake_limits(vocab_size=24)), strict=True)
    core.restrict_vocabulary(20)
    core.add(make_request(prompt=(1, 2, 3, 22), max_tokens=2, logprobs=20, prompt_logprobs=20, ignore_eos=True))
    deltas = run(core)
    scores = [delta.logprobs[0] for delta in deltas] + list(deltas[0].prompt_logprobs or ())[1:]
    assert len(scores) == 5
    for score in scores:
        assert score is not None
        assert sorted(token for token, _ in score.top) == list(range(20))
        assert sum(np.exp(value) for _, value in score.top) == pytest.approx(1, abs=1e-5)
        assert score.logprob == dict(score.top).get(score.token_id, -np.inf)


@pytest.mark.parametrize("rows", [1, 4, 32])
def test_prompt_logprobs_equal_the_models_log_softmax(rows):
    """One entry per prompt position, None for the first, whatever chunks the row limit makes."""
    prompt = tuple(range(40, 62))
    executor = FakeExecutor(limits=fake_limits(max_logit_rows=rows))
    core = EngineCore(executor, strict=True)
    core.add(make_request(prompt=prompt, max_tokens=2, prompt_logprobs=2))
    deltas = run(core)
    scores = deltas[0].prompt_logprobs
    assert scores is not None
    assert scores[0] is None
    assert [score.token_id for score in scores[1:] if score] == list(prompt[1:])
    oracle = FakeExecutor(limits=fake_limits())
    for position, score in enumerate(scores[1:], 1):
        logits = _logits_after(oracle, prompt[:position])
        exact = logits - np.log(np.exp(logits).sum())
        assert score is not None
        assert score.logprob == pytest.approx(exact[prompt[position]], abs=1e-5)
        assert [token for token, _ in score.top] == np.argsort(-exact)[:2].tolist()
    assert all(delta.prompt_logprobs is None for delta in deltas[1:])


def _logits_after(executor: FakeExecutor, context: tuple[int, ...]) -> np.ndarray:
    step, size = executor.step, len(context)
    step.token_ids[:size], step.positions[:size] = context, range(size)
    step.query_start[:2], step.context_len[0], step.logit_rows[0] = (0, size), size, size - 1
    step.block_tables[0][0, :4] = range(4)
    step.num_tokens, step.num_sequences, step.num_logit_rows = size, 1, 1
    executor.forward()
    return executor.logits()[0].astype(np.float64)


@pytest.mark.parametrize("bad", [-1, 128, 128 + 10**5, 2**31, 2**70])
@pytest.mark.parametrize("field", ["prompt", "logit_bias", "stop_token_ids"])
def test_ids_outside_the_vocabulary_are_refused_by_name(field, bad):
    """B73, B74: they never reach an index, and requests beside them keep their tokens."""
    core = EngineCore(FakeExecutor([5, 6]), strict=True)
    core.add(make_request("other", temperature=0.0))
    with pytest.raises(InvalidRequestError) as caught:
        core.add(_with_bad_id(field, bad))
    assert caught.value.param == field
    assert str(bad) in str(caught.value)
    assert tokens(run(core), "other") == [5, 6, 0]


def _with_bad_id(field: str, bad: object) -> GenerateRequest:
    if field == "prompt":
        return make_request("bad", prompt=(1, bad, 2))
    return make_request("bad", **{field: {bad: 1.0} if field == "logit_bias" else (bad,)})


@pytest.mark.parametrize("bad", ["7", 7.0, True, None])
def test_ids_that_are_no_integers_are_refused(bad):
    for field in ("prompt", "stop_token_ids"):
        with pytest.raises(InvalidRequestError, match="must be integers") as caught:
            EngineCore(FakeExecutor([5])).add(_with_bad_id(field, bad))
        assert caught.value.param == field


@pytest.mark.parametrize("count", [-1, 21, 10**9, True])
def test_prompt_logprobs_are_bounded(count):
    with pytest.raises(InvalidRequestError, match=r"prompt_logprobs is .* in \[0, 20\]"):
        EngineCore(FakeExecutor([5])).add(make_request(prompt_logprobs=count))


@pytest.mark.parametrize(
    ("changes", "param"),
    [({"prompt": ()}, "prompt"), ({"seed": None}, "seed"), ({"min_tokens": 4, "max_tokens": 3}, "min_tokens")],
)
def test_requests_that_make_no_sense_are_refused_by_name(changes, param):
    """B42: an empty prompt is an error of the request, not of the engine."""
    core = EngineCore(FakeExecutor([5]), strict=True)
    with pytest.raises(InvalidRequestError) as caught:
        core.add(make_request(**changes))
    assert caught.value.param == param
    core.add(make_request())
    assert tokens(run(core)) == [5, 0]


def test_a_huge_max_tokens_is_clamped_and_the_next_request_works():
    """B26: max_tokens 10^9 ends at the context with "length"."""
    core = EngineCore(FakeExecutor(limits=fake_limits(max_context=64)), strict=True)
    core.add(make_request(max_tokens=10**9, ignore_eos=True))
    deltas = run(core)
    assert (len(tokens(deltas)), deltas[-1].finish_reason) == (61, "length")
    core.add(make_request(max_tokens=1))
    assert len(tokens(run(core))) == 1


def test_check_tells_what_add_would_without_adding():
    core = EngineCore(FakeExecutor([5], limits=fake_limits(max_context=32)), strict=True)
    core.check(make_request())
    with pytest.raises(ContextLengthError):
        core.check(make_request(prompt=(1,) * 32))
    assert not core.has_work


def test_abort_then_the_next_turn_is_undisturbed():
    """B25: a turn aborted after some tokens, then the same history again, many times."""
    core = EngineCore(FakeExecutor(), strict=True)
    prompt = tuple(range(1, 30))
    core.add(make_request("undisturbed", prompt, max_tokens=6, temperature=0.0))
    expected = tokens(run(core), "undisturbed")
    for turn in range(20):
        core.add(make_request(f"first-{turn}", prompt, max_tokens=50, temperature=0.0))
        for _ in range(turn % 6):
            core.step()
        assert core.abort(f"first-{turn}") is not None
        core.add(make_request(f"second-{turn}", prompt, max_tokens=6, temperature=0.0))
        assert tokens(run(core), f"second-{turn}") == expected
    assert core.stats().used_pages == 0


def test_stats_count_tokens_and_pages():
    core = EngineCore(FakeExecutor([5, 6]), EngineOptions(max_running_requests=1), strict=True)
    core.add(make_request("a", (1,) * 20, max_tokens=13))
    core.add(make_request("b", (1,) * 5))
    core.step()
    stats = core.stats()
    assert (stats.running, stats.waiting, stats.used_pages, stats.total_pages) == (1, 1, 2, 128)
    assert (stats.steps, stats.prompt_tokens, stats.generated_tokens) == (1, 20, 1)
    run(core)
    stats = core.stats()
    assert (stats.running, stats.waiting, stats.used_pages) == (0, 0, 0)
    assert (stats.prompt_tokens, stats.generated_tokens) == (25, 6)
    assert set(stats.step_seconds) == {"plan", "forward", "sample", "commit"}
    assert all(seconds > 0 for seconds in stats.step_seconds.values())


def test_a_step_without_work_does_nothing():
    executor = FakeExecutor([5])
    core = EngineCore(executor, strict=True)
    assert (core.has_work, core.step(), executor.history) == (False, [], [])


def test_leaked_pages_are_raised_when_strict_and_repaired_otherwise(caplog):
    """B18: the accounting adds up whenever nothing runs; a mismatch never ends the server."""
    for strict in (True, False):
        core = EngineCore(FakeExecutor([5]), strict=strict)
        core.add(make_request())
        core.step()
        core.scheduler.tables.try_reserve(7, 40)  # pages that no request owns
        if strict:
            with pytest.raises(PageAccountingError, match="3 pages of group full are in use while no request runs"):
                run(core)
            continue
        assert tokens(run(core)) == [0]
        assert core.stats().used_pages == 0
        assert "3 pages of group full are in use" in caplog.text
        core.add(make_request(max_tokens=240))
        assert tokens(run(core)) == [5, 0]


def test_a_closed_engine_takes_nothing():
    core = EngineCore(FakeExecutor([5]))
    core.close()
    with pytest.raises(EngineDeadError, match="closed"):
        core.add(make_request())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_running_requests", 0),
        ("max_queued_requests", -1),
        ("max_tokens_per_step", 0),
        ("max_failed_steps", 0),
        ("context_length", 0),
        ("kv_cache_bytes", 1.5),
        ("num_threads", True),
        ("page_size", 24),
        ("dtype", "float16"),
    ],
)
def test_options_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(ConfigurationError, match=f"^{name} is {value!r}"):
        EngineOptions(**{name: value})
