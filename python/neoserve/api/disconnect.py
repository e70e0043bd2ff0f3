"""Clients that go away: noticed at once, whether or not there is output to send to them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

Result = TypeVar("Result")


class ClientDisconnectedError(Exception):
    """The client closed its connection; nobody is left to read an answer."""


async def watch(receive: Receive) -> None:
    """Returns when the client disconnects. The request body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(work: Coroutine[Any, Any, Result], receive: Receive) -> Result:
    """The result of ``work``; if the client leaves first, ``work`` is cancelled, awaited, and
    ClientDisconnectedError raised."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(watch(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnectedError
    finally:
        await cancel(task, watcher)


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancels what still runs and waits until it has ended; results and errors are dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
