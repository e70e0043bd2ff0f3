"""First-come continuous batching with chunked prefill (docs/scheduler.md)."""

from __future__ import annotations

import heapq
from collections import OrderedDict

from neoserve.cache.allocator import PageAccountingError
from neoserve.cache.block_tables import BlockTables
from neoserve.sched.admission import clamp_max_tokens, reserved_tokens
from neoserve.sched.plan import Plan, PlanEntry, fill_step
from neoserve.sched.sequence import SequenceState
from neoserve.sched.sharing import Claim, PrefixSharing
from neoserve.types.errors import InvalidRequestError, QueueFullError
from neoserve.types.request import FinishReason, GenerateRequest, TokenDelta, TokenLogprob
from neoserve.types.step import SampleOutput, StepInput, StepLimits


class Scheduler:
    """Decides what each step computes. Deterministic: same calls, same plans.

    ``max_running`` is reduced to what one step can hold (sequences, tokens and logits rows), so that every running
    request gets at least one token into every step (unless it waits for a prefix that an older request computes).
    ``max_step_tokens`` bounds a step below ``limits.max_tokens``. ``model`` identifies the model for the prefix cache
    (see sched.sharing); None turns the cache off.
    """

    def __init__(
        self,
        limits: StepLimits,
        *,
        max_running: int,
        max_queued: int,
        max_step_tokens: int,
        model: bytes | None = b"",
    ) -> None:
        self.limits = limits
        self.max_step_tokens = min(max_step_tokens, limits.max_tokens)
        self.max_running = min(max_running, limits.max_sequences, self.max_step_tokens, limits.max_logit_rows)
        self.max_queued = max_queued
        self.tables = BlockTables(limits)
        self.sharing = PrefixSharing(self.tables, model)
        # The last token's KV is never stored, so one token more than the pool holds can be generated.
        self.context_length = min(limits.max_context, self.tables.capacity_tokens + 1)
        self._waiting: OrderedDict[str, SequenceState] = OrderedDict()
        self._running: dict[str, SequenceState] = {}
        self._free_slots = list(range(limits.max_sequences))

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Admitted requests: they hold a slot and pages."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether a plan would have entries."""
        return bool(self._running or self._waiting)

    def clamp(self, request: GenerateRequest) -> int:
        """Tokens the request may generate here; raises ContextLengthError if it can never fit."""
        return clamp_max_tokens(len(request.prompt_token_ids), request.sampling.max_tokens, self.context_length)

    def add(self, request: GenerateRequest) -> None:
        """Queues a request.

        Raises ContextLengthError if it can never fit, InvalidRequestError for a request id in use, QueueFullError.
        A request that can start at the next step is not refused for a full queue (the queue may be of length 0).
        """
        state = SequenceState.from_request(request, self.clamp(request), self.sharing.prefix_of(request))
        if request.request_id in self._running or request.request_id in self._waiting:
            raise InvalidRequestError(f"request_id {request.request_id!r} is in use; choose another", "request_id")
        self._waiting[request.request_id] = state
        self._admit()  # what can start takes no place in the queue
        if len(self._waiting) > self.max_queued:
            del self._waiting[request.request_id]
            raise QueueFullError(
                f"{len(self._waiting)} requests are waiting, the bound is {self.max_queued}; retry later"
            )

    def abort(self, request_id: str) -> TokenDelta | None:
        """Ends a request wherever it is and frees its pages at once; None if it is unknown or already ended."""
        state = self._waiting.get(request_id) or self._running.get(request_id)
        return None if state is None else self._finish(state, "abort")

    def plan(self, step: StepInput) -> Plan:
        """Admits what fits, chooses the tokens of the next step and fills ``step``. Nothing to do: no entries."""
        self._admit()
        entries = [self._decode_entry(state, row) for row, state in enumerate(self._decoding())]
        tokens = rows = len(entries)
        claims: set[Claim] = set()
        for state in self._running.values():
            if not state.is_prefilling or self.sharing.must_wait(state, claims):
                continue
            entry = self._prefill_entry(state, rows, self.max_step_tokens - tokens)
            if entry is not None:
                entries.append(entry)
                tokens += entry.count
                rows += entry.num_rows
        if entries:
            fill_step(entries, self.tables, step)
        return Plan(tuple(entries), tokens, rows)

    def commit(self, plan: Plan, sampled: SampleOutput) -> list[TokenDelta]:
        """Takes the results of a plan; one delta per sequence that drew a token. A request aborted since is skipped.

        A drawn id outside the vocabulary ends that request alone with finish_reason "error".
        """
        ids = sampled.token_ids.tolist()
        deltas = []
        for entry in plan.entries:
            state = entry.sequence
            if state.is_finished:
                continue
            state.num_computed = entry.start + entry.count
            if entry.samples:
                deltas.append(self._append(state, ids[entry.sample_row], entry.sample_row, sampled))
            if entry.start < state.prompt_length and not state.is_finished:
                self.sharing.share(state)
        return deltas

    def flush_cache(self) -> int | None:
        """Empties the prefix cache and returns the pages it held; does nothing and returns None while requests run or
        wait."""
        return None if self.has_work else self.tables.flush()

    def fail(self, plan: Plan, message: str) -> list[TokenDelta]:
        """Ends the requests of a plan that could not be run, with finish_reason "error"; the others go on."""
        states = [entry.sequence for entry in plan.entries if not entry.sequence.is_finished]
        return [self._finish(state, "error", message) for state in states]

    def fail_all(self, message: str) -> list[TokenDelta]:
        """Ends every running and waiting request with finish_reason "error"."""
        return [self._finish(state, "error", message) for state in (*self._running.values(), *self._waiting.values())]

    def check_integrity(self) -> None:
        """Raises PageAccountingError unless pages, slots and requests add up (used by tests and when idle)."""
        self.tables.check_integrity()
        slots = sorted([*self._free_slots, *(state.slot for state in self._running.values())])
        if slots != list(range(self.limits.max_sequences)):
            raise PageAccountingError(f"slots are lost or held twice: {slots}")
        if not self._running:
            self.tables.check_idle()

    def _admit(self) -> None:
        """Moves requests from the queue's front into slots while they fit. Nobody overtakes: no request starves."""
        while self._waiting and len(self._running) < self.max_running:
            request_id, state = next(iter(self._waiting.items()))
            need = reserved_tokens(state.prompt_length, state.max_tokens)
            cached = self.tables.try_reserve(self._free_slots[0], need, state.prefix, state.max_cached_tokens)
            if cached is None:
                return
            state.slot = heapq.heappop(self._free_slots)
            self.sharing.start(state, cached)
            del self._waiting[request_id]
            self._running[request_id] = state

    def _decoding(self) -> list[SequenceState]:
        return [state for state in self._running.values() if not state.is_prefilling]

    @staticmethod
    def _decode_entry(state: SequenceState, row: int) -> PlanEntry:
        return PlanEntry(state, start=state.num_computed, count=1, first_row=row, num_rows=1, samples=True)

    def _prefill_entry(self, state: SequenceState, first_row: int, tokens_left: int) -> PlanEntry | None:
        """The next chunk of a prompt within the tokens and logits rows that are left; None if there is no room.

        The chunk that ends the prompt needs one row to draw from; with ``prompt_logprobs`` every token needs one.
        """
        rows_left = self.limits.max_logit_rows - first_row
        count = min(state.num_remaining, tokens_left)
        scores = state.prompt_logprobs is not None
        if scores:
            count = min(count, rows_left)
        last = count == state.num_remaining
        if count < 1 or (last and rows_left < 1):
            return None
        num_rows = count if scores else int(last)
        return PlanEntry(state, state.num_computed, count, first_row, num_rows, samples=last)

    def _append(self, state: SequenceState, token: int, row: int, sampled: SampleOutput) -> TokenDelta:
        """Adds a drawn token to its sequence and ends the sequence if it must."""
        if not 0 <= token < self.limits.vocab_size:
            return self._finish(state, "error", f"the sampler returned token {token}: the logits hold no finite value")
        first = state.num_output == 0
        state.tokens.append(token)
        reason = state.reason_to_stop(token)
        prompt = state.prompt_logprobs if first else None
        delta = TokenDelta(
            request_id=state.request.request_id,
            token_ids=(token,),
            logprobs=_logprobs(state.request.sampling.logprobs, token, row, sampled),
            prompt_logprobs=None if prompt is None else tuple(prompt),
            finish_reason=reason,
            stop_token_id=token if reason == "stop" else None,
            cached_tokens=state.cached_tokens,
        )
        if reason is not None:
            self._retire(state, reason)
        return delta

    def _finish(self, state: SequenceState, reason: FinishReason, error: str | None = None) -> TokenDelta:
        self._retire(state, reason)
        return TokenDelta(request_id=state.request.request_id, token_ids=(), finish_reason=reason, error=error)

    def _retire(self, state: SequenceState, reason: FinishReason) -> None:
        """Takes an ended request out of queue or slot; nothing holds its pages any more.

        What it has computed stays in the prefix tree, unless it failed: then only what was there before.
        """
        state.finish_reason = reason
        if state.slot < 0:
            del self._waiting[state.request.request_id]
            return
        del self._running[state.request.request_id]
        self.sharing.release(state, keep=reason != "error")
        heapq.heappush(self._free_slots, state.slot)
        state.slot = -1


def _logprobs(count: int | None, token: int, row: int, sampled: SampleOutput) -> tuple[TokenLogprob, ...]:
    """Log probabilities of one drawn token as its request asked for them."""
    if count is None:
        return ()
    ids, values = sampled.top_ids[row, :count].tolist(), sampled.top_logprobs[row, :count].tolist()
    return (TokenLogprob(token, float(sampled.logprobs[row]), tuple(zip(ids, values, strict=True))),)
