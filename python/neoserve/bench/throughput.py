"""Prefill and decode speed of an engine in this process, measured like llama-bench.

``pp N``: prompts of N random tokens, batch of them at once, until each has its first token. ``tg M``: M tokens per
sequence after the first, from a prompt of one token. Greedy, EOS ignored. Each test is repeated after one warm-up.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from neoserve.engine.core import EngineCore
from neoserve.types.errors import NeoServeError
from neoserve.types.request import GenerateRequest
from neoserve.types.sampling import SamplingParams

Kind = Literal["prefill", "decode"]

_WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Case:
    """One test: ``tokens`` per sequence and ``batch`` sequences at once."""

    kind: Kind
    tokens: int
    batch: int

    @property
    def label(self) -> str:
        """As llama-bench writes it: pp512, tg128."""
        return f"{'pp' if self.kind == 'prefill' else 'tg'}{self.tokens}"


@dataclass(frozen=True, slots=True)
class Measurement:
    """Speeds of one case in tokens per second, one per repetition, over all sequences together."""

    case: Case
    speeds: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean speed in tokens per second."""
        return statistics.fmean(self.speeds)

    @property
    def deviation(self) -> float:
        """Standard deviation in tokens per second; 0 for one repetition."""
        return statistics.stdev(self.speeds) if len(self.speeds) > 1 else 0.0


def cases(prompts: Sequence[int], generates: Sequence[int], batches: Sequence[int]) -> list[Case]:
    """All tests asked for, prefill first; a length of 0 leaves that kind out."""
    kinds: tuple[tuple[Kind, Sequence[int]], ...] = (("prefill", prompts), ("decode", generates))
    return [Case(kind, tokens, batch) for kind, lengths in kinds for tokens in lengths if tokens for batch in batches]


def needed_context(tests: Sequence[Case]) -> int:
    """Tokens of context that the longest test takes."""
    return max(_WARM_UP_TOKENS + 2, *(test.tokens + 2 for test in tests))


def measure(core: EngineCore, test: Case, repetitions: int, seed: int = 0) -> Measurement:
    """Runs ``test`` on an idle engine; raises NeoServeError if a request does not end as planned."""
    numbers = random.Random(seed)
    run_case(core, Case(test.kind, min(test.tokens, _WARM_UP_TOKENS), test.batch), numbers)
    speeds = [test.tokens * test.batch / run_case(core, test, numbers) for _ in range(repetitions)]
    return Measurement(test, tuple(speeds))


def run_case(core: EngineCore, test: Case, numbers: random.Random) -> float:
    """Seconds of one run of ``test``."""
    prefill = test.kind == "prefill"
    prompt_length, new_tokens = (test.tokens, 1) if prefill else (1, test.tokens + 1)
    sampling = SamplingParams(temperature=0.0, seed=0, max_tokens=new_tokens, ignore_eos=True)
    start = time.perf_counter()
    for index in range(test.batch):
        prompt = tuple(numbers.randrange(core.limits.vocab_size) for _ in range(prompt_length))
        core.add(GenerateRequest(request_id=f"bench-{index}", prompt_token_ids=prompt, sampling=sampling))
    waiting = {f"bench-{index}" for index in range(test.batch)}
    if not prefill:
        # Until every sequence has its first token; decode steps are timed after that.
        _step_until(core, waiting, new_tokens=1)
        start = time.perf_counter()
        waiting = {f"bench-{index}" for index in range(test.batch)}
    _step_until(core, waiting, new_tokens=None)
    return time.perf_counter() - start


def _step_until(core: EngineCore, waiting: set[str], new_tokens: int | None) -> None:
    """Steps until each request in ``waiting`` has got ``new_tokens`` tokens, or with None has ended."""
    while waiting:
        deltas = core.step()
        if not deltas and not core.has_work:
            raise NeoServeError("the engine went idle in the middle of a benchmark")
        for delta in deltas:
            if delta.finish_reason in ("error", "abort"):
                raise NeoServeError(f"a benchmark request failed: {delta.error or delta.finish_reason}")
            if delta.finish_reason is not None or (new_tokens is not None and delta.token_ids):
                waiting.discard(delta.request_id)
