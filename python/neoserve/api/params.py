"""Request fields to SamplingParams: names, defaults and bounds of the OpenAI API on our sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from neoserve.api.body import shown
from neoserve.api.limits import RequestLimits
from neoserve.api.schemas import ChatCompletionRequest, CompletionRequest, SamplingFields
from neoserve.types.errors import InvalidRequestError
from neoserve.types.model import GenerationDefaults
from neoserve.types.sampling import SamplingParams

COMPLETION_MAX_TOKENS = 16
_SEED_MASK = 2**64 - 1

Number = TypeVar("Number", int, float)


def chat_sampling(
    request: ChatCompletionRequest, defaults: GenerationDefaults, limits: RequestLimits
) -> list[SamplingParams]:
    """One SamplingParams per choice of a chat request.

    ``max_completion_tokens`` wins over the older ``max_tokens``; without either, a choice may fill the context.
    """
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequestError("top_logprobs is given without logprobs; set logprobs to true", "top_logprobs")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    _check_logprobs("top_logprobs", logprobs, limits)
    name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    if max_tokens is not None and max_tokens < 1:
        raise InvalidRequestError(f"{name} is {max_tokens}; it must be at least 1", name, "invalid_value")
    return _choices(request, defaults, limits, max_tokens, logprobs)


def completion_sampling(
    request: CompletionRequest, defaults: GenerationDefaults, limits: RequestLimits
) -> list[SamplingParams]:
    """One SamplingParams per choice of each prompt of a completion request; ``max_tokens`` defaults to 16.

    ``max_tokens`` 0 is legal with ``echo`` (scoring of the prompt): the engine then draws one token, which the
    route drops.
    """
    max_tokens = COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    if max_tokens < (0 if request.echo else 1):
        text = f"max_tokens is {max_tokens}; it must be at least 1, or 0 together with echo"
        raise InvalidRequestError(text, "max_tokens", "invalid_value")
    _check_logprobs("logprobs", request.logprobs, limits)
    return _choices(request, defaults, limits, max(max_tokens, 1), request.logprobs)


def _choices(
    request: SamplingFields,
    defaults: GenerationDefaults,
    limits: RequestLimits,
    max_tokens: int | None,
    logprobs: int | None,
) -> list[SamplingParams]:
    _check_count("n", request.n, limits.choices)
    _check_count("stop_token_ids", len(request.stop_token_ids), limits.stop_token_ids)
    _check_stream_options(request)
    stop = parse_stop(request.stop, limits)
    bias = parse_logit_bias(request.logit_bias or {}, limits)

    def choice(index: int) -> SamplingParams:
        return SamplingParams(
            temperature=_first(request.temperature, defaults.temperature, 1.0),
            top_k=_first(request.top_k, defaults.top_k, 0),
            top_p=_first(request.top_p, defaults.top_p, 1.0),
            min_p=_first(request.min_p, defaults.min_p, 0.0),
            repetition_penalty=_first(request.repetition_penalty, defaults.repetition_penalty, 1.0),
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            seed=request.seed if request.seed is None or index == 0 else (request.seed + index) & _SEED_MASK,
            max_tokens=max_tokens,
            min_tokens=request.min_tokens,
            stop=stop,
            stop_token_ids=tuple(request.stop_token_ids),
            ignore_eos=request.ignore_eos,
            logprobs=logprobs,
            logit_bias=bias,
            skip_special_tokens=request.skip_special_tokens,
        )

    return [choice(index) for index in range(request.n)]


def parse_stop(raw: object, limits: RequestLimits) -> tuple[str, ...]:
    """``stop``: a string or a list of strings, bounded in number and length."""
    if raw is None:
        return ()
    stops = [raw] if isinstance(raw, str) else raw
    if not isinstance(stops, list) or not all(isinstance(text, str) for text in stops):
        raise InvalidRequestError(f"stop is {shown(raw)}; it must be a string or a list of strings", "stop")
    if len(stops) > limits.stop_strings:
        raise InvalidRequestError(f"stop has {len(stops)} strings; at most {limits.stop_strings} are taken", "stop")
    texts: Sequence[str] = [text for text in stops if isinstance(text, str)]
    for text in texts:
        if len(text) > limits.stop_characters:
            words = f"stop has a string of {len(text)} characters; at most {limits.stop_characters} are taken"
            raise InvalidRequestError(words, "stop")
    return tuple(texts)


def parse_logit_bias(raw: dict[str, float], limits: RequestLimits) -> dict[int, float]:
    """``logit_bias``: JSON keys are token ids written as decimal strings."""
    _check_count("logit_bias", len(raw), limits.logit_bias_entries)
    bias: dict[int, float] = {}
    for key, value in raw.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            text = f"logit_bias has the key {shown(key)}; keys must be token ids, decimal and not negative"
            raise InvalidRequestError(text, "logit_bias", "invalid_value")
        bias[int(key)] = value
    return bias


def _first(given: Number | None, recommended: Number | None, fallback: Number) -> Number:
    if given is not None:
        return given
    return fallback if recommended is None else recommended


def _check_logprobs(name: str, count: int | None, limits: RequestLimits) -> None:
    if count is not None and not 0 <= count <= limits.top_logprobs:
        text = f"{name} is {count}; it must be between 0 and {limits.top_logprobs}"
        raise InvalidRequestError(text, name, "invalid_value")


def _check_count(name: str, count: int, limit: int) -> None:
    if count > limit:
        what = f"{name} is {count}" if name == "n" else f"{name} has {count} entries"
        raise InvalidRequestError(f"{what}; at most {limit} are taken", name, "invalid_value")


def _check_stream_options(request: SamplingFields) -> None:
    if request.stream_options is None:
        return
    if not request.stream:
        raise InvalidRequestError("stream_options is given without stream; set stream to true", "stream_options")
    if request.stream_options.include_obfuscation:
        name = "stream_options.include_obfuscation"
        raise InvalidRequestError(f"{name} is not supported; use false", name, "unsupported_parameter")
