"""One plain ASGI layer around all routes: a request id for every answer.

It wraps ``send`` only. Starlette's BaseHTTPMiddleware would hide disconnects from the routes.
"""

from __future__ import annotations

import re
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = b"x-request-id"
_CLIENT_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


class RequestId:
    """Puts ``x-request-id`` on every response: the client's own if it is well-formed, else a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == HEADER), b"")
        chosen = given if _CLIENT_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}".encode()
        scope.setdefault("state", {})["request_id"] = chosen.decode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (HEADER, chosen)]
            await send(message)

        await self.app(scope, receive, send_with_id)
