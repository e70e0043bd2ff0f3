"""Prefill and decode speed of an engine in this process, measured like llama-bench.

``pp N``: prompts of N random tokens, a batch of them at once, until each has its first token. ``tg M``: M tokens per
sequence after the first, from a prompt of one token. Greedy, EOS ignored. Each test is repeated after a warm-up.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from neoserve.engine.core import EngineCore
from neoserve.types.errors import ConfigurationError, NeoServeError
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

    @property
    def context(self) -> int:
        """Longest sequence of the test in tokens."""
        return self.tokens + (1 if self.kind == "prefill" else 2)


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


def plan_cases(prompts: Sequence[int], generates: Sequence[int], batches: Sequence[int]) -> list[Case]:
    """All tests asked for, prefill first. Raises ConfigurationError if there is none."""
    kinds: tuple[tuple[Kind, Sequence[int]], ...] = (("prefill", prompts), ("decode", generates))
    tests = [Case(kind, tokens, batch) for kind, lengths in kinds for tokens in lengths for batch in batches]
    if not tests:
        raise ConfigurationError("there is nothing to measure; give prompt lengths (-p) or output lengths (-n)")
    return tests


def measure(core: EngineCore, case: Case, repetitions: int, seed: int = 0) -> Measurement:
    """Runs ``case`` on an idle engine; raises NeoServeError if a request does not end as planned."""
    numbers = random.Random(seed)
    run_case(core, Case(case.kind, min(case.tokens, _WARM_UP_TOKENS), case.batch), numbers)
    speeds = [case.tokens * case.batch / run_case(core, case, numbers) for _ in range(repetitions)]
    return Measurement(case, tuple(speeds))


def run_case(core: EngineCore, case: Case, numbers: random.Random) -> float:
    """Seconds of one run of ``case``."""
    prefill = case.kind == "prefill"
    prompt_length, new_tokens = (case.tokens, 1) if prefill else (1, case.tokens + 1)
    sampling = SamplingParams(temperature=0.0, seed=0, max_tokens=new_tokens, ignore_eos=True)
    names = [f"bench-{index}" for index in range(case.batch)]
    start = time.perf_counter()
    for name in names:
        prompt = tuple(numbers.randrange(core.limits.vocab_size) for _ in range(prompt_length))
        core.add(GenerateRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling))
    if not prefill:
        _step_until(core, set(names), first_token=True)
        start = time.perf_counter()
    _step_until(core, set(names), first_token=False)
    return time.perf_counter() - start


def _step_until(core: EngineCore, waiting: set[str], *, first_token: bool) -> None:
    """Steps until each request in ``waiting`` has its first token, or else has ended."""
    while waiting:
        deltas = core.step()
        if not deltas and not core.has_work:
            raise NeoServeError("the engine went idle in the middle of a benchmark")
        for delta in deltas:
            if delta.finish_reason in ("error", "abort"):
                raise NeoServeError(f"a benchmark request failed: {delta.error or delta.finish_reason}")
            if delta.finish_reason is not None or (first_token and delta.token_ids):
                waiting.discard(delta.request_id)
