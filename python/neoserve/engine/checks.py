"""What is refused before a request comes near the model: a bad token id must never reach an index."""

from __future__ import annotations

from collections.abc import Iterable

from neoserve.types.errors import InvalidRequestError
from neoserve.types.request import GenerateRequest
from neoserve.types.sampling import MAX_TOP_LOGPROBS


def check_request(request: GenerateRequest, vocab_size: int) -> None:
    """Raises InvalidRequestError naming the field that cannot be served with this vocabulary."""
    sampling = request.sampling
    if not request.prompt_token_ids:
        raise InvalidRequestError("The prompt has no tokens; send at least one", "prompt")
    _check_ids("prompt", request.prompt_token_ids, vocab_size)
    _check_ids("logit_bias", sampling.logit_bias, vocab_size)
    _check_ids("stop_token_ids", sampling.stop_token_ids, vocab_size)
    _check_ids("eos_token_ids", request.eos_token_ids, vocab_size)
    if sampling.seed is None:
        raise InvalidRequestError("seed is None; the engine's client draws one before it submits a request", "seed")
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        raise InvalidRequestError(
            f"min_tokens is {sampling.min_tokens}; it must not exceed max_tokens ({sampling.max_tokens})", "min_tokens"
        )
    _check_prompt_logprobs(request.prompt_logprobs)


def _check_ids(param: str, ids: Iterable[int], vocab_size: int) -> None:
    listed = list(ids)
    if not set(map(type, listed)) <= {int}:
        wrong = next(token for token in listed if type(token) is not int)
        raise InvalidRequestError(f"{param} has {wrong!r}; token ids must be integers", param)
    if listed and not 0 <= min(listed) <= max(listed) < vocab_size:
        wrong = next(token for token in listed if not 0 <= token < vocab_size)
        raise InvalidRequestError(f"{param} has token id {wrong}; ids must be in [0, {vocab_size - 1}]", param)


def _check_prompt_logprobs(count: int | None) -> None:
    if count is None:
        return
    if type(count) is not int or not 0 <= count <= MAX_TOP_LOGPROBS:
        raise InvalidRequestError(
            f"prompt_logprobs is {count!r}; it must be an integer in [0, {MAX_TOP_LOGPROBS}]", "prompt_logprobs"
        )
