"""The prefix cache as a state machine against a model that knows only sets: tree, allocators, scheduler together.

The model is a set of cached page prefixes, each a tuple of token pages with the time it was last used. It predicts how
much of every request is found, which prefixes are evicted for it, and what is left behind at its end.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from neoserve.cache.keys import token_ids
from neoserve.engine.fake import fake_limits
from neoserve.sched.plan import Plan
from neoserve.sched.scheduler import Scheduler
from neoserve.types.errors import ContextLengthError
from neoserve.types.request import GenerateRequest
from neoserve.types.sampling import SamplingParams
from neoserve.types.step import SampleOutput, StepInput

PAGE = 16
# Prompts that part at every depth, so that requests often run beside one that begins alike.
BLOCKS = ([], [0], [0, 1], [0, 1, 2], [0, 1, 2, 0], [0, 1, 2, 2], [0, 1, 1], [0, 1, 2, 0, 1, 2], [2, 2])
SALTS = (None, "x", "y")

Prefix = tuple[object, ...]
"""The salt, then tokens of full pages: (salt, page, page, ...)."""


@dataclass
class Running:
    """What the model knows of a request that was admitted."""

    salt: str | None
    tokens: list[int]
    prompt: int
    scored: bool
    computed: int = 0
    cached: int = 0
    place: Prefix = ()


def pages_of(salt: str | None, tokens: list[int], length: int) -> Prefix:
    """The prefix that the full pages of the first ``length`` tokens make."""
    count = length // PAGE
    return (salt, *(tuple(tokens[PAGE * page : PAGE * (page + 1)]) for page in range(count)))


@dataclass
class Model:
    """Cached prefixes by the time of their last use. A running request keeps its place and all before it."""

    times: dict[Prefix, int] = field(default_factory=dict)
    now: int = 0

    def longest(self, prefix: Prefix, most: int) -> Prefix:
        length = 1
        while length < min(len(prefix), most + 1) and prefix[: length + 1] in self.times:
            length += 1
        return prefix[:length]

    def touch(self, prefix: Prefix, above: Prefix = ()) -> None:
        self.now += 1
        for length in range(max(2, len(above) + 1), len(prefix) + 1):
            self.times[prefix[:length]] = self.now

    def locked(self, running: list[Running]) -> set[Prefix]:
        return {one.place[:length] for one in running for length in range(2, len(one.place) + 1)}

    def evict(self, count: int, running: list[Running]) -> None:
        locked = self.locked(running)
        for _ in range(count):
            inner = {prefix[:-1] for prefix in self.times}
            free = [prefix for prefix in self.times if prefix not in inner and prefix not in locked]
            del self.times[min(free, key=lambda prefix: (self.times[prefix], -len(prefix)))]


class CacheMachine(RuleBasedStateMachine):
    """Adds, steps, aborts and fails requests whose prompts often begin alike; compares after every rule."""

    @initialize(
        num_pages=st.sampled_from([3, 7, 10, 14, 24]),
        window=st.sampled_from([None, 20]),
        chunk=st.sampled_from([5, 16, 40, 200]),
        sequences=st.sampled_from([1, 2, 4]),
        rows=st.sampled_from([4, 64]),
    )
    def start(self, num_pages: int, window: int | None, chunk: int, sequences: int, rows: int) -> None:
        self.limits = fake_limits(
            max_tokens=200, max_context=160, num_pages=num_pages, window=window, max_sequences=sequences,
            max_logit_rows=rows,
        )  # fmt: skip
        self.scheduler = Scheduler(self.limits, max_running=8, max_queued=100, max_step_tokens=chunk)
        self.twin = Scheduler(self.limits, max_running=8, max_queued=100, max_step_tokens=chunk)
        self.step_input = StepInput.allocate(self.limits)
        self.twin_input = StepInput.allocate(self.limits)
        self.model = Model()
        self.waiting: dict[str, GenerateRequest] = {}
        self.running: dict[str, Running] = {}
        self.count = 0
        self.saved = 0

    @rule(
        blocks=st.sampled_from(BLOCKS),
        tail=st.lists(st.integers(0, 1), min_size=0, max_size=18),
        max_tokens=st.sampled_from([1, 2, 15, 17, 40]),
        salt=st.sampled_from([None, None, None, "x"]),
        scored=st.sampled_from([False, False, False, True]),
    )
    def add(self, blocks: list[int], tail: list[int], max_tokens: int, salt: str | None, scored: bool) -> None:
        prompt = [*(token for block in blocks for token in [block + 10] * PAGE), *tail] or [7]
        request = GenerateRequest(
            request_id=f"r{self.count}",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=max_tokens, seed=0),
            cache_salt=salt,
            prompt_logprobs=0 if scored else None,
        )
        self.count += 1
        evicted, before = self.scheduler.tables.evicted_pages, len(self.model.times)
        try:
            self.scheduler.add(request)
        except ContextLengthError:
            return
        self.twin.add(request)
        self.waiting[request.request_id] = request
        self._admit()
        self._check_evictions(evicted, before)

    @rule(token=st.sampled_from([0, 1, 10, 11]), times=st.sampled_from([1, 2, 6, 18]))
    def steps(self, token: int, times: int) -> None:
        for _ in range(times):
            self._step(token)

    def _step(self, token: int) -> None:
        plan = self._plan()
        if not plan.entries:
            return
        none = np.zeros((plan.num_rows, 0), np.float32)
        drawn = np.full(plan.num_rows, token, np.int32)
        output = SampleOutput(drawn, none.sum(1), none, none)
        deltas = self.scheduler.commit(plan, output)
        self.twin.commit(self.twin_plan, output)
        reasons = {delta.request_id: delta for delta in deltas}
        for entry in plan.entries:
            name = entry.sequence.request.request_id
            one = self.running[name]
            in_prompt = one.computed < one.prompt
            one.computed = entry.start + entry.count
            if name in reasons:
                one.tokens.append(token)
                assert reasons[name].cached_tokens == one.cached
            if name in reasons and reasons[name].finish_reason is not None:
                self._end(name)
            elif in_prompt:
                self._insert(one)

    @rule()
    def fail(self) -> None:
        plan = self._plan()
        self.scheduler.fail(plan, "broken")
        self.twin.fail(self.twin_plan, "broken")
        for entry in plan.entries:
            self._end(entry.sequence.request.request_id, keep=False)

    @precondition(lambda self: self.waiting or self.running)
    @rule(pick=st.integers(0, 100))
    def abort(self, pick: int) -> None:
        names = [*self.running, *self.waiting]
        name = names[pick % len(names)]
        assert self.scheduler.abort(name) is not None
        self.twin.abort(name)
        if self.waiting.pop(name, None) is None:
            self._end(name)

    @rule()
    def flush(self) -> None:
        flushed = self.scheduler.flush_cache()
        self.twin.flush_cache()
        assert (flushed is None) == bool(self.running or self.waiting)
        if flushed is not None:
            assert flushed == len(self.model.times) * len(self.limits.groups)
            self.model.times.clear()

    def _plan(self) -> Plan:
        evicted, before = self.scheduler.tables.evicted_pages, len(self.model.times)
        self._admit()
        plan = self.scheduler.plan(self.step_input)
        self.twin_plan = self.twin.plan(self.twin_input)
        self._check_evictions(evicted, before)
        planned = {entry.sequence.request.request_id: entry for entry in plan.entries}
        # The oldest request waits for nobody.
        assert not self.running or next(iter(self.running)) in planned
        for name, one in self.running.items():
            self._adopt(one)
            if name in planned:
                assert planned[name].start == one.computed
        self._compare_twins(plan)
        return plan

    def _check_evictions(self, evicted: int, cached: int) -> None:
        """``evicted`` and ``cached`` are the counts of evicted and of cached pages before what admitted."""
        groups = len(self.limits.groups)
        assert self.scheduler.tables.evicted_pages - evicted == (cached - len(self.model.times)) * groups

    def _admit(self) -> None:
        """As the scheduler admits, on arrival and before a plan: in order, with what is found, evicting the least
        recently used for the rest."""
        for name, request in list(self.waiting.items()):
            if len(self.running) >= self.scheduler.max_running:
                return
            tokens = list(request.prompt_token_ids)
            total = len(tokens) + min(request.sampling.max_tokens or 0, self.scheduler.context_length - len(tokens)) - 1
            scored = request.prompt_logprobs is not None
            most = 0 if scored else (len(tokens) - 1) // PAGE
            place = self.model.longest(pages_of(request.cache_salt, tokens, len(tokens)), most)
            self.model.touch(place)
            one = Running(request.cache_salt, tokens, len(tokens), scored, place=place)
            need = -(-total // PAGE) - (len(place) - 1)
            readers = [*self.running.values(), one]
            free = self.limits.groups[0].num_pages - self._owned() - len(self.model.times)
            evictable = len(self.model.times) - len(self.model.locked(readers))
            if need > free + evictable:
                self.model.touch(place)
                return
            self.model.evict(max(0, need - free), readers)
            one.computed = one.cached = (len(place) - 1) * PAGE
            self.saved += one.cached
            one_total = -(-total // PAGE)
            self.running[name] = one
            self.totals = {**getattr(self, "totals", {}), name: one_total}
            del self.waiting[name]

    def _owned(self) -> int:
        """Pages of one group that running requests own beside what they read from the cache."""
        return sum(self.totals[name] - (len(one.place) - 1) for name, one in self.running.items())

    def _adopt(self, one: Running) -> None:
        """A prompt takes what others have cached since, up to its last token."""
        if one.scored or one.computed >= one.prompt:
            return
        place = self.model.longest(pages_of(one.salt, one.tokens, one.prompt), (one.prompt - 1) // PAGE)
        if len(place) <= len(one.place):
            return
        self.model.touch(place, one.place)
        one.place = place
        saved = max(0, (len(place) - 1) * PAGE - one.computed)
        one.computed += saved
        one.cached += saved
        self.saved += saved

    def _insert(self, one: Running) -> None:
        """What is computed in full pages is cached from now on."""
        place = pages_of(one.salt, one.tokens, one.computed)
        if len(place) > len(one.place):
            self.model.touch(place, one.place)
            one.place = place

    def _end(self, name: str, keep: bool = True) -> None:
        one = self.running.pop(name)
        if keep:
            self._insert(one)
        self.model.touch(one.place)

    def _compare_twins(self, plan: Plan) -> None:
        """Equal calls, equal plans, down to the page numbers."""
        shapes = [
            [(entry.sequence.request.request_id, entry.start, entry.count) for entry in one.entries]
            for one in (plan, self.twin_plan)
        ]
        assert shapes[0] == shapes[1]
        for mine, other in zip(self.step_input.block_tables, self.twin_input.block_tables, strict=True):
            assert np.array_equal(mine, other)

    @invariant()
    def the_tree_holds_what_the_model_says(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check_integrity()
        tables = self.scheduler.tables
        found: set[tuple[bytes, tuple[tuple[int, ...], ...]]] = set()
        for node in tables.tree.nodes():
            ids = [token for one in node.path() for token in token_ids(one.tokens)]
            pages = tuple(tuple(ids[start : start + PAGE]) for start in range(0, len(ids), PAGE))
            for length in range(len(pages) - node.num_pages + 1, len(pages) + 1):
                found.add((node.namespace, pages[:length]))
        spaces = {salt: self._namespace(salt) for salt in SALTS}
        assert found == {(spaces[prefix[0]], prefix[1:]) for prefix in self.model.times}  # type: ignore[index]
        locked = self.model.locked(list(self.running.values()))
        assert tables.tree.num_locked_pages == len(locked)
        assert locked <= self.model.times.keys()
        assert self.scheduler.sharing.cached_tokens == self.saved
        assert (self.scheduler.num_running, self.scheduler.num_waiting) == (len(self.running), len(self.waiting))
        owned = self._owned() if self.running else 0
        assert tables.used_pages == (owned + len(locked)) * len(tables.groups)

    def _namespace(self, salt: str | None) -> bytes:
        request = GenerateRequest(
            request_id="-", prompt_token_ids=(1,), sampling=SamplingParams(seed=0), cache_salt=salt
        )
        key = self.scheduler.sharing.prefix_of(request)
        assert key is not None
        return key.namespace

    def teardown(self) -> None:
        """Left alone, everything ends, and the pool belongs to the cache alone."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(5000):
            if not self.scheduler.has_work:
                break
            self._step(1)
        assert not self.scheduler.has_work
        assert self.scheduler.tables.used_pages == 0
        self.flush()
        assert self.scheduler.tables.evictable_pages == 0
        self.scheduler.check_integrity()


CacheMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestCacheMachine = CacheMachine.TestCase
