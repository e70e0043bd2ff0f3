"""Random arrivals, aborts, lengths and pools against a simple model of what must hold."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neoserve.engine.fake import fake_limits
from neoserve.sched.plan import Plan
from neoserve.sched.scheduler import Scheduler
from neoserve.types.errors import ContextLengthError, QueueFullError
from neoserve.types.request import GenerateRequest
from neoserve.types.sampling import SamplingParams
from neoserve.types.step import SampleOutput, StepInput

EOS = 0


@dataclass
class Expected:
    """The model of one request: what it was promised and what it got."""

    prompt: int
    max_tokens: int
    computed: int = 0
    tokens: list[int] = field(default_factory=list)
    ended: str | None = None


requests = st.tuples(
    st.just("add"),
    st.integers(1, 80),
    st.one_of(st.none(), st.integers(1, 40)),
    st.one_of(st.none(), st.integers(0, 2)),
    st.booleans(),
)
operations = st.lists(
    st.one_of(requests, st.tuples(st.just("abort"), st.integers(0, 30)), st.tuples(st.just("step"), st.integers(1, 4))),
    max_size=40,
)
pools = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 40),
        "max_sequences": st.integers(1, 6),
        "max_logit_rows": st.integers(1, 20),
        "max_context": st.integers(2, 100),
        "num_pages": st.integers(1, 20),
        "window": st.one_of(st.none(), st.integers(1, 40)),
    }
)


class Harness:
    """Runs a scheduler and the model side by side and compares after every operation."""

    def __init__(self, pool: dict[str, int | None], max_queued: int, tokens: np.random.Generator) -> None:
        self.limits = fake_limits(**pool)
        # Without sharing every request computes all its tokens; test_radix_machine.py has the model of sharing.
        self.scheduler = Scheduler(self.limits, max_running=5, max_queued=max_queued, max_step_tokens=1000, model=None)
        self.step_input = StepInput.allocate(self.limits)
        self.max_queued = max_queued
        self.tokens = tokens
        self.requests: dict[str, Expected] = {}

    def add(self, prompt: int, max_tokens: int | None, prompt_logprobs: int | None, ignore_eos: bool) -> None:
        name = f"r{len(self.requests)}"
        request = GenerateRequest(
            request_id=name,
            prompt_token_ids=(7,) * prompt,
            sampling=SamplingParams(max_tokens=max_tokens, seed=0, ignore_eos=ignore_eos),
            eos_token_ids=(EOS,),
            prompt_logprobs=prompt_logprobs,
        )
        context = self.scheduler.context_length
        waiting = self.scheduler.num_waiting
        try:
            self.scheduler.add(request)
        except ContextLengthError:
            assert prompt + 1 > context
        except QueueFullError:
            assert waiting >= self.max_queued
        else:
            assert prompt + 1 <= context
            room = context - prompt
            self.requests[name] = Expected(prompt, room if max_tokens is None else min(room, max_tokens))

    def abort(self, number: int) -> None:
        name = f"r{number}"
        expected = self.requests.get(name)
        delta = self.scheduler.abort(name)
        assert (delta is None) == (expected is None or expected.ended is not None)
        if delta is not None:
            self.requests[name].ended = "abort"

    def step(self) -> None:
        alive = [name for name, expected in self.requests.items() if expected.ended is None]
        plan = self.scheduler.plan(self.step_input)
        # Whenever something is alive a step does something: nothing waits for ever.
        assert bool(plan.entries) == bool(alive)
        if not plan.entries:
            return
        self._check_plan(plan, alive)
        drawn = self.tokens.choice([EOS, 1, 2, 3], size=plan.num_rows, p=[0.1, 0.3, 0.3, 0.3]).astype(np.int32)
        none = np.zeros((plan.num_rows, 0), np.float32)
        deltas = self.scheduler.commit(plan, SampleOutput(drawn, none.sum(1), none, none))
        assert [delta.request_id for delta in deltas] == [
            entry.sequence.request.request_id for entry in plan.entries if entry.samples
        ]
        for delta in deltas:
            expected = self.requests[delta.request_id]
            expected.tokens += delta.token_ids
            expected.ended = delta.finish_reason
            assert len(expected.tokens) <= expected.max_tokens
            assert delta.finish_reason != "length" or len(expected.tokens) == expected.max_tokens
            assert delta.finish_reason != "stop" or expected.tokens[-1] == EOS

    def _check_plan(self, plan: Plan, alive: list[str]) -> None:
        step, limits = self.step_input, self.limits
        assert (plan.num_tokens, plan.num_rows) == (step.num_tokens, step.num_logit_rows)
        assert 0 < step.num_tokens <= limits.max_tokens
        assert step.num_sequences <= limits.max_sequences
        assert step.num_logit_rows <= limits.max_logit_rows
        names = [entry.sequence.request.request_id for entry in plan.entries]
        assert len(names) == len(set(names)) == step.num_sequences
        # First come, first served: the oldest request that is alive is in every step.
        assert alive[0] in names
        decoding = [name for name in alive if self.requests[name].tokens]
        assert names[: len(decoding)] == decoding
        for entry, name in zip(plan.entries, names, strict=True):
            expected = self.requests[name]
            assert entry.start == expected.computed
            total = expected.prompt + len(expected.tokens)
            assert entry.samples == (entry.start + entry.count == total)
            assert entry.start + entry.count <= total
            expected.computed += entry.count
        for group in range(len(limits.groups)):
            pages = [
                page
                for row in range(step.num_sequences)
                for page in step.block_tables[group][row, : -(-int(step.context_len[row]) // limits.page_size)].tolist()
            ]
            assert len(pages) == len(set(pages))
            assert all(0 <= page < limits.groups[group].num_pages for page in pages)

    def check(self) -> None:
        self.scheduler.check_integrity()
        alive = sum(expected.ended is None for expected in self.requests.values())
        assert self.scheduler.num_running + self.scheduler.num_waiting == alive
        assert self.scheduler.num_running <= self.scheduler.max_running


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pools, st.integers(0, 8), operations, st.integers(0, 2**32 - 1))
def test_pages_bounds_and_progress(pool, max_queued, trace, seed):
    """No leak, no double owner, no starvation, every bound kept, whatever happens in whatever order."""
    harness = Harness(pool, max_queued, np.random.default_rng(seed))
    for operation, *arguments in trace:
        if operation == "step":
            for _ in range(arguments[0]):
                harness.step()
                harness.check()
        elif operation == "abort":
            harness.abort(*arguments)
        else:
            harness.add(*arguments)
        harness.check()
    # Left alone, everything ends within the work that was promised.
    work = sum(expected.prompt + expected.max_tokens for expected in harness.requests.values())
    for _ in range(work):
        if not harness.scheduler.has_work:
            break
        harness.step()
        harness.check()
    assert not harness.scheduler.has_work
    assert harness.scheduler.tables.used_pages == 0
    assert all(expected.ended for expected in harness.requests.values())
