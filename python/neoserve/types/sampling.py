"""Sampling parameters of one request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from neoserve.types.errors import InvalidRequestError

MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn and when generation ends. Names and defaults follow OpenAI and vLLM.

    ``temperature`` 0 means greedy. ``top_k`` 0 or -1 means off. ``seed`` None draws a fresh one per
    request; an equal seed gives equal tokens whatever else is in the batch. ``stop`` strings are
    matched on text and are not part of the output; ``stop_token_ids`` end generation like EOS.
    ``max_tokens`` None means up to the context length. ``logprobs`` None means off, else the number of
    alternatives (0 to 20) returned beside the chosen token's log probability.

    Raises InvalidRequestError naming the field.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 100.0, low_open=True)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_int("top_k", self.top_k, -1, 2**31 - 1)
        _check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**64 - 1)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidRequestError(f"stop has {text!r}; each must be a non-empty string", "stop")
        for token, bias in self.logit_bias.items():
            _check_int("logit_bias", token, 0, 2**31 - 1)
            _check_range("logit_bias", bias, -100.0, 100.0)


def _check_range(name: str, value: float, low: float, high: float, *, low_open: bool = False) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not low <= value <= high or (low_open and value == low):
        bracket = "(" if low_open else "["
        raise InvalidRequestError(f"{name} is {value!r}; it must be in {bracket}{low:g}, {high:g}]", name)


def _check_int(name: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidRequestError(f"{name} is {value!r}; it must be an integer in [{low}, {high}]", name)
