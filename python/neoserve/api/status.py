"""Routes about the server itself: models, health, version, metrics. They never show a prompt."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from neoserve import __version__
from neoserve.api.answering import check_model
from neoserve.api.errors import DEAD_RETRY_SECONDS
from neoserve.api.metrics import CONTENT_TYPE
from neoserve.api.model import ServedModel
from neoserve.api.state import ServerState


def routes(state: ServerState) -> list[Route]:
    """The routes, for the server of ``state``; all take GET and HEAD."""

    async def models(_: Request) -> Response:
        """Every name of the served model."""
        model = state.loaded().model
        return JSONResponse({"object": "list", "data": [_card(model, name) for name in model.names]})

    async def model_card(request: Request) -> Response:
        """One name; names may hold slashes."""
        model = state.loaded().model
        name = request.path_params["name"]
        check_model(name, model)
        return JSONResponse(_card(model, name))

    async def health(_: Request) -> Response:
        """Readiness: 200 while new requests are taken, else 503 with the reason."""
        state.ready()
        return JSONResponse({"status": "ok"})

    async def live(_: Request) -> Response:
        """Liveness: 200 while the process can serve or will, also while loading and draining; 503 needs a restart."""
        if state.engine_dead_reason() is not None:
            return JSONResponse({"status": "dead"}, status_code=503, headers={"Retry-After": str(DEAD_RETRY_SECONDS)})
        return JSONResponse({"status": state.phase})

    async def version(_: Request) -> Response:
        """The server's version."""
        return JSONResponse({"version": __version__})

    async def metrics(_: Request) -> Response:
        """Prometheus text; see metrics.py for the names."""
        return Response(state.loaded().metrics.render(), media_type=CONTENT_TYPE)

    return [
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model_card),
        Route("/health", health),
        Route("/health/live", live),
        Route("/version", version),
        Route("/metrics", metrics),
    ]


def _card(model: ServedModel, name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "neoserve",
        "root": model.name,
        "max_model_len": model.context_length,
        "details": dict(model.details),
    }
