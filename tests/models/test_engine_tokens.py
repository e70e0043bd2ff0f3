"""Requests through the whole engine on tiny models: same tokens and log probabilities however they are served.

Here the scheduler makes the batches, the native sampler draws, and each request has its own parameters (design D6).
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from neoserve.engine.core import EngineCore
from neoserve.eval.perplexity import token_nll
from neoserve.formats.checkpoint import open_checkpoint
from neoserve.models.registry import build_program
from neoserve.program.executor import Checkpoint, build_executor, prepare
from neoserve.types.options import EngineOptions
from neoserve.types.request import GenerateRequest, TokenLogprob
from neoserve.types.sampling import SamplingParams

from ..serve.invariance import assert_same_answer_cached
from .tiny import FORMATS, quantised, tiny_folder

Answer = tuple[list[int], list[TokenLogprob]]

SUBJECTS = (
    ("llama", "float32"),
    ("mistral", "bfloat16"),
    ("qwen2", "int4_g32_f16_minimum"),
    ("gemma3", "int8_channel"),
)


def _requests() -> list[GenerateRequest]:
    """Greedy, sampled with every filter, penalised, biased; prompts of 1 to 280 tokens; equal prompts too."""
    random = np.random.default_rng(40)
    sampling = [
        SamplingParams(temperature=0.0, max_tokens=20, logprobs=3, ignore_eos=True, seed=1),
        SamplingParams(temperature=0.9, top_k=20, max_tokens=30, logprobs=0, ignore_eos=True, seed=2),
        SamplingParams(temperature=1.2, top_p=0.8, min_p=0.02, max_tokens=25, logprobs=5, ignore_eos=True, seed=3),
        SamplingParams(temperature=0.7, repetition_penalty=1.2, presence_penalty=0.5, max_tokens=20, logprobs=1,
                       ignore_eos=True, seed=2**63 + 5),
        SamplingParams(temperature=1.0, frequency_penalty=-0.5, logit_bias={3: 5.0, 9: -100.0}, max_tokens=15,
                       logprobs=2, ignore_eos=True, seed=0),
    ]  # fmt: skip
    lengths = (1, 15, 16, 17, 60, 130, 255, 280)
    return [
        GenerateRequest(
            request_id=f"r{index}",
            prompt_token_ids=tuple(random.integers(0, 128, lengths[index % len(lengths)]).tolist()),
            sampling=sampling[index % len(sampling)],
            arrival_time=float(index),
        )
        for index in range(11)
    ]


def _serve(checkpoint: Checkpoint, requests: list[GenerateRequest], together: bool, **changes: object) -> list[Answer]:
    """Answers in the order of ``requests``, each of them added when the one before has ended, or all at once."""
    values: dict[str, object] = {
        "max_running_requests": 8,
        "max_tokens_per_step": 320,
        "context_length": 320,
        "kv_cache_bytes": 16 << 20,
        "num_threads": 1,
    }
    options = EngineOptions(**{**values, **changes})  # type: ignore[arg-type]
    engine = EngineCore(build_executor(checkpoint, options, build_program), options, strict=True)
    answers: dict[str, Answer] = {request.request_id: ([], []) for request in requests}
    try:
        for batch in [requests] if together else [[request] for request in requests]:
            for request in batch:
                engine.add(request)
            while engine.has_work:
                for delta in engine.step():
                    assert delta.finish_reason in (None, "length"), delta
                    answers[delta.request_id][0].extend(delta.token_ids)
                    answers[delta.request_id][1].extend(delta.logprobs)
    finally:
        engine.executor.close()
    return [answers[request.request_id] for request in requests]


def _checkpoint(name: str, fmt: str) -> tuple[Checkpoint, str]:
    if fmt in FORMATS:
        return quantised(name, FORMATS[fmt]), "auto"
    return open_checkpoint(tiny_folder(name)), fmt


@pytest.mark.parametrize(("name", "fmt"), SUBJECTS)
def test_answers_are_the_same_however_served(name: str, fmt: str) -> None:
    checkpoint, dtype = _checkpoint(name, fmt)
    requests = _requests()
    alone = _serve(checkpoint, requests, together=False, dtype=dtype)
    for request, (tokens, logprobs) in zip(requests, alone, strict=True):
        assert len(tokens) == len(logprobs) == request.sampling.max_tokens
        assert all(math.isfinite(one.logprob) for one in logprobs)
    assert len({tuple(tokens[:5]) for tokens, _ in alone}) > 5, "answers must differ to prove anything"
    ways: tuple[dict[str, object], ...] = (
        {},
        {"max_tokens_per_step": 16},
        {"max_tokens_per_step": 33, "max_running_requests": 3},
        {"page_size": 64, "num_threads": 2},
        {"page_size": 32, "num_threads": 3, "max_tokens_per_step": 100, "max_running_requests": 11},
    )
    for way in ways:
        together = _serve(checkpoint, requests, together=True, dtype=dtype, **way)
        for request, one, other in zip(requests, together, alone, strict=True):
            assert one[0] == other[0], f"tokens of {request.request_id} with {way}"
            assert one[1] == other[1], f"log probabilities of {request.request_id} with {way}"


@pytest.mark.parametrize(
    ("name", "dtype", "page_size"),
    [("llama", "float32", 16), ("llama", "bfloat16", 32), ("gemma3", "float32", 16), ("gemma3", "bfloat16", 32)],
)
def test_what_is_cached_does_not_change_an_answer(name: str, dtype: str, page_size: int) -> None:
    """D6 with the prefix cache: cold, warm, with longer and shorter common prefixes, under eviction; equal bits."""
    checkpoint = open_checkpoint(tiny_folder(name))
    random = np.random.default_rng(43)
    prompts = [random.integers(0, 128, length).tolist() for length in (7, 33, 64, 150, 217)]

    def make_core(step_tokens: int) -> EngineCore:
        options = EngineOptions(
            max_running_requests=6,
            max_tokens_per_step=step_tokens,
            context_length=256,
            page_size=page_size,
            num_threads=1,
            dtype=dtype,  # type: ignore[arg-type]
            # Two contexts of 256 tokens: a third of what the prompts and their relatives would fill.
            kv_cache_bytes=_bytes_of_tokens(checkpoint, 2 * 256, dtype, page_size),
        )
        return EngineCore(build_executor(checkpoint, options, build_program), options, strict=True)

    for step_tokens in (320, 40):
        stats = assert_same_answer_cached(make_core, prompts, chunk=step_tokens, page_size=page_size)
        assert stats.cached_tokens > 2000
        assert stats.evicted_pages > 50


def _bytes_of_tokens(checkpoint: Checkpoint, tokens: int, dtype: str, page_size: int) -> int:
    """KV memory that holds ``tokens`` tokens in every group."""
    options = EngineOptions(dtype=dtype, page_size=page_size, kv_cache_bytes=16 << 20)  # type: ignore[arg-type]
    groups = prepare(checkpoint, options, build_program).limits.groups
    return sum(group.page_bytes for group in groups) * -(-tokens // page_size)


@pytest.mark.parametrize("step_tokens", [320, 24])
def test_prompt_logprobs_equal_the_measure_of_perplexity(step_tokens: int) -> None:
    """Two ways to score a text: through the engine's prompt_logprobs and through the executor's logits."""
    checkpoint = open_checkpoint(tiny_folder("llama"))
    ids = np.random.default_rng(41).integers(0, 128, 150).tolist()
    options = EngineOptions(
        max_running_requests=4, max_tokens_per_step=step_tokens, context_length=320, num_threads=1, dtype="float32"
    )
    executor = build_executor(checkpoint, options, build_program)
    try:
        nll = token_nll(executor, ids)
        engine = EngineCore(executor, options, strict=True)
        sampling = SamplingParams(temperature=0.0, max_tokens=1, seed=1)
        engine.add(GenerateRequest(request_id="r", prompt_token_ids=tuple(ids), sampling=sampling, prompt_logprobs=0))
        scored: list[TokenLogprob | None] = []
        while engine.has_work:
            for delta in engine.step():
                scored.extend(delta.prompt_logprobs or ())
    finally:
        executor.close()
    assert scored[0] is None
    assert [one.token_id for one in scored[1:] if one is not None] == ids[1:]
    logprobs = [one.logprob for one in scored[1:] if one is not None]
    np.testing.assert_allclose(-np.array(logprobs), nll, rtol=1e-5, atol=2e-6)
