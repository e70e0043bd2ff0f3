"""The engine: a synchronous object that turns requests into token deltas, one step at a time."""

from __future__ import annotations

import logging
import time

import numpy as np

from neoserve.cache.allocator import PageAccountingError
from neoserve.cache.listing import list_cache
from neoserve.engine.checks import check_request
from neoserve.sampling.batch import SamplingBatchBuilder
from neoserve.sampling.logprobs import score_tokens
from neoserve.sched.plan import Plan
from neoserve.sched.scheduler import Scheduler
from neoserve.types.cache import CacheListing
from neoserve.types.errors import EngineDeadError
from neoserve.types.options import EngineOptions
from neoserve.types.request import EngineStats, GenerateRequest, TokenDelta
from neoserve.types.step import Executor, SampleOutput

logger = logging.getLogger(__name__)

_NOTHING_SAMPLED = SampleOutput(
    token_ids=np.zeros(0, np.int32),
    logprobs=np.zeros(0, np.float32),
    top_ids=np.zeros((0, 0), np.int32),
    top_logprobs=np.zeros((0, 0), np.float32),
)


class EngineCore:
    """Requests in, deltas out. Not thread-safe except ``check`` and ``stats``: one thread drives it.

    A step that the executor fails ends the requests of that step with finish_reason "error"; the others go on. After
    ``options.max_failed_steps`` failed steps in a row the engine is dead: every request is ended with "error",
    ``dead_reason`` is set, and ``add`` raises EngineDeadError from then on. ``strict`` raises PageAccountingError
    when pages do not add up at an idle point (tests); otherwise that is logged and repaired. ``row_fallbacks`` counts
    the ops that were bound to a slow row, ``threads`` the executor's compute threads, both for ``stats``.
    ``model_identity`` is part of the key of every cached page.
    """

    def __init__(
        self,
        executor: Executor,
        options: EngineOptions | None = None,
        *,
        strict: bool = False,
        row_fallbacks: int = 0,
        threads: int = 0,
        model_identity: bytes = b"",
    ) -> None:
        self.options = options or EngineOptions()
        self.executor = executor
        self.limits = executor.limits
        self.scheduler = Scheduler(
            executor.limits,
            max_running=self.options.max_running_requests,
            max_queued=self.options.max_queued_requests,
            max_step_tokens=self.options.max_tokens_per_step,
            model=model_identity if self.options.enable_prefix_caching else None,
        )
        self.dead_reason: str | None = None
        self._sampling = SamplingBatchBuilder(executor.limits)
        self._strict = strict
        self._row_fallbacks = row_fallbacks
        self._threads = threads
        self._failed_steps = 0
        self._steps = self._prompt_tokens = self._generated_tokens = 0
        self._seconds = {"plan": 0.0, "forward": 0.0, "sample": 0.0, "commit": 0.0}

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has something to do."""
        return self.dead_reason is None and self.scheduler.has_work

    @property
    def context_length(self) -> int:
        """Longest prompt plus output, in tokens, that this engine can hold."""
        return self.scheduler.context_length

    def restrict_vocabulary(self, size: int) -> None:
        """Leaves ids of ``size`` and above (logits beyond the tokenizer) out of draws and log probabilities.

        Call before the first request.
        """
        self._sampling.restrict_vocabulary(size)

    def check(self, request: GenerateRequest) -> None:
        """Raises what ``add`` would raise for the request itself, whatever else is running. Changes nothing."""
        if self.dead_reason is not None:
            raise EngineDeadError(self.dead_reason)
        check_request(request, self.limits.vocab_size)
        self.scheduler.clamp(request)

    def add(self, request: GenerateRequest) -> None:
        """Queues a request.

        Raises InvalidRequestError (naming the field), ContextLengthError, QueueFullError or EngineDeadError.
        """
        self.check(request)
        self.scheduler.add(request)

    def abort(self, request_id: str) -> TokenDelta | None:
        """Ends a request at once and frees its pages; None if it is unknown or has ended."""
        delta = self.scheduler.abort(request_id)
        self._check_idle()
        return delta

    def step(self) -> list[TokenDelta]:
        """Computes one step: plan, run, commit. Returns the new tokens of every request that got some or ended."""
        started = time.perf_counter()
        plan = self.scheduler.plan(self.executor.step)
        self._seconds["plan"] += time.perf_counter() - started
        if not plan.entries:
            return []
        try:
            sampled = self._run(plan)
        except Exception as error:  # whatever the executor raises: it ends the requests of this step, not the engine
            return self._step_failed(plan, error)
        started = time.perf_counter()
        deltas = self.scheduler.commit(plan, sampled)
        self._count(plan, deltas)
        self._check_idle()
        self._seconds["commit"] += time.perf_counter() - started
        return deltas

    def flush_cache(self) -> int | None:
        """Empties the prefix cache and returns the KV pages it held, over all groups.

        None while requests run or wait: then nothing is done.
        """
        flushed = self.scheduler.flush_cache()
        self._check_idle()
        return flushed

    def list_cache(self, max_runs: int, ids_per_run: int = 0) -> CacheListing:
        """What the prefix cache holds: at most ``max_runs`` nodes, each with its first ``ids_per_run`` token ids."""
        return list_cache(self.scheduler.tables, max_runs, ids_per_run, self.options.enable_prefix_caching)

    def die(self, reason: str) -> list[TokenDelta]:
        """Declares the engine dead and ends every request with finish_reason "error" and ``reason``."""
        logger.error("the engine is dead: %s", reason)
        self.dead_reason = reason
        return self.scheduler.fail_all(reason)

    def stats(self) -> EngineStats:
        """A snapshot for metrics; may be called from any thread (counters of one step may differ by that step)."""
        tables = self.scheduler.tables
        return EngineStats(
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting,
            used_pages=tables.used_pages,
            evictable_pages=tables.evictable_pages,
            total_pages=tables.total_pages,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self.scheduler.sharing.cached_tokens,
            evicted_pages=tables.evicted_pages,
            generated_tokens=self._generated_tokens,
            row_fallbacks=self._row_fallbacks,
            threads=self._threads,
            step_seconds=dict(self._seconds),
        )

    def close(self) -> None:
        """Ends the executor's threads and frees its memory; the engine counts as dead afterwards."""
        self.dead_reason = self.dead_reason or "the engine is closed"
        self.executor.close()

    def _run(self, plan: Plan) -> SampleOutput:
        """Runs the model on the planned step: forward, scores of prompt tokens, draws."""
        started = time.perf_counter()
        self.executor.forward()
        forwarded = time.perf_counter()
        self._seconds["forward"] += forwarded - started
        self._score_prompts(plan)
        if not any(entry.samples for entry in plan.entries):
            return _NOTHING_SAMPLED
        sampled = self.executor.sample(self._sampling.build(plan.sampled_rows()))
        self._seconds["sample"] += time.perf_counter() - forwarded
        return sampled

    def _score_prompts(self, plan: Plan) -> None:
        """Appends the log probabilities of the prompt tokens that this step's rows predict."""
        for entry in plan.entries:
            state = entry.sequence
            if not entry.num_scored or state.prompt_logprobs is None:
                continue
            rows = self.executor.logits()[entry.first_row : entry.first_row + entry.num_scored]
            targets = state.tokens[entry.start + 1 : entry.start + 1 + entry.num_scored]
            alternatives = state.request.prompt_logprobs or 0
            scores = score_tokens(rows, targets, alternatives, self._sampling.valid_vocabulary)
            state.prompt_logprobs.extend(scores)

    def _step_failed(self, plan: Plan, error: Exception) -> list[TokenDelta]:
        logger.error("a step of %d requests failed", len(plan.entries), exc_info=error)
        self._failed_steps += 1
        reason = f"the model step failed: {type(error).__name__}: {error}"
        deltas = self.scheduler.fail(plan, reason)
        if self._failed_steps >= self.options.max_failed_steps:
            deltas += self.die(f"{self._failed_steps} steps failed in a row; the last: {reason}")
        self._check_idle()
        return deltas

    def _count(self, plan: Plan, deltas: list[TokenDelta]) -> None:
        self._failed_steps = 0
        self._steps += 1
        self._generated_tokens += sum(len(delta.token_ids) for delta in deltas)
        # An entry's prompt tokens: those below the prompt length; decode entries start at or above it.
        self._prompt_tokens += sum(
            max(0, min(entry.start + entry.count, entry.sequence.prompt_length) - entry.start) for entry in plan.entries
        )

    def _check_idle(self) -> None:
        """When nothing runs, only the prefix cache may hold pages: a leak is repaired and logged, or raised if strict.

        The repair empties the cache, too: it is not known who was wrong.
        """
        if self.scheduler.num_running:
            return
        try:
            if self._strict:
                self.scheduler.check_integrity()
            else:
                self.scheduler.tables.check_idle()
        except PageAccountingError as error:
            if self._strict:
                raise
            logger.error("%s; all pages are set free", error)
            self.scheduler.tables.reset()
