"""What one prompt was answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from neoserve.text.output import TextDelta
from neoserve.types.request import FinishReason, GenerateRequest, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The answer to one prompt.

    ``prompt`` is the text that was tokenised (for a chat: as the template rendered it), or None for token ids.
    ``token_ids`` include the EOS or stop token that ended generation, ``text`` does not. ``finish_reason`` is "stop",
    "length", or "error" with ``error`` saying why. ``stop_reason`` is the stop string or stop token id that matched.
    ``logprobs`` has one entry per token that has text, if asked for; ``prompt_logprobs`` one per prompt token, None
    for the first.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    cached_tokens: int = 0
    error: str | None = None


def request_output(prompt: str | None, request: GenerateRequest, deltas: Sequence[TextDelta]) -> RequestOutput:
    """All deltas of a request as one; ``prompt`` is the text it was tokenised from."""
    last = deltas[-1]
    return RequestOutput(
        request_id=request.request_id,
        prompt=prompt,
        prompt_token_ids=request.prompt_token_ids,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        finish_reason=last.finish_reason or "error",
        stop_reason=last.stop_reason,
        logprobs=tuple(logprob for delta in deltas for logprob in delta.logprobs),
        prompt_logprobs=next((d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None), None),
        cached_tokens=last.cached_tokens,
        error=last.error,
    )
