"""What the scheduler shares through the prefix tree, what it waits for, and what it must not share."""

from __future__ import annotations

import numpy as np
import pytest

from neoserve.engine.fake import fake_limits
from neoserve.sched.plan import Plan
from neoserve.sched.scheduler import Scheduler
from neoserve.types.request import GenerateRequest, TokenDelta
from neoserve.types.sampling import SamplingParams
from neoserve.types.step import SampleOutput, StepInput, StepLimits

Shape = list[tuple[str, int, int]]


class Bench:
    """A scheduler whose every row draws ``token``."""

    def __init__(self, limits: StepLimits | None = None, *, max_step_tokens: int = 64, **changes: object) -> None:
        self.limits = limits or fake_limits(max_tokens=512)
        values = {"max_running": 8, "max_queued": 100, **changes}
        self.scheduler = Scheduler(self.limits, max_step_tokens=max_step_tokens, **values)
        self.step_input = StepInput.allocate(self.limits)
        self.token = 9

    def add(self, name: str, prompt: list[int], max_tokens: int = 1, **fields: object) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, seed=0)
        self.scheduler.add(
            GenerateRequest(request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling, **fields)
        )

    def plan(self) -> Plan:
        return self.scheduler.plan(self.step_input)

    def commit(self, plan: Plan) -> list[TokenDelta]:
        none = np.zeros((plan.num_rows, 0), np.float32)
        drawn = np.full(plan.num_rows, self.token, np.int32)
        deltas = self.scheduler.commit(plan, SampleOutput(drawn, none.sum(1), none, none))
        self.scheduler.check_integrity()
        return deltas

    def step(self) -> tuple[Shape, list[TokenDelta]]:
        plan = self.plan()
        shape = [(entry.sequence.request.request_id, entry.start, entry.count) for entry in plan.entries]
        return shape, self.commit(plan)

    def run(self) -> dict[str, int]:
        """Steps until nothing is left; the cached tokens of every request."""
        cached = {}
        while self.scheduler.has_work:
            for delta in self.step()[1]:
                cached[delta.request_id] = delta.cached_tokens
        return cached

    @property
    def cached_pages(self) -> int:
        return self.scheduler.tables.tree.num_pages


P = list(range(1, 101))


def test_a_prompt_that_was_there_before_computes_only_its_end():
    bench = Bench(max_step_tokens=512)
    bench.add("cold", P)
    assert bench.step()[0] == [("cold", 0, 100)]
    bench.add("warm", P)
    shape, deltas = bench.step()
    assert shape == [("warm", 96, 4)]
    assert deltas[0].cached_tokens == 96
    assert bench.scheduler.sharing.cached_tokens == 96


@pytest.mark.parametrize(
    ("length", "expected"), [(1, 0), (16, 0), (17, 16), (31, 16), (32, 16), (33, 32), (96, 80), (97, 96)]
)
def test_a_full_hit_still_computes_at_least_one_token(length, expected):
    """B20: prompts at exact multiples of the page size, one more and one less."""
    bench = Bench(max_step_tokens=512)
    bench.add("cold", P)
    bench.run()
    bench.add("warm", P[:length])
    shape, deltas = bench.step()
    assert shape == [("warm", expected, length - expected)]
    assert len(deltas[0].token_ids) == 1


def test_output_is_cached_too_but_never_the_newest_token():
    """Prompt 14 + 3 drawn, of which 2 are stored: one full page; the next turn finds it and no more."""
    bench = Bench()
    bench.add("first", P[:14], max_tokens=3)
    bench.run()
    assert bench.cached_pages == 1
    bench.add("next", [*P[:14], 9, 9, 9, *P[20:40]])
    assert bench.step()[0] == [("next", 16, 21)]
    bench = Bench()
    bench.add("short", P[:14], max_tokens=2)
    bench.run()
    assert bench.cached_pages == 0


def test_requests_that_arrive_together_compute_a_common_prefix_once():
    bench = Bench(max_step_tokens=256)
    for number in range(4):
        bench.add(f"r{number}", [*P[:64], *[100 + number] * 10])
    assert bench.step()[0] == [("r0", 0, 74)]
    assert bench.step()[0] == [(f"r{number}", 64, 10) for number in (1, 2, 3)]
    assert bench.cached_pages == 4
    assert bench.scheduler.sharing.cached_tokens == 3 * 64


def test_the_wait_ends_with_the_common_part_also_in_chunks():
    bench = Bench(max_step_tokens=40)
    bench.add("a", [*P[:64], *[101] * 60], max_tokens=1)
    bench.add("b", [*P[:64], *[102] * 60], max_tokens=1)
    shapes = [bench.step()[0] for _ in range(2)]
    assert shapes == [[("a", 0, 40)], [("a", 40, 40)]]
    assert bench.step()[0] == [("a", 80, 40)]
    assert bench.step()[0] == [("a", 120, 4), ("b", 64, 36)]
    assert bench.run() == {"b": 64}


def test_nobody_waits_for_a_short_common_prefix():
    bench = Bench()
    bench.add("a", [*P[:31], 101])
    bench.add("b", [*P[:31], 102])
    assert [entry[0] for entry in bench.step()[0]] == ["a", "b"]
    assert bench.cached_pages == 3


def test_unrelated_prompts_do_not_wait():
    bench = Bench(max_step_tokens=512)
    bench.add("a", P)
    bench.add("b", P)
    bench.add("c", P[::-1])
    assert bench.step()[0] == [("a", 0, 100), ("c", 0, 100)]


@pytest.mark.parametrize("how", ["abort", "fail"])
def test_a_waiting_prompt_goes_on_when_the_older_one_ends_early(how):
    bench = Bench(max_step_tokens=40)
    bench.add("a", P)
    bench.add("b", P)
    bench.step()
    plan = bench.plan()
    assert [entry.sequence.request.request_id for entry in plan.entries] == ["a"]
    if how == "abort":
        bench.scheduler.abort("a")
        bench.commit(plan)
    else:
        bench.scheduler.fail(plan, "broken")
    assert bench.step()[0] == [("b", 32, 40)]
    bench.run()
    assert bench.scheduler.tables.used_pages == 0


def test_what_an_abort_leaves_behind_is_what_was_committed():
    bench = Bench(max_step_tokens=40)
    bench.add("a", P)
    bench.step()
    plan = bench.plan()
    assert [(entry.start, entry.count) for entry in plan.entries] == [(40, 40)]
    bench.scheduler.abort("a")
    assert bench.cached_pages == 2
    bench.scheduler.check_integrity()


def test_a_failed_step_leaves_nothing_of_itself_behind():
    bench = Bench(max_step_tokens=40)
    bench.add("a", P)
    bench.step()
    bench.scheduler.fail(bench.plan(), "broken")
    assert bench.cached_pages == 2
    bench.token = -1
    bench.add("b", [*P[:40], *P[:40]])
    bench.step()
    bench.step()
    assert not bench.scheduler.has_work
    assert bench.cached_pages == 4
    bench.scheduler.check_integrity()


def test_prompt_logprobs_compute_every_position():
    bench = Bench(fake_limits(max_tokens=512, max_logit_rows=200), max_step_tokens=512)
    bench.add("cold", P)
    bench.run()
    bench.add("scored", P, prompt_logprobs=1)
    shape, deltas = bench.step()
    assert shape == [("scored", 0, 100)]
    assert deltas[0].cached_tokens == 0
    assert bench.cached_pages == 6
    assert bench.scheduler.tables.evicted_pages == 0


def test_prompt_logprobs_do_not_wait_but_others_may_wait_for_them():
    bench = Bench(fake_limits(max_tokens=512, max_logit_rows=40), max_step_tokens=512)
    bench.add("scored", P, prompt_logprobs=1)
    bench.add("plain", P)
    bench.add("scored too", P, prompt_logprobs=1)
    # The rows bound a chunk of the scorer to 40 tokens; after two, too little is left to wait for.
    assert bench.step()[0] == [("scored", 0, 40)]
    assert bench.run() == {"scored": 0, "plain": 80, "scored too": 0}


@pytest.mark.parametrize("field", ["cache_salt", "extra_key"])
def test_salts_keep_prefixes_apart(field):
    """B21: a hit only within one salt, also between requests that run together."""
    bench = Bench(max_step_tokens=512)
    for name, salt in (("x", "x"), ("y", "y"), ("none", None)):
        bench.add(name, P, **({} if salt is None else {field: salt}))
    assert len(bench.step()[0]) == 3
    for name, salt in (("x2", "x"), ("y2", "y"), ("none2", None), ("z", "z")):
        bench.add(name, P, **({} if salt is None else {field: salt}))
    assert bench.run() == {"x2": 96, "y2": 96, "none2": 96, "z": 0}


def test_a_salt_is_no_extra_key():
    bench = Bench(max_step_tokens=512)
    bench.add("a", P, cache_salt="s")
    bench.run()
    bench.add("b", P, extra_key="s")
    assert bench.run() == {"b": 0}


def test_two_models_share_nothing():
    ours, theirs = (Bench(model=name).scheduler.sharing for name in (b"ours", b"theirs"))
    request = GenerateRequest(request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(seed=0))
    assert ours.prefix_of(request) != theirs.prefix_of(request)


def test_without_the_cache_nothing_is_kept_and_nobody_waits():
    bench = Bench(max_step_tokens=512, model=None)
    bench.add("a", P)
    bench.add("b", P)
    assert bench.step()[0] == [("a", 0, 100), ("b", 0, 100)]
    assert bench.cached_pages == 0
    assert bench.scheduler.sharing.cached_tokens == 0


def test_cached_pages_make_room_for_requests():
    bench = Bench(fake_limits(num_pages=8, max_context=128, max_tokens=128), max_step_tokens=128)
    bench.add("a", P)
    bench.run()
    assert bench.cached_pages == 6
    bench.add("b", P[::-1], max_tokens=20)
    assert bench.step()[0] == [("b", 0, 100)]
    assert bench.scheduler.tables.evicted_pages == 6
    bench.run()


def test_a_queue_of_length_zero_counts_the_cache_as_room():
    bench = Bench(fake_limits(num_pages=8, max_context=128, max_tokens=128), max_step_tokens=128, max_queued=0)
    bench.add("a", P)
    bench.run()
    bench.add("b", P, max_tokens=28)
    assert bench.run() == {"b": 96}


def test_flush_empties_the_cache_unless_something_runs():
    bench = Bench()
    bench.add("a", P)
    assert bench.scheduler.flush_cache() is None
    bench.plan()
    assert bench.scheduler.flush_cache() is None
    bench.run()
    assert bench.scheduler.flush_cache() == 6
    assert bench.scheduler.tables.evictable_pages == 0
    bench.scheduler.check_integrity()
    bench.add("again", P)
    assert bench.run() == {"again": 0}


def test_window_groups_share_with_the_others():
    """Gemma 3: a prefix is only reused where every group has its pages."""
    bench = Bench(fake_limits(max_tokens=512, window=20), max_step_tokens=512)
    bench.add("a", P)
    bench.run()
    bench.add("b", P)
    plan = bench.plan()
    assert plan.entries[0].start == 96
    first = [table[0, :6].tolist() for table in bench.step_input.block_tables]
    assert [len(set(pages)) for pages in first] == [6, 6]
    bench.commit(plan)
    assert bench.scheduler.tables.evictable_pages == 12
