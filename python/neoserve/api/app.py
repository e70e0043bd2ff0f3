"""The ASGI application: routes, error objects and request ids around one ServerState.

Starlette alone, without FastAPI on top: bodies are parsed by our own rules (body.py), so FastAPI would add nothing but
half a second to every start.
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from neoserve.api import cache, chat, completions, status
from neoserve.api.disconnect import ClientDisconnectedError
from neoserve.api.errors import answer_error, answer_routing_error
from neoserve.api.middleware import RequestId
from neoserve.api.state import ServerState
from neoserve.types.errors import NeoServeError

_CLIENT_CLOSED_REQUEST = 499


def create_app(state: ServerState) -> ASGIApp:
    """The application for ``state``; it answers 503 until ``state.attach`` was called."""
    app = Starlette(
        routes=[*chat.routes(state), *completions.routes(state), *status.routes(state), *cache.routes(state)],
        exception_handlers={
            # The client left while its answer was being made, or before its body had arrived.
            ClientDisconnectedError: _nobody_listens,
            ClientDisconnect: _nobody_listens,
            NeoServeError: answer_error,
            HTTPException: answer_routing_error,
            Exception: answer_error,
        },
    )
    app.router.redirect_slashes = False
    # Outermost, so that the answers to unforeseen faults carry an id, too.
    return RequestId(app)


async def _nobody_listens(_: Request, __: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)
