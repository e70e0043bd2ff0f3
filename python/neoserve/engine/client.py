"""How the API layer talks to an engine: the interface, and the client that runs the engine in a thread beside it."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol

from neoserve.engine.core import EngineCore
from neoserve.engine.stream import RequestStream, deliver
from neoserve.types.cache import CacheListing
from neoserve.types.errors import EngineDeadError, InvalidRequestError, QueueFullError
from neoserve.types.request import EngineStats, FinishReason, GenerateRequest, TokenDelta

logger = logging.getLogger(__name__)

_SEED_BITS = 63
_DRAIN_POLL_SECONDS = 0.02


class EngineClient(Protocol):
    """What front ends use of an engine, whether it runs in this process or in another one (design D8).

    Only messages of ``neoserve.types`` cross this interface.
    """

    @property
    def dead_reason(self) -> str | None:
        """Why the engine serves no more; None while it does."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        """The deltas of one request; the last has a ``finish_reason``. Closing the generator early, or cancelling its
        consumer, aborts the request within a step.

        Raises at the first item: InvalidRequestError, ContextLengthError, QueueFullError, EngineDeadError.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """Ends a request within a step; its stream ends with finish_reason "abort". Unknown ids are ignored."""
        ...

    def stats(self) -> EngineStats:
        """A snapshot for metrics."""
        ...

    async def flush_cache(self) -> int | None:
        """Empties the prefix cache and returns the KV pages it held; None while requests run or wait: then nothing is
        done. Raises EngineDeadError."""
        ...

    async def list_cache(self, max_runs: int, ids_per_run: int = 0) -> CacheListing:
        """What the prefix cache holds: at most ``max_runs`` nodes, each with its first ``ids_per_run`` token ids.

        Raises EngineDeadError.
        """
        ...

    async def start(self) -> None:
        """Makes the engine ready; further calls do nothing."""
        ...

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """Refuses new requests, lets those in flight go on for at most ``drain_seconds``, then aborts the rest and
        frees the engine. Further calls do nothing."""
        ...


@dataclass(frozen=True, slots=True)
class _Add:
    request: GenerateRequest
    stream: RequestStream


@dataclass(frozen=True, slots=True)
class _Abort:
    """``stream`` None: whatever has the id. Else only if the id still belongs to that stream."""

    request_id: str
    stream: RequestStream | None = None


@dataclass(frozen=True, slots=True)
class _Ask:
    """``work`` on the core in the engine thread; ``answer`` gets what it returns or raises."""

    work: Callable[[EngineCore], object]
    answer: Future[Any]


_Command = _Add | _Abort | _Ask


class AsyncEngine:
    """EngineClient over an EngineCore that runs in one background thread of this process.

    The thread alone touches the core. Commands reach it through a queue between steps; deltas leave it with one
    wake-up of the event loop per step. A stream buffers what its consumer has not read, at most the request's tokens,
    so a slow consumer delays nobody. With nothing to do the thread sleeps on a condition.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._changed = threading.Condition()
        self._commands: list[_Command] = []
        self._num_pending = 0
        self._streams: dict[str, RequestStream] = {}
        self._open: set[RequestStream] = set()
        self._thread: threading.Thread | None = None
        self._refusing: str | None = None
        self._stopping = False

    @property
    def core(self) -> EngineCore:
        """The engine; other threads may use its ``check``, ``stats``, ``limits`` and ``context_length`` only."""
        return self._core

    @property
    def dead_reason(self) -> str | None:
        """See EngineClient."""
        return self._core.dead_reason

    def stats(self) -> EngineStats:
        """See EngineClient. Requests whose admission is still queued count as waiting."""
        stats = self._core.stats()
        pending = self._num_pending
        return replace(stats, waiting=stats.waiting + pending) if pending else stats

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        """See EngineClient. A request without a seed gets a fresh one."""
        if request.sampling.seed is None:
            request = replace(request, sampling=replace(request.sampling, seed=secrets.randbits(_SEED_BITS)))
        self._check_accepting()
        # Faults of the request itself are told at once, not after the step that happens to be running.
        self._core.check(request)
        stream = RequestStream(request.request_id, asyncio.get_running_loop())
        self._send(_Add(request, stream))
        self._open.add(stream)
        try:
            while not stream.is_exhausted:
                for delta in await stream.read():
                    yield delta
        finally:
            self._open.discard(stream)
            if not stream.has_ended:
                self._send(_Abort(request.request_id, stream))

    async def abort(self, request_id: str) -> None:
        """See EngineClient."""
        self._send(_Abort(request_id))

    async def flush_cache(self) -> int | None:
        """See EngineClient."""
        flushed: int | None = await self._ask(lambda core: core.flush_cache())
        return flushed

    async def list_cache(self, max_runs: int, ids_per_run: int = 0) -> CacheListing:
        """See EngineClient."""
        listing: CacheListing = await self._ask(lambda core: core.list_cache(max_runs, ids_per_run))
        return listing

    async def start(self) -> None:
        """See EngineClient."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="neoserve-engine", daemon=True)
            self._thread.start()

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """See EngineClient."""
        self._refusing = "the engine is shutting down"
        deadline = asyncio.get_running_loop().time() + drain_seconds
        while self._open and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(min(_DRAIN_POLL_SECONDS, drain_seconds))
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        elif self._core.dead_reason is None:
            self._core.close()

    def _check_accepting(self) -> None:
        if self._refusing is not None:
            raise EngineDeadError(self._refusing)
        if self._thread is None:
            raise EngineDeadError("the engine is not started")

    async def _ask(self, work: Callable[[EngineCore], object]) -> Any:
        self._check_accepting()
        answer: Future[Any] = Future()
        self._send(_Ask(work, answer))
        return await asyncio.wrap_future(answer)

    def _send(self, command: _Command) -> None:
        with self._changed:
            if self._stopping:
                if not isinstance(command, _Abort):
                    raise EngineDeadError(self._refusing or "the engine is stopped")
                return
            if isinstance(command, _Add):
                self._check_room()
                self._num_pending += 1
            self._commands.append(command)
            self._changed.notify()

    def _check_room(self) -> None:
        """Bounds what piles up during one long step: more than this the engine would refuse after it anyway."""
        options = self._core.options
        room = options.max_queued_requests + options.max_running_requests
        if self._num_pending >= room:
            raise QueueFullError(f"{self._num_pending} requests arrived during one step; retry later")

    # What follows runs in the engine thread.

    def _run(self) -> None:
        try:
            while (commands := self._next_commands()) is not None:
                for command in commands:
                    self._obey(command)
                if self._core.has_work:
                    self._dispatch(self._core.step())
        except Exception as error:  # a fault of the engine itself: no request may wait for ever
            logger.exception("the engine thread failed")
            self._core.dead_reason = f"internal fault of the engine: {type(error).__name__}: {error}"
        self._shut_down()

    def _next_commands(self) -> list[_Command] | None:
        """The commands given since the last call; sleeps while there are none and no work; None at the end."""
        with self._changed:
            while not (self._commands or self._core.has_work or self._stopping):
                self._changed.wait()
            if self._stopping:
                return None
            commands, self._commands = self._commands, []
            self._num_pending = 0
            return commands

    def _obey(self, command: _Command) -> None:
        if isinstance(command, _Add):
            self._admit(command)
            return
        if isinstance(command, _Ask):
            self._answer(command)
            return
        if command.stream is not None and self._streams.get(command.request_id) is not command.stream:
            return
        delta = self._core.abort(command.request_id)
        if delta is not None:
            self._dispatch([delta])

    def _answer(self, command: _Ask) -> None:
        if not command.answer.set_running_or_notify_cancel():
            return
        try:
            command.answer.set_result(command.work(self._core))
        except Exception as error:  # the asker is told; the engine goes on
            command.answer.set_exception(error)

    def _admit(self, command: _Add) -> None:
        request_id = command.request.request_id
        try:
            if request_id in self._streams:
                raise InvalidRequestError(f"request_id {request_id!r} is in use; choose another", "request_id")
            self._core.add(command.request)
        except Exception as error:  # refusals go to the caller
            command.stream.refuse(error)
            return
        self._streams[request_id] = command.stream

    def _dispatch(self, deltas: list[TokenDelta]) -> None:
        pairs = []
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            if stream is None:
                continue
            pairs.append((stream, delta))
            if delta.finish_reason is not None:
                del self._streams[delta.request_id]
        for stream in deliver(pairs):
            # Its event loop is closed: nobody will ever read this stream.
            if self._streams.pop(stream.request_id, None) is not None:
                self._core.abort(stream.request_id)

    def _shut_down(self) -> None:
        """Ends every request that is left, and the core in the thread that used it."""
        with self._changed:
            self._stopping = True
            left, self._commands = self._commands, []
            self._num_pending = 0
        died = self._core.dead_reason
        refusal = EngineDeadError(died or self._refusing or "the engine is stopped")
        for command in left:
            if isinstance(command, _Add):
                command.stream.refuse(refusal)
            elif isinstance(command, _Ask) and command.answer.set_running_or_notify_cancel():
                command.answer.set_exception(refusal)
        reason: FinishReason = "abort" if died is None else "error"
        self._dispatch(
            [
                TokenDelta(request_id=request_id, token_ids=(), finish_reason=reason, error=died)
                for request_id in self._streams
            ]
        )
        self._core.close()
