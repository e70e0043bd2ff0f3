"""POST /v1/completions."""

from __future__ import annotations

import uuid

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from neoserve.api.answering import answer, in_worker, read_request
from neoserve.api.errors import about
from neoserve.api.fields import COMPLETION_REFUSED
from neoserve.api.generation import Choice, Generation
from neoserve.api.limits import RequestLimits
from neoserve.api.logprobs import CompletionLogprobs
from neoserve.api.model import ServedModel
from neoserve.api.params import completion_sampling
from neoserve.api.prompts import Prompt, encode_prompts, parse_prompts
from neoserve.api.render import CompletionRenderer, Echo, Envelope
from neoserve.api.schemas import CompletionRequest
from neoserve.api.state import ServerState
from neoserve.api.usage import Usage
from neoserve.types.errors import InvalidRequestError


def routes(state: ServerState) -> list[Route]:
    """The route, for the requests of ``state``."""

    async def completions(request: Request) -> Response:
        """Choices are numbered prompt by prompt: choice ``i`` belongs to prompt ``i // n``."""
        service = state.ready()
        model = service.model
        body = await read_request(request, state, CompletionRequest, COMPLETION_REFUSED)
        sampling = completion_sampling(body, model.generation, state.limits)
        prompts = await in_worker(state, lambda: _prompts(model, body, state.limits))
        scored = body.logprobs if body.echo else None
        choices = [
            Choice(
                prompt_token_ids=prompt.token_ids,
                sampling=params,
                prompt_logprobs=scored,
                continues_text=True,
                cache_salt=body.cache_salt,
                extra_key=body.extra_key,
            )
            for prompt in prompts
            for params in sampling
        ]
        echoes = [_echo(model, prompt) if body.echo else None for prompt in prompts for _ in sampling]
        envelope = Envelope(id=f"cmpl-{uuid.uuid4().hex}", model=body.model, fingerprint=model.fingerprint)
        generation = Generation(state, service, envelope.id, choices, "prompt")
        score_only = body.max_tokens == 0
        writers = [_writer(model, body, echo) for echo in echoes]
        renderer = CompletionRenderer(envelope, echoes, writers, score_only)
        usage = Usage([prompt.token_ids for prompt in prompts], body.n, score_only)
        return await answer(request, body, generation, renderer, usage)

    return [Route("/v1/completions", completions, methods=["POST"])]


def _prompts(model: ServedModel, body: CompletionRequest, limits: RequestLimits) -> list[Prompt]:
    texts = parse_prompts(body.prompt, limits)
    if len(texts) * body.n > limits.sequences:
        text = f"n is {body.n} with {len(texts)} prompts; at most {limits.sequences} choices in all are taken"
        raise InvalidRequestError(text, "n", "invalid_value")
    return encode_prompts(model, texts)


def _echo(model: ServedModel, prompt: Prompt) -> Echo:
    text = prompt.text
    if text is None:
        with about("prompt"):
            text = model.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
    return Echo(text, prompt.token_ids)


def _writer(model: ServedModel, body: CompletionRequest, echo: Echo | None) -> CompletionLogprobs | None:
    if body.logprobs is None:
        return None
    token_bytes = model.token_bytes
    offset = 0 if echo is None else echo.offset(token_bytes)
    return CompletionLogprobs(token_bytes, offset, model.tokenizer.special_ids if body.skip_special_tokens else ())
