"""``neoserve serve``: binds the port, answers 503 while the model loads, serves, and drains on SIGTERM or SIGINT.

The port is bound before the model is loaded: a port in use is told at once, and orchestrators see a process that is
alive but not ready. Exit codes: 0 after a stop that was asked for, 1 when the model or the port could not be had,
128 + signal when a second signal cut the drain short.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from neoserve.api.app import create_app
from neoserve.api.limits import RequestLimits
from neoserve.api.model import ServedModel
from neoserve.api.state import ServerState
from neoserve.engine.client import EngineClient
from neoserve.types.errors import ConfigurationError, NeoServeError

logger = logging.getLogger(__name__)

LOG_LEVELS = ("debug", "info", "warning", "error")
_BACKLOG = 2048
_KEEP_ALIVE_SECONDS = 75
# What answers are still being written when the drain ends gets this long to reach the client.
_FLUSH_SECONDS = 1.0
# A step that is still computed when the server is to end cannot be interrupted; it is waited for so long.
_ENGINE_STOP_SECONDS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Where and how to listen. ``drain_seconds`` bounds how long running requests may go on after a stop signal.
    ``show_cached_tokens`` allows GET /cache/tree to show the token ids of prompts to whoever asks.

    Raises ConfigurationError naming the option.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    log_level: str = "warning"
    drain_seconds: float = 30.0
    show_cached_tokens: bool = False
    limits: RequestLimits = field(default_factory=RequestLimits)

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigurationError(f"port is {self.port}; it must be between 0 (any free port) and 65535")
        if self.log_level not in LOG_LEVELS:
            raise ConfigurationError(f"log_level is {self.log_level!r}; it must be one of {', '.join(LOG_LEVELS)}")
        if self.drain_seconds < 0:
            raise ConfigurationError(f"drain_seconds is {self.drain_seconds}; it must not be negative")


@dataclass(frozen=True, slots=True)
class Loaded:
    """What loading a model gives the server; ``summary`` is the line that says what was chosen and why."""

    model: ServedModel
    engine: EngineClient
    summary: str


def configure_logging(level: str) -> None:
    """Log lines with time and level on standard error, from ``level`` on."""
    logging.basicConfig(
        stream=sys.stderr,
        level=getattr(logging, level.upper()),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )


def serve(load: Callable[[], Loaded], options: ServerOptions) -> int:
    """Serves what ``load`` loads until a stop signal; returns the exit code. Runs in the main thread.

    Raises what ``load`` raises, and ConfigurationError if the address cannot be had.
    """
    listener = bind(options.host, options.port)
    try:
        return asyncio.run(_Server(load, options, listener).run())
    finally:
        listener.close()


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; raises ConfigurationError that says what to do."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigurationError(f"cannot listen on host {host}: {error.strerror or error}; see --host") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        text = f"cannot listen on {host} port {port}: {error.strerror or error}; choose another with --port"
        raise ConfigurationError(text) from None
    listener.setblocking(False)
    return listener


class _QuietServer(uvicorn.Server):
    """Uvicorn without its signal handling: it would end the process by the signal, not with exit code 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class _Server:
    def __init__(self, load: Callable[[], Loaded], options: ServerOptions, listener: socket.socket) -> None:
        self._load = load
        self._options = options
        self._listener = listener
        self._state = ServerState(options.limits, options.show_cached_tokens)
        self._stop = asyncio.Event()
        config = uvicorn.Config(
            create_app(self._state),
            log_config=None,
            log_level=options.log_level,
            access_log=options.log_level in ("debug", "info"),
            lifespan="off",
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=1,
        )
        self._http = _QuietServer(config)

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        serving = asyncio.ensure_future(self._http.serve(sockets=[self._listener]))
        loading = self._start_loading(loop)
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait((serving, loading, stopping), return_when=asyncio.FIRST_COMPLETED)
            if stopping.done() and not loading.done():
                _exit_now(0)  # A load cannot be interrupted, and nothing is lost with it.
            if loading.done():
                await self._serve(loading.result(), (serving, stopping))
            if serving.done():
                serving.result()  # The HTTP server has ended by itself: tell why.
                raise NeoServeError("the HTTP server has stopped without being asked to")
        finally:
            self._http.should_exit = True
            await asyncio.gather(serving, return_exceptions=True)
            stopping.cancel()
            self._state.close()
        return 0

    def _start_loading(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[Loaded]:
        future: asyncio.Future[Loaded] = loop.create_future()

        def settle(result: Loaded | None, error: BaseException | None) -> None:
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            elif result is not None:
                future.set_result(result)

        def work() -> None:
            try:
                result, error = self._load(), None
            except BaseException as fault:
                result, error = None, fault
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server has stopped meanwhile
                loop.call_soon_threadsafe(settle, result, error)

        threading.Thread(target=work, name="neoserve-load", daemon=True).start()
        return future

    async def _serve(self, loaded: Loaded, until: Sequence[asyncio.Future[Any]]) -> None:
        await loaded.engine.start()
        self._state.attach(loaded.model, loaded.engine)
        self._announce(loaded)
        try:
            await asyncio.wait(until, return_when=asyncio.FIRST_COMPLETED)
            print("neoserve: stopping; requests in flight go on", file=sys.stderr, flush=True)
            if not await self._state.drain(self._options.drain_seconds):
                print("neoserve: the drain time is over; the rest was cut off", file=sys.stderr, flush=True)
                await asyncio.sleep(_FLUSH_SECONDS)
        finally:
            await self._stop_engine(loaded.engine)

    async def _stop_engine(self, engine: EngineClient) -> None:
        stopping = asyncio.ensure_future(engine.stop())
        done, _ = await asyncio.wait((stopping,), timeout=_ENGINE_STOP_SECONDS)
        if not done:
            print("neoserve: the engine is still in a step; ending without it", file=sys.stderr, flush=True)
            _exit_now(0 if self._stop.is_set() else 1)
        stopping.result()

    def _announce(self, loaded: Loaded) -> None:
        host, port = self._listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{port}"
        request: dict[str, object] = {"messages": [{"role": "user", "content": "Hello"}]}
        path = "/v1/chat/completions"
        if loaded.model.chat_template is None:
            request, path = {"prompt": "Once upon a time"}, "/v1/completions"
        body = json.dumps({"model": loaded.model.name, **request})
        print(f"neoserve: {loaded.summary}")
        print(f"neoserve: ready on {url}; try")
        command = f"curl {url}{path} -H 'Content-Type: application/json' -d {shlex.quote(body)}"
        print(command, flush=True)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stop.is_set():
            _exit_now(128 + number)
        self._state.phase = "draining"
        self._stop.set()


def _exit_now(code: int) -> None:
    """Ends the process without waiting for its threads: they may be in native code for seconds."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
