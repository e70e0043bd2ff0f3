"""Errors as HTTP answers: always OpenAI's ``{"error": {message, type, param, code}}`` with the right status."""

from __future__ import annotations

import contextlib
import http
import logging
from collections.abc import Generator
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from neoserve.types.errors import EngineDeadError, InvalidRequestError, NeoServeError, QueueFullError

logger = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 1
# What watches the process has to start it again first.
DEAD_RETRY_SECONDS = 5


class ApiError(NeoServeError):
    """An error of the HTTP layer itself: ``status`` is the HTTP status, ``kind`` the error object's type."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers or {}


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """What a client is told about one exception."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: tuple[tuple[str, str], ...] = ()

    def body(self) -> dict[str, object]:
        """The JSON object, also sent as an event when a stream has begun."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The whole HTTP answer."""
        return JSONResponse(self.body(), status_code=self.status, headers=dict(self.headers))


def unavailable(message: str, code: str, retry_after: int = RETRY_AFTER_SECONDS) -> ApiError:
    """HTTP 503 that asks the client to come back after ``retry_after`` seconds."""
    return ApiError(503, message, kind="server_error", code=code, headers={"Retry-After": str(retry_after)})


# Text layer and engine know one kind of prompt; the routes have two names for it.
_PROMPT_FIELDS = (None, "prompt", "messages")


@contextlib.contextmanager
def about(field: str) -> Generator[None, None, None]:
    """Names ``field`` in errors from inside that are about the prompt."""
    try:
        yield
    except InvalidRequestError as error:
        if error.param in _PROMPT_FIELDS:
            error.param = field
        raise


def describe(error: BaseException) -> ErrorAnswer:
    """The answer for any exception; unforeseen ones are logged with their traceback and told as HTTP 500.

    Texts of NeoServeErrors are written for users. Texts of other exceptions may hold paths or internals, so
    the client gets none of them.
    """
    if isinstance(error, ApiError):
        return ErrorAnswer(
            error.status, str(error), error.kind, error.param, error.code, tuple(sorted(error.headers.items()))
        )
    if isinstance(error, InvalidRequestError):
        return ErrorAnswer(400, str(error), "invalid_request_error", error.param, error.code)
    if isinstance(error, QueueFullError):
        return describe(unavailable(str(error), "queue_full"))
    if isinstance(error, EngineDeadError):
        return describe(unavailable(str(error), "engine_dead", retry_after=DEAD_RETRY_SECONDS))
    if isinstance(error, NeoServeError):
        return ErrorAnswer(500, str(error), "server_error", code="internal_error")
    logger.error("unexpected error while serving a request", exc_info=error)
    text = f"internal error ({type(error).__name__}); the server's log has the details"
    return ErrorAnswer(500, text, "server_error", code="internal_error")


async def answer_error(_: Request, error: Exception) -> JSONResponse:
    """Exception handler for everything but routing: the error object of ``error``."""
    return describe(error).response()


async def answer_routing_error(request: Request, error: Exception) -> JSONResponse:
    """Exception handler for HTTPException, which routing raises for unknown routes and wrong methods."""
    assert isinstance(error, HTTPException)
    return _describe_http(request, error).response()


def _describe_http(request: Request, error: HTTPException) -> ErrorAnswer:
    path = request.url.path
    headers = tuple((error.headers or {}).items())
    if error.status_code == 404:
        text = f"there is no route {request.method} {path}; docs/http-api.md lists the routes"
        return ErrorAnswer(404, text, "invalid_request_error", code="unknown_route", headers=headers)
    if error.status_code == 405:
        allowed = dict(headers).get("Allow", "another method")
        text = f"{path} does not take {request.method}; it takes {allowed}"
        return ErrorAnswer(405, text, "invalid_request_error", code="method_not_allowed", headers=headers)
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    text = str(error.detail) or http.HTTPStatus(error.status_code).phrase
    return ErrorAnswer(error.status_code, text, kind, headers=headers)
