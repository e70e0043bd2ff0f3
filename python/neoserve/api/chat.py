"""POST /v1/chat/completions."""

from __future__ import annotations

import uuid

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from neoserve.api.answering import answer, in_worker, read_request
from neoserve.api.fields import CHAT_REFUSED
from neoserve.api.generation import Choice, Generation
from neoserve.api.params import chat_sampling
from neoserve.api.prompts import encode_chat
from neoserve.api.render import ChatRenderer, Envelope
from neoserve.api.schemas import ChatCompletionRequest
from neoserve.api.state import ServerState
from neoserve.api.usage import Usage


def routes(state: ServerState) -> list[Route]:
    """The route, for the requests of ``state``."""

    async def chat_completions(request: Request) -> Response:
        """One chat turn; ``n`` choices are ``n`` engine requests with seeds ``seed``, ``seed`` + 1, ..."""
        service = state.ready()
        model = service.model
        body = await read_request(request, state, ChatCompletionRequest, CHAT_REFUSED)
        sampling = chat_sampling(body, model.generation, state.limits)
        prompt = await in_worker(state, lambda: encode_chat(model, body, state.limits))
        envelope = Envelope(id=f"chatcmpl-{uuid.uuid4().hex}", model=body.model, fingerprint=model.fingerprint)
        choices = [
            Choice(
                prompt_token_ids=prompt,
                sampling=params,
                continues_text=body.continue_final_message,
                cache_salt=body.cache_salt,
                extra_key=body.extra_key,
            )
            for params in sampling
        ]
        generation = Generation(state, service, envelope.id, choices, "messages")
        renderer = ChatRenderer(envelope, len(choices), body.logprobs, model.token_bytes)
        return await answer(request, body, generation, renderer, Usage([prompt], body.n))

    return [Route("/v1/chat/completions", chat_completions, methods=["POST"])]
