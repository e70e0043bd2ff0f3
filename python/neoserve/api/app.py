"""The ASGI application: routes, error objects and request ids around one ServerState."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from neoserve.api import chat, completions, errors, status
from neoserve.api.disconnect import ClientDisconnectedError
from neoserve.api.middleware import RequestId
from neoserve.api.state import ServerState

_CLIENT_CLOSED_REQUEST = 499


def create_app(state: ServerState) -> FastAPI:
    """The application for ``state``; it answers 503 until ``state.attach`` was called."""
    app = FastAPI(title="NeoServe", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.add_middleware(RequestId)
    errors.install(app)
    app.add_exception_handler(ClientDisconnectedError, _nobody_listens)
    for routes in (chat, completions, status):
        routes.register(app, state)
    return app


async def _nobody_listens(_: Request, __: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)
