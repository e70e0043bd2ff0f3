"""The same request gives the same answer (design D6): a harness for any executor.

``make_core`` builds a fresh engine with the step budget that it is given; everything else about the model is its own
business. The answers of each prompt alone are compared, bit for bit, with those in a batch, late in a batch, beside
aborted requests, and with other chunk sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from neoserve.engine.core import EngineCore
from neoserve.types.request import EngineStats, FinishReason, GenerateRequest, TokenDelta, TokenLogprob
from neoserve.types.sampling import SamplingParams

MakeCore = Callable[[int], EngineCore]

DEFAULT_CHUNKS = (512, 7, 16)


@dataclass(frozen=True)
class Answer:
    """All that a request got. Log probabilities are compared exactly: they are floats of equal bits or not equal."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None
    finish_reason: FinishReason | None


def run(core: EngineCore, requests: Sequence[GenerateRequest], *, every: int = 0) -> dict[str, Answer]:
    """Runs requests to their end: all at once, or one more after every ``every`` steps."""
    waiting = list(requests)
    deltas: list[TokenDelta] = []
    steps = 0
    while waiting or core.has_work:
        while waiting and (every == 0 or steps % every == 0 or not core.has_work):
            core.add(waiting.pop(0))
            if every:
                break
        deltas += core.step()
        steps += 1
    core.scheduler.check_integrity()
    return {
        request.request_id: _answer([d for d in deltas if d.request_id == request.request_id]) for request in requests
    }


def make_requests(prompts: Sequence[Sequence[int]], eos_token_ids: tuple[int, ...] = ()) -> list[GenerateRequest]:
    """Two requests per prompt: a greedy one and one that draws, with penalties; log probabilities on."""
    greedy = SamplingParams(temperature=0.0, max_tokens=12, logprobs=3, seed=0)
    drawn = SamplingParams(
        temperature=1.3, top_p=0.95, max_tokens=9, logprobs=2, seed=0, presence_penalty=0.5, repetition_penalty=1.1
    )
    return [
        GenerateRequest(
            request_id=f"{kind}-{number}",
            prompt_token_ids=tuple(prompt),
            sampling=replace(params, seed=1000 + number),
            eos_token_ids=eos_token_ids,
            prompt_logprobs=1 if number % 3 == 0 else None,
        )
        for number, prompt in enumerate(prompts)
        for kind, params in (("greedy", greedy), ("drawn", drawn))
    ]


def assert_same_answer(
    make_core: MakeCore,
    prompts: Sequence[Sequence[int]],
    *,
    chunks: Sequence[int] = DEFAULT_CHUNKS,
    eos_token_ids: tuple[int, ...] = (),
) -> dict[str, Answer]:
    """Asserts that no way of running the prompts changes an answer; returns the answers.

    ``chunks[0]`` is the step budget of the runs that the others are compared with.
    """
    requests = make_requests(prompts, eos_token_ids)
    expected = {}
    core = make_core(chunks[0])
    for request in requests:
        core.flush_cache()
        expected |= run(core, [request])
    core.close()
    for chunk in chunks:
        for label, ordered, every in (
            ("together", requests, 0),
            ("in reverse", requests[::-1], 0),
            ("one by one", requests, 2),
        ):
            core = make_core(chunk)
            _compare(expected, run(core, ordered, every=every), f"{label}, chunk {chunk}")
            core.close()
        core = make_core(chunk)
        _compare(expected, _run_beside_aborts(core, requests), f"beside aborted requests, chunk {chunk}")
        core.close()
    return expected


def assert_same_answer_cached(
    make_core: MakeCore,
    prompts: Sequence[Sequence[int]],
    *,
    chunk: int,
    page_size: int,
    seed: int = 0,
    rounds: int = 3,
) -> EngineStats:
    """Asserts that what the prefix cache holds changes no answer; returns the statistics of the run that shared.

    Every prompt comes with relatives: cut around page borders, and continued. Each is answered by a cold engine, and
    then in random order, ``rounds`` times, by one engine that keeps what it can: alone, and several at once.
    """
    random = np.random.default_rng(seed)
    requests = make_requests(_relatives(prompts, page_size))
    expected = {}
    core = make_core(chunk)
    for request in requests:
        core.flush_cache()
        expected |= run(core, [request])
    assert core.stats().cached_tokens == 0, "the cold answers were not cold"
    core.close()
    core = make_core(chunk)
    for number in range(rounds):
        # Each time another object: the sampling lists of a slot belong to one.
        ordered = [replace(requests[index]) for index in random.permutation(len(requests))]
        if number == 0:
            for request in ordered:
                _compare({request.request_id: expected[request.request_id]}, run(core, [request]), "warm, alone")
        else:
            _compare(expected, run(core, ordered, every=number - 1), f"warm, one more every {number - 1} steps")
    stats = core.stats()
    core.close()
    return stats


def _relatives(prompts: Sequence[Sequence[int]], page_size: int) -> list[list[int]]:
    found: dict[tuple[int, ...], None] = {}
    for number, prompt in enumerate(prompts):
        border = len(prompt) // page_size * page_size
        cuts = (len(prompt), border - 1, border, border + 1, len(prompt) // 2)
        for cut in cuts:
            found[tuple(prompt[:cut])] = None
        found[(*prompt, *prompts[number - 1][: page_size + 3])] = None
    return [list(prompt) for prompt in found if prompt]


def _run_beside_aborts(core: EngineCore, requests: Sequence[GenerateRequest]) -> dict[str, Answer]:
    """The same requests while as many others run and are aborted half-way."""
    doomed = [replace(request, request_id=f"doomed-{request.request_id}") for request in requests]
    deltas: list[TokenDelta] = []
    for pair in zip(doomed, requests, strict=True):
        for request in pair:
            core.add(request)
        deltas += core.step()
    for request in doomed:
        core.abort(request.request_id)
        deltas += core.step()
    while core.has_work:
        deltas += core.step()
    return {
        request.request_id: _answer([d for d in deltas if d.request_id == request.request_id]) for request in requests
    }


def _answer(deltas: Sequence[TokenDelta]) -> Answer:
    reasons = [delta.finish_reason for delta in deltas if delta.finish_reason is not None]
    assert len(reasons) == 1, f"{len(reasons)} deltas with a finish reason"
    assert deltas[-1].finish_reason is not None, "deltas after the last one"
    return Answer(
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(logprob for delta in deltas for logprob in delta.logprobs),
        prompt_logprobs=deltas[0].prompt_logprobs,
        finish_reason=reasons[0],
    )


def _compare(expected: dict[str, Answer], found: dict[str, Answer], how: str) -> None:
    assert expected.keys() == found.keys()
    for name, answer in expected.items():
        assert found[name].token_ids == answer.token_ids, f"{name} {how}: other tokens"
        assert found[name] == answer, f"{name} {how}: equal tokens, but other log probabilities or finish reason"
