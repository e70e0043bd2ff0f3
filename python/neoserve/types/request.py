"""Messages between the API layer, the engine client and the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from neoserve.types.sampling import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A tokenised request as the engine takes it.

    ``sampling.seed`` is always set here (the client draws it); ``arrival_time`` is seconds of a monotonic clock
    (the scheduler has no clock of its own). ``eos_token_ids`` end generation unless ``sampling.ignore_eos``.
    ``prompt_logprobs``: None, or the number of alternatives to return for every prompt position after the first.
    ``cache_salt`` and ``extra_key`` set the request's prefix cache apart: pages are shared only among requests that
    agree in both.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    arrival_time: float = 0.0
    cache_salt: str | None = None
    extra_key: str | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of one emitted token and its best alternatives as (id, logprob), best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDelta:
    """New tokens of one request after a step. The last one carries ``finish_reason``.

    ``stop_token_id`` is the EOS or stop token that ended generation (it is also in ``token_ids``).
    ``cached_tokens``, equal in all deltas with tokens, counts the prompt tokens whose KV was found in the prefix cache
    instead of being computed for this request. ``error`` explains finish_reason "error".
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    cached_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot for metrics.

    ``used_pages`` hold KV of running requests, ``evictable_pages`` only what the prefix cache keeps; what is left of
    ``total_pages`` is free. ``prompt_tokens`` were computed, ``cached_tokens`` found in the cache instead.
    ``evicted_pages`` left the cache to make room.
    """

    running: int = 0
    waiting: int = 0
    used_pages: int = 0
    evictable_pages: int = 0
    total_pages: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    evicted_pages: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    row_fallbacks: int = 0
    threads: int = 0
    step_seconds: dict[str, float] = field(default_factory=dict)
