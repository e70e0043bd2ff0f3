"""The state of one server: its phase, the model and engine once loaded, and the generations in flight."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, Protocol

from neoserve.api.errors import DEAD_RETRY_SECONDS, unavailable
from neoserve.api.limits import RequestLimits
from neoserve.api.metrics import Metrics
from neoserve.api.model import ServedModel
from neoserve.engine.client import EngineClient

Phase = Literal["loading", "ready", "draining"]

# Tokenising and JSON work off the event loop; two, so that one huge prompt does not hold up the others.
_WORKERS = 2
_LOADING_RETRY_SECONDS = 2
# How long the error events of a cut drain may take to be written.
_FAREWELL_SECONDS = 1.0


class Cancellable(Protocol):
    """A generation in flight."""

    def fail(self, error: Exception) -> None: ...


@dataclass(frozen=True, slots=True)
class Service:
    """All that is there once the model is loaded."""

    model: ServedModel
    engine: EngineClient
    metrics: Metrics


class ServerState:
    """Phases: loading, ready, draining (finishes what runs, refuses what is new).

    ``show_cached_tokens`` allows GET /cache/tree to show token ids of prompts.
    """

    def __init__(self, limits: RequestLimits | None = None, show_cached_tokens: bool = False) -> None:
        self.show_cached_tokens = show_cached_tokens
        self.limits = limits or RequestLimits()
        self.phase: Phase = "loading"
        self.worker = ThreadPoolExecutor(_WORKERS, thread_name_prefix="neoserve-text")
        self._service: Service | None = None
        self._active: set[Cancellable] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def attach(self, model: ServedModel, engine: EngineClient) -> None:
        """The model is loaded; requests are taken from now on, unless the server is already stopping."""
        self._service = Service(model, engine, Metrics(model.name, engine.stats))
        if self.phase == "loading":
            self.phase = "ready"

    def loaded(self) -> Service:
        """The service in whatever phase; raises ApiError 503 while the model is loading."""
        if self._service is None:
            raise unavailable("the model is still loading", "model_loading", _LOADING_RETRY_SECONDS)
        return self._service

    def ready(self) -> Service:
        """The service; raises ApiError 503 unless new requests are taken."""
        if self.phase == "draining":
            raise unavailable("the server is shutting down", "shutting_down")
        service = self.loaded()
        dead_reason = self.engine_dead_reason()
        if dead_reason is not None:
            raise unavailable(f"the engine has stopped: {dead_reason}", "engine_dead", retry_after=DEAD_RETRY_SECONDS)
        return service

    def engine_dead_reason(self) -> str | None:
        """Why the engine serves no more; None while it does, and before it is loaded."""
        return None if self._service is None else self._service.engine.dead_reason

    def enter(self, generation: Cancellable) -> None:
        """``generation`` has begun; a drain waits for it."""
        self._active.add(generation)
        self._idle.clear()

    def leave(self, generation: Cancellable) -> None:
        """``generation`` has ended in whatever way."""
        self._active.discard(generation)
        if not self._active:
            self._idle.set()

    async def drain(self, seconds: float) -> bool:
        """Refuses new requests and waits for those in flight; after ``seconds`` the rest are failed with an error.

        Returns whether all of them ended by themselves.
        """
        self.phase = "draining"
        if await self._idle_within(seconds):
            return True
        error = unavailable("the server stopped before the answer's end", "aborted")
        for generation in list(self._active):
            generation.fail(error)
        # A client that does not read holds its stream up; the server closes the connection without waiting for it.
        await self._idle_within(_FAREWELL_SECONDS)
        return False

    async def _idle_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except asyncio.TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Ends the worker threads."""
        self.worker.shutdown(wait=False, cancel_futures=True)
