"""The scheduler's rules one by one: order, budgets, admission, limits, aborts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from neoserve.engine.fake import fake_limits
from neoserve.sched.admission import clamp_max_tokens, reserved_tokens
from neoserve.sched.plan import Plan
from neoserve.sched.scheduler import Scheduler
from neoserve.types.errors import ContextLengthError, InvalidRequestError, QueueFullError
from neoserve.types.request import GenerateRequest, TokenDelta
from neoserve.types.sampling import SamplingParams
from neoserve.types.step import SampleOutput, StepInput, StepLimits


class Bench:
    """A scheduler with its step arrays; ``token`` decides what every row draws."""

    def __init__(
        self,
        limits: StepLimits | None = None,
        *,
        max_running: int = 8,
        max_queued: int = 100,
        max_step_tokens: int = 64,
        token: Callable[[], int] = lambda: 9,
    ) -> None:
        self.limits = limits or fake_limits()
        self.scheduler = Scheduler(
            self.limits, max_running=max_running, max_queued=max_queued, max_step_tokens=max_step_tokens
        )
        self.step_input = StepInput.allocate(self.limits)
        self.token = token

    def add(self, name: str, prompt: int, max_tokens: int | None = 4, **sampling: object) -> None:
        logprobs = sampling.pop("prompt_logprobs", None)
        eos = sampling.pop("eos", (0,))
        self.scheduler.add(
            GenerateRequest(
                request_id=name,
                prompt_token_ids=tuple(range(1, prompt + 1)),
                sampling=SamplingParams(max_tokens=max_tokens, seed=0, **sampling),
                eos_token_ids=eos,
                prompt_logprobs=logprobs,
            )
        )

    def plan(self) -> Plan:
        return self.scheduler.plan(self.step_input)

    def step(self) -> tuple[list[tuple[str, int, int]], list[TokenDelta]]:
        """((request, first token, count) per entry, deltas) of one step."""
        plan = self.plan()
        shape = [(entry.sequence.request.request_id, entry.start, entry.count) for entry in plan.entries]
        drawn = np.array([self.token() for _ in range(plan.num_rows)], np.int32)
        nothing = np.zeros((plan.num_rows, 20))
        sampled = SampleOutput(drawn, np.zeros(plan.num_rows, np.float32), nothing, nothing)
        return shape, self.scheduler.commit(plan, sampled)

    def run(self) -> dict[str, list[int]]:
        """Steps until nothing is left; the tokens of every request."""
        tokens: dict[str, list[int]] = {}
        while self.scheduler.has_work:
            for delta in self.step()[1]:
                tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
        return tokens


def test_decodes_come_first_and_prefill_is_cut_into_chunks():
    bench = Bench(max_step_tokens=10)
    bench.add("a", prompt=3)
    bench.add("b", prompt=12)
    assert bench.step()[0] == [("a", 0, 3), ("b", 0, 7)]
    assert bench.step()[0] == [("a", 3, 1), ("b", 7, 5)]
    assert bench.step()[0] == [("a", 4, 1), ("b", 12, 1)]


def test_step_arrays_hold_what_the_plan_says():
    bench = Bench(fake_limits(window=8), max_step_tokens=20)
    bench.add("a", prompt=3)
    bench.step()
    bench.add("b", prompt=25, max_tokens=2)
    plan, step = bench.plan(), bench.step_input
    assert (step.num_tokens, step.num_sequences, step.num_logit_rows) == (20, 2, 1)
    assert step.token_ids[:20].tolist() == [9, *range(1, 20)]
    assert step.positions[:20].tolist() == [3, *range(19)]
    assert step.query_start[:3].tolist() == [0, 1, 20]
    assert step.context_len[:2].tolist() == [4, 19]
    assert step.logit_rows[:1].tolist() == [0]
    for group, table in enumerate(step.block_tables):
        for row, entry in enumerate(plan.entries):
            pages = bench.scheduler.tables.pages_of(entry.sequence.slot)[group]
            needed = -(-int(step.context_len[row]) // 16)
            assert table[row, :needed].tolist() == pages[:needed]


def test_running_requests_get_a_token_in_every_step_while_long_prompts_arrive():
    """B22: a stream of long prompts must not stop the decodes, and the prompts get on, too."""
    bench = Bench(fake_limits(num_pages=1000, max_sequences=8), max_step_tokens=8)
    for name in ("d0", "d1", "d2", "d3"):
        bench.add(name, prompt=1, max_tokens=60)
    bench.step()
    for number in range(40):
        if number % 10 == 0:
            bench.add(f"p{number}", prompt=30, max_tokens=1)
        shape, _ = bench.step()
        assert [entry[0] for entry in shape[:4]] == ["d0", "d1", "d2", "d3"]
        assert sum(entry[2] for entry in shape) <= 8
        assert len(shape) > 4 or not bench.scheduler.num_waiting
    assert bench.scheduler.num_running == 4


def test_every_running_request_fits_into_one_step():
    """The running bound follows the tightest limit of a step."""
    assert Bench(fake_limits(max_sequences=3)).scheduler.max_running == 3
    assert Bench(fake_limits(max_logit_rows=2)).scheduler.max_running == 2
    assert Bench(max_step_tokens=5).scheduler.max_running == 5
    assert Bench(max_running=4).scheduler.max_running == 4


def test_nobody_overtakes_the_head_of_the_queue():
    bench = Bench(fake_limits(num_pages=4, max_context=64))
    bench.add("first", prompt=30, max_tokens=3)
    bench.add("large", prompt=40, max_tokens=20)
    bench.add("small", prompt=1, max_tokens=1)
    seen = [name for _ in range(30) for name, _, _ in bench.step()[0]]
    assert list(dict.fromkeys(seen)) == ["first", "large", "small"]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "context", "expected"),
    [(5, None, 10, 5), (5, 3, 10, 3), (5, 5, 10, 5), (5, 6, 10, 5), (9, 10**9, 10, 1), (1, None, 2, 1)],
)
def test_max_tokens_is_clamped_to_the_context(prompt, max_tokens, context, expected):
    assert clamp_max_tokens(prompt, max_tokens, context) == expected


@pytest.mark.parametrize("prompt", [10, 11, 10**6])
def test_a_prompt_that_leaves_no_room_for_a_token_is_refused(prompt):
    with pytest.raises(ContextLengthError, match=rf"prompt has {prompt} tokens, but the context holds 10") as caught:
        clamp_max_tokens(prompt, 1, 10)
    assert caught.value.code == "context_length_exceeded"


def test_reservation_is_the_worst_case_without_the_last_token():
    assert reserved_tokens(16, 1) == 16
    assert reserved_tokens(16, 2) == 17


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_prompts_around_the_context_length(extra):
    """B26: exactly the context, one less, one more; the next request works in every case."""
    bench = Bench(fake_limits(max_context=48))
    if extra < 0:
        bench.add("edge", prompt=48 + extra, max_tokens=10**9)
        assert [(len(d.token_ids), d.finish_reason) for d in bench.step()[1]] == [(1, "length")]
    else:
        with pytest.raises(ContextLengthError):
            bench.add("edge", prompt=48 + extra)
    bench.add("next", prompt=2, max_tokens=2)
    assert bench.run() == {"next": [9, 9]}
    bench.scheduler.check_integrity()


def test_a_small_pool_bounds_the_context():
    """What no empty pool could hold is refused at once instead of waiting for ever."""
    bench = Bench(fake_limits(num_pages=2, max_context=256))
    assert bench.scheduler.context_length == 33
    bench.add("fits", prompt=32, max_tokens=1)
    with pytest.raises(ContextLengthError):
        bench.add("never", prompt=33, max_tokens=1)
    assert bench.run() == {"fits": [9]}


def test_the_queue_is_bounded():
    bench = Bench(max_running=1, max_queued=1)
    bench.add("a", prompt=1)
    bench.step()
    bench.add("b", prompt=1)
    with pytest.raises(QueueFullError, match="1 requests are waiting, the bound is 1"):
        bench.add("c", prompt=1)
    assert set(bench.run()) == {"a", "b"}


def test_requests_that_arrive_in_one_batch_fill_slots_before_the_queue():
    """Between two steps the first one still waits, but only for the plan: the second takes the queue's one place."""
    bench = Bench(max_running=1, max_queued=1)
    bench.add("a", prompt=1)
    bench.add("b", prompt=1)
    with pytest.raises(QueueFullError):
        bench.add("c", prompt=1)
    assert set(bench.run()) == {"a", "b"}


def test_a_queue_of_length_zero_still_takes_what_can_start_at_once():
    bench = Bench(max_running=1, max_queued=0)
    bench.add("a", prompt=1)
    with pytest.raises(QueueFullError):
        bench.add("b", prompt=1)
    bench.run()
    bench.add("b", prompt=1)
    assert set(bench.run()) == {"b"}


def test_a_request_id_in_use_is_refused():
    bench = Bench()
    bench.add("a", prompt=1)
    with pytest.raises(InvalidRequestError, match="request_id 'a' is in use"):
        bench.add("a", prompt=1)
    bench.step()
    with pytest.raises(InvalidRequestError):
        bench.add("a", prompt=1)
    bench.run()
    bench.add("a", prompt=1)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_abort_in_queue_prefill_and_decode_frees_the_pages_at_once(steps):
    bench = Bench(max_step_tokens=16)
    bench.add("a", prompt=20, max_tokens=50)
    for _ in range(steps):
        bench.step()
    delta = bench.scheduler.abort("a")
    assert delta is not None
    assert (delta.finish_reason, delta.token_ids) == ("abort", ())
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting, bench.scheduler.tables.used_pages) == (0, 0, 0)
    assert bench.scheduler.abort("a") is None
    assert bench.scheduler.abort("unknown") is None
    bench.scheduler.check_integrity()
    assert bench.plan().entries == ()


def test_a_request_aborted_between_plan_and_commit_is_skipped():
    bench = Bench()
    bench.add("a", prompt=2)
    bench.add("b", prompt=2)
    plan = bench.plan()
    bench.scheduler.abort("a")
    rows = np.zeros((2, 0), np.float32)
    deltas = bench.scheduler.commit(plan, SampleOutput(np.array([9, 9], np.int32), rows[:, 0:0].sum(1), rows, rows))
    assert [delta.request_id for delta in deltas] == ["b"]
    bench.scheduler.check_integrity()


def test_stop_ids_end_generation_and_are_part_of_the_tokens():
    tokens = iter([5, 6, 7])
    bench = Bench(token=lambda: next(tokens))
    bench.add("a", prompt=1, max_tokens=9, eos=(6,))
    deltas = [delta for _ in range(2) for delta in bench.step()[1]]
    assert [delta.token_ids for delta in deltas] == [(5,), (6,)]
    assert (deltas[-1].finish_reason, deltas[-1].stop_token_id) == ("stop", 6)
    assert not bench.scheduler.has_work


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({"eos": (9,)}, 1),
        ({"eos": (9,), "ignore_eos": True}, 4),
        ({"eos": (), "stop_token_ids": (9,)}, 1),
        ({"eos": (), "stop_token_ids": (9,), "ignore_eos": True}, 1),
        ({"eos": (9,), "min_tokens": 2}, 3),
        ({"eos": (9,), "min_tokens": 4}, 4),
    ],
)
def test_when_the_token_nine_ends_generation(sampling, expected):
    bench = Bench()
    bench.add("a", prompt=1, max_tokens=4, **sampling)
    assert bench.run() == {"a": [9] * expected}


def test_a_stop_token_that_is_also_the_last_one_allowed_counts_as_stop():
    bench = Bench()
    bench.add("a", prompt=1, max_tokens=1, eos=(9,))
    assert bench.step()[1][0].finish_reason == "stop"


def test_prompt_scoring_takes_one_row_per_token_within_the_row_limit():
    bench = Bench(fake_limits(max_logit_rows=6), max_step_tokens=64)
    bench.add("a", prompt=14, max_tokens=1, prompt_logprobs=0)
    shapes = []
    while bench.scheduler.has_work:
        plan = bench.plan()
        entry = plan.entries[0]
        shapes.append((entry.start, entry.count, entry.num_rows, entry.num_scored, entry.samples))
        rows = np.zeros((plan.num_rows, 0), np.float32)
        bench.scheduler.commit(plan, SampleOutput(np.full(plan.num_rows, 9, np.int32), rows.sum(1), rows, rows))
    assert shapes == [(0, 6, 6, 6, False), (6, 6, 6, 6, False), (12, 2, 2, 1, True)]


def test_decodes_keep_their_rows_beside_prompt_scoring():
    bench = Bench(fake_limits(max_logit_rows=4), max_step_tokens=64)
    bench.add("decode", prompt=1, max_tokens=20)
    bench.step()
    bench.add("score", prompt=9, max_tokens=1, prompt_logprobs=0)
    bench.add("plain", prompt=9, max_tokens=1)
    for _ in range(3):
        shape, _ = bench.step()
        assert shape[0][0] == "decode"
        assert bench.step_input.num_logit_rows <= 4
    bench.run()
    bench.scheduler.check_integrity()


@pytest.mark.parametrize("token", [-1, 128, 2**31 - 1])
def test_a_drawn_id_outside_the_vocabulary_ends_that_request_alone(token):
    tokens = iter([token, 9, 9])
    bench = Bench(token=lambda: next(tokens))
    bench.add("bad", prompt=1, max_tokens=2)
    bench.add("good", prompt=1, max_tokens=2)
    first = {delta.request_id: delta for delta in bench.step()[1]}
    assert first["bad"].finish_reason == "error"
    assert str(token) in (first["bad"].error or "")
    assert [delta.finish_reason for delta in bench.step()[1]] == ["length"]
    bench.scheduler.check_integrity()


def test_fail_ends_the_requests_of_the_plan_only():
    bench = Bench(max_running=1)
    bench.add("a", prompt=1)
    bench.add("b", prompt=1)
    deltas = bench.scheduler.fail(bench.plan(), "broken")
    assert [(delta.request_id, delta.finish_reason, delta.error) for delta in deltas] == [("a", "error", "broken")]
    assert bench.run() == {"b": [9] * 4}


def test_equal_calls_give_equal_plans():
    def plans() -> list[object]:
        bench = Bench(fake_limits(num_pages=12), max_step_tokens=11)
        trace: list[object] = []
        for number in range(12):
            bench.add(f"r{number}", prompt=1 + 7 * number % 23, max_tokens=1 + number % 5)
        while bench.scheduler.has_work:
            trace.append(bench.step()[0])
            count = bench.step_input.num_sequences
            trace.append(bench.step_input.block_tables[0][:count, :2].tolist())
        return trace

    assert plans() == plans()
