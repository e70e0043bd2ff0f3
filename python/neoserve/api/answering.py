"""What both generating routes do: read the request, run the generation, answer at once or as a stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from neoserve.api.body import parse_body, read_body, shown
from neoserve.api.disconnect import unless_disconnected
from neoserve.api.errors import ApiError
from neoserve.api.fields import Refusal
from neoserve.api.generation import Generation
from neoserve.api.model import ServedModel
from neoserve.api.render import Json, Renderer
from neoserve.api.schemas import SamplingFields
from neoserve.api.state import ServerState
from neoserve.api.streaming import Events, EventStream, events
from neoserve.api.usage import Usage

Schema = TypeVar("Schema", bound=SamplingFields)
Result = TypeVar("Result")


async def read_request(
    request: Request, state: ServerState, schema: type[Schema], refused: Mapping[str, Refusal]
) -> Schema:
    """The checked body of a request for the served model; see parse_body and check_model for what it raises."""
    raw = await read_body(request, state.limits.body_bytes)
    body = await parse_body(raw, schema, refused, state.worker)
    check_model(body.model, state.ready().model)
    return body


def check_model(name: str, model: ServedModel) -> None:
    """Raises ApiError 404 unless the served model answers to ``name``."""
    if name not in model.names:
        served = ", ".join(model.names)
        text = f"the model {shown(name)} is not served here; this server has {served}"
        raise ApiError(404, text, param="model", code="model_not_found")


async def in_worker(state: ServerState, work: Callable[[], Result]) -> Result:
    """``work()`` on a worker thread."""
    return await asyncio.get_running_loop().run_in_executor(state.worker, work)


async def answer(
    request: Request, body: SamplingFields, generation: Generation, renderer: Renderer, usage: Usage
) -> Response:
    """The answer of ``generation``; a client that leaves before the end aborts it, streaming or not.

    The headers of a stream are sent with its first write, so that whatever fails before the first token has an HTTP
    status of its own.
    """
    if not body.stream:
        whole = await unless_disconnected(_collect(generation, renderer, usage), request.receive)
        return JSONResponse(whole)
    include_usage = body.stream_options is not None and body.stream_options.include_usage
    rest = events(generation, renderer, usage, include_usage)
    try:
        first = await unless_disconnected(_first(rest), request.receive)
    except BaseException:
        await rest.aclose()
        raise
    return EventStream(first, rest)


async def _first(stream: Events) -> bytes:
    return await stream.__anext__()


async def _collect(generation: Generation, renderer: Renderer, usage: Usage) -> Json:
    async with contextlib.aclosing(generation.batches()) as batches:
        async for batch in batches:
            for index, delta in batch:
                usage.add(index, len(delta.token_ids), delta.cached_tokens)
                renderer.add(index, delta)
    return renderer.whole(usage)
