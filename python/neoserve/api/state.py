"""The state of one server: its phase, the model and engine once loaded, and the generations in flight."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, Protocol

from neoserve.api.errors import ApiError, unavailable
from neoserve.api.limits import RequestLimits
from neoserve.api.metrics import Metrics
from neoserve.api.model import ServedModel
from neoserve.types.request import EngineStats, GenerateRequest, TokenDelta

Phase = Literal["loading", "ready", "draining", "failed"]

# Tokenising and JSON work off the event loop; two, so that one huge prompt does not hold up the others.
_WORKERS = 2
_LOADING_RETRY_SECONDS = 2


class Engine(Protocol):
    """What the routes need of an engine client.

    ``generate`` raises InvalidRequestError, QueueFullError or EngineDeadError before its first delta; closing the
    generator before its last delta aborts the request.
    """

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]: ...

    def stats(self) -> EngineStats: ...


class Cancellable(Protocol):
    """A generation in flight."""

    def fail(self, error: Exception) -> None: ...


@dataclass(frozen=True, slots=True)
class Service:
    """All that is there once the model is loaded."""

    model: ServedModel
    engine: Engine
    metrics: Metrics


class ServerState:
    """Phases: loading, ready, draining (finishes what runs, refuses what is new), failed (the engine died)."""

    def __init__(self, limits: RequestLimits | None = None) -> None:
        self.limits = limits or RequestLimits()
        self.phase: Phase = "loading"
        self.failure = ""
        self.worker = ThreadPoolExecutor(_WORKERS, thread_name_prefix="neoserve-text")
        self._service: Service | None = None
        self._active: set[Cancellable] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def attach(self, model: ServedModel, engine: Engine) -> None:
        """The model is loaded; requests are taken from now on, unless the server is already stopping."""
        self._service = Service(model, engine, Metrics(model.name, engine.stats))
        if self.phase == "loading":
            self.phase = "ready"

    def engine_died(self, text: str) -> None:
        """Every further request, and /health, answer 503 with ``text``."""
        self.phase = "failed"
        self.failure = text

    def loaded(self) -> Service:
        """The service in whatever phase; raises ApiError 503 while the model is loading."""
        if self._service is None:
            raise unavailable("the model is still loading", "model_loading", _LOADING_RETRY_SECONDS)
        return self._service

    def ready(self) -> Service:
        """The service; raises ApiError 503 unless new requests are taken."""
        if self.phase == "draining":
            raise unavailable("the server is shutting down", "shutting_down")
        if self.phase == "failed":
            raise unavailable(f"the engine has stopped: {self.failure}", "engine_dead", retry_after=5)
        return self.loaded()

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
        if self.phase != "failed":
            self.phase = "draining"
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except asyncio.TimeoutError:
            error = ApiError(503, "the server stopped before the answer's end", kind="server_error", code="aborted")
            for generation in list(self._active):
                generation.fail(error)
            await self._idle.wait()
            return False
        return True

    def close(self) -> None:
        """Ends the worker threads."""
        self.worker.shutdown(wait=False, cancel_futures=True)
