"""The same request gives the same answer (design D6): a harness for any executor.

``make_core`` builds a fresh engine with the step budget that it is given; everything else about the model is its own
business. The answers of each prompt alone are compared, bit for bit, with those in a batch, late in a batch, beside
aborted requests, and with other chunk sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from neoserve.engine.core import EngineCore
from neoserve.types.request import FinishReason, GenerateRequest, TokenDelta, TokenLogprob
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
