"""Request bodies of the OpenAI-compatible routes, with strict types: a boolean or a string is not a number.

Absent fields are None: the defaults come from the checkpoint (temperature, top_k, top_p, min_p,
repetition_penalty) or are stated here. Ranges are checked by SamplingParams, bounds of lists by RequestLimits.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue


class StreamOptions(BaseModel):
    """``include_usage`` adds a last event with ``choices: []`` and the usage of the whole request."""

    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool = False
    include_obfuscation: bool = False


class SamplingFields(BaseModel):
    """What both generating routes have in common; unknown fields are kept in ``model_extra`` and logged."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(default=1, ge=1)
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: Any = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    user: str | None = None

    # Extensions, named as in vLLM and SGLang.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = Field(default_factory=list)
    skip_special_tokens: bool = True
    # An empty one is more likely a variable that was not set than a wish to share with everybody.
    cache_salt: str | None = Field(default=None, min_length=1)
    extra_key: str | None = Field(default=None, min_length=1)


class ChatCompletionRequest(SamplingFields):
    """Body of POST /v1/chat/completions. ``messages`` are checked by messages.py."""

    messages: Any
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    metadata: dict[str, JsonValue] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    # Extensions, named as in vLLM and SGLang.
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, JsonValue] = Field(default_factory=dict)


class CompletionRequest(SamplingFields):
    """Body of POST /v1/completions. ``prompt`` is checked by prompts.py; ``logprobs`` is a number of alternatives."""

    prompt: Any
    echo: bool = False
    logprobs: int | None = None
