"""Routes about the prefix cache: emptying it, and a listing for people."""

from __future__ import annotations

from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from neoserve.api.body import shown
from neoserve.api.errors import ApiError
from neoserve.api.state import ServerState
from neoserve.types.cache import CachedRun
from neoserve.types.errors import InvalidRequestError

_DEFAULT_RUNS = 200
_MOST_RUNS = 5000
_MOST_IDS = 64


def routes(state: ServerState) -> list[Route]:
    """The routes, for the server of ``state``."""

    async def flush_cache(_: Request) -> Response:
        """Empties the cache; 400 while requests run or wait, as in SGLang: then nothing is done."""
        flushed = await state.ready().engine.flush_cache()
        if flushed is None:
            text = "requests are running or waiting, so the cache was not flushed; repeat when the server is idle"
            raise ApiError(400, text, code="requests_running")
        return JSONResponse({"flushed_pages": flushed})

    async def cache_tree(request: Request) -> Response:
        """What is cached. ``limit`` bounds the runs listed; ``token_ids`` asks for the first ids of each, where the
        server was started with leave to show them: they are what other users have written."""
        limit = _count(request, "limit", _DEFAULT_RUNS, _MOST_RUNS)
        ids = _count(request, "token_ids", 0, _MOST_IDS)
        if ids and not state.show_cached_tokens:
            text = "token_ids would show the prompts of others; start the server with --show-cached-tokens to allow it"
            raise ApiError(403, text, param="token_ids", code="not_allowed")
        listing = await state.ready().engine.list_cache(limit, ids)
        runs = [_run(number, run, ids > 0) for number, run in enumerate(listing.runs)]
        return JSONResponse({**asdict(listing), "runs": runs})

    return [
        Route("/flush_cache", flush_cache, methods=["POST"]),
        Route("/cache/tree", cache_tree),
    ]


def _run(number: int, run: CachedRun, with_ids: bool) -> dict[str, object]:
    fields = {"run": number, **asdict(run)}
    if not with_ids:
        del fields["token_ids"]
    return fields


def _count(request: Request, name: str, default: int, most: int) -> int:
    raw = request.query_params.get(name)
    if raw is None:
        return default
    if not (raw.isascii() and raw.isdecimal() and len(raw) <= 9 and int(raw) <= most):
        text = f"{name} is {shown(raw)}; it must be an integer between 0 and {most}"
        raise InvalidRequestError(text, name, "invalid_value")
    return int(raw)
