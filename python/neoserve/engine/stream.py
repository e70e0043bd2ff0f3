"""The way of deltas from the engine thread to the coroutine that reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from neoserve.types.request import TokenDelta


class RequestStream:
    """Unread deltas of one request. The engine thread writes through ``deliver`` and ``refuse``; one coroutine of
    ``loop`` reads. All state is touched in the loop's thread only.
    """

    def __init__(self, request_id: str, loop: asyncio.AbstractEventLoop) -> None:
        self.request_id = request_id
        self.loop = loop
        self._unread: list[TokenDelta] = []
        self._refusal: Exception | None = None
        self._changed = asyncio.Event()
        self._ended = False

    @property
    def has_ended(self) -> bool:
        """Whether the engine has no part in this request any more: it finished, or was never taken."""
        return self._ended

    @property
    def is_exhausted(self) -> bool:
        """Whether everything was read."""
        return self._ended and not self._unread and self._refusal is None

    async def read(self) -> list[TokenDelta]:
        """Waits for deltas and takes all that are there; raises the refusal if the engine did not take the request."""
        await self._changed.wait()
        self._changed.clear()
        if self._refusal is not None:
            raise self._refusal
        unread, self._unread = self._unread, []
        return unread

    def refuse(self, error: Exception) -> None:
        """Tells the reader that the engine did not take the request. Called in the engine thread."""
        _call_in(self.loop, [(self, error)])

    def put(self, item: TokenDelta | Exception) -> None:
        """Adds an item. Called in the loop's thread."""
        if isinstance(item, Exception):
            self._refusal, self._ended = item, True
        else:
            self._unread.append(item)
            self._ended = item.finish_reason is not None
        self._changed.set()


def deliver(pairs: Iterable[tuple[RequestStream, TokenDelta]]) -> list[RequestStream]:
    """Hands deltas to their streams with one wake-up per event loop. Called in the engine thread.

    Returns the streams whose loop is closed.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[RequestStream, TokenDelta | Exception]]] = {}
    for stream, delta in pairs:
        by_loop.setdefault(stream.loop, []).append((stream, delta))
    lost: list[RequestStream] = []
    for loop, items in by_loop.items():
        if not _call_in(loop, items):
            lost += [stream for stream, _ in items]
    return lost


def _call_in(loop: asyncio.AbstractEventLoop, items: list[tuple[RequestStream, TokenDelta | Exception]]) -> bool:
    try:
        loop.call_soon_threadsafe(_put_all, items)
    except RuntimeError:  # the loop is closed
        return False
    return True


def _put_all(items: list[tuple[RequestStream, TokenDelta | Exception]]) -> None:
    for stream, item in items:
        stream.put(item)
