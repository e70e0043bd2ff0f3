"""Bounds that one request must keep, so that no single field can exhaust the server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Upper bounds of one HTTP request; all are inclusive.

    ``body_bytes`` bounds the body before it is parsed (HTTP 413 beyond it). ``prompts`` bounds the prompts of one
    completion request and ``sequences`` the prompts times ``n``. ``stop_characters`` bounds each stop string.
    """

    body_bytes: int = 8 * 1024 * 1024
    messages: int = 8192
    prompts: int = 256
    choices: int = 128
    sequences: int = 256
    stop_strings: int = 16
    stop_characters: int = 256
    stop_token_ids: int = 256
    logit_bias_entries: int = 1024
    top_logprobs: int = 20
