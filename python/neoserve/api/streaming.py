"""Server-sent events: one write per batch, keep-alive comments in long silences, errors as events."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from neoserve.api.disconnect import cancel, watch
from neoserve.api.errors import describe
from neoserve.api.generation import Generation
from neoserve.api.render import Json, Renderer
from neoserve.api.usage import Usage

# A client or proxy that hears nothing for a minute may hang up; a long prefill can take longer than that.
KEEP_ALIVE_SECONDS = 15.0
_KEEP_ALIVE = b": keep-alive\n\n"
_DONE = b"data: [DONE]\n\n"

Events = AsyncGenerator[bytes, None]


def event(body: Json) -> bytes:
    """``body`` as one server-sent event."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode() + b"\n\n"


async def events(generation: Generation, renderer: Renderer, usage: Usage, include_usage: bool) -> Events:
    """The writes of a stream: each item is everything that one engine step brought.

    With ``include_usage`` the last event has ``choices: []`` and the usage, and the others ``usage: null``. Raises
    what the generation raises; the caller decides whether it is an HTTP status or an error event.
    """
    more: Json = {"usage": None} if include_usage else {}
    async with contextlib.aclosing(generation.batches(KEEP_ALIVE_SECONDS)) as batches:
        async for batch in batches:
            parts = [] if batch else [_KEEP_ALIVE]
            for index, delta in batch:
                usage.add(index, len(delta.token_ids), delta.cached_tokens)
                parts += [event(renderer.chunk([choice], **more)) for choice in renderer.chunks(index, delta)]
            if generation.finished:
                parts += [event(renderer.chunk([], usage=usage.body()))] if include_usage else []
                parts.append(_DONE)
            if parts:
                yield b"".join(parts)


class EventStream(Response):
    """A response of server-sent events that notices a leaving client also while there is nothing to send.

    ``first`` has been taken from ``rest`` already, so that whatever fails before it has its own HTTP status. A later
    failure ends the stream with an error event and without ``[DONE]``.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: Events) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = asyncio.ensure_future(self._send_all(send))
        watcher = asyncio.ensure_future(watch(receive))
        try:
            await asyncio.wait((sender, watcher), return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                sender.result()
        finally:
            await cancel(sender, watcher)
            await self._rest.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        try:
            async for chunk in self._rest:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except Exception as error:
            await send({"type": "http.response.body", "body": event(describe(error).body()), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
