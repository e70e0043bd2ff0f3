"""Request fields that are known but not (yet) supported, and the values of each that ask for nothing.

A field that would change the answer is never ignored: it is refused by name, unless its value is the neutral one
that clients send by habit. Fields that only annotate a request (``user``, ``metadata``, ``safety_identifier``,
``prompt_cache_key``) are accepted by the schemas, as are fields that nobody knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from neoserve.types.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a field is refused, and the values that are let through because they ask for nothing."""

    reason: str
    neutral: tuple[object, ...] = ()


_TOOLS = "tool calling is not built yet; describe the tools in a system message"
_CONSTRAINED = "constrained decoding is not built yet; ask for the form in the prompt"
_FILTERS = "use top_p or min_p"
_REASONING = "reasoning control is not built yet"
_OTHER_SERVERS: dict[str, Refusal] = {
    "guided_json": Refusal(_CONSTRAINED),
    "guided_regex": Refusal(_CONSTRAINED),
    "guided_choice": Refusal(_CONSTRAINED),
    "guided_grammar": Refusal(_CONSTRAINED),
    "structured_outputs": Refusal(_CONSTRAINED),
    "grammar": Refusal(_CONSTRAINED, ("",)),
    "json_schema": Refusal(_CONSTRAINED),
    "regex": Refusal(_CONSTRAINED, ("",)),
    "ebnf": Refusal(_CONSTRAINED, ("",)),
    "use_beam_search": Refusal("beam search is not built; use n with a temperature", (False,)),
    "length_penalty": Refusal("it belongs to beam search, which is not built", (1, 1.0)),
    "truncate_prompt_tokens": Refusal("prompts are never cut silently; shorten the prompt", (0,)),
    "bad_words": Refusal("use logit_bias with -100 on the token ids", ([],)),
    "allowed_token_ids": Refusal("use logit_bias to steer single tokens"),
    "lora_path": Refusal("adapters are not built yet"),
    "typical_p": Refusal(_FILTERS, (1, 1.0)),
    "typ_p": Refusal(_FILTERS, (1,)),
    "top_n_sigma": Refusal(_FILTERS, (-1, 0)),
    "mirostat": Refusal(_FILTERS, (0,)),
    "mirostat_tau": Refusal(_FILTERS, (5,)),
    "mirostat_eta": Refusal(_FILTERS, (0.1,)),
    "dynatemp_range": Refusal("use temperature", (0,)),
    "samplers": Refusal("the order of the sampling steps is fixed"),
    "xtc_probability": Refusal(_FILTERS, (0, 0.0)),
    "dry_multiplier": Refusal("use frequency_penalty or presence_penalty", (0, 0.0)),
    "repeat_penalty": Refusal("the name here is repetition_penalty", (1, 1.0)),
    "repeat_last_n": Refusal("repetition_penalty looks at the whole context", (-1,)),
    "n_probs": Refusal("use logprobs", (0,)),
    "n_predict": Refusal("the name here is max_tokens", (-1,)),
    "min_new_tokens": Refusal("the name here is min_tokens", (0,)),
    "max_new_tokens": Refusal("the name here is max_tokens"),
    "max_output_tokens": Refusal("the name here is max_tokens"),
    "stop_sequences": Refusal("the name here is stop", ([],)),
    "return_token_ids": Refusal("use logprobs to see the tokens", (False,)),
    "reasoning": Refusal(_REASONING, ({},)),
    "thinking_budget": Refusal(_REASONING),
    "prompt_logprobs": Refusal("use /v1/completions with echo and logprobs"),
    "include_stop_str_in_output": Refusal("stop strings are never part of the answer", (False,)),
    "no_stop_trim": Refusal("stop strings are never part of the answer", (False,)),
    "stop_regex": Refusal("use stop with plain strings", ([], "")),
    "custom_logit_processor": Refusal("code from a request is never run"),
    "logits_processors": Refusal("code from a request is never run", ([],)),
    "priority": Refusal("requests are served first come, first served", (0,)),
}

_BEST_OF = Refusal("only n is built; leave best_of out or give 1", (1,))
_STREAM_OPTIONS: Mapping[str, Refusal] = {
    "continuous_usage_stats": Refusal("use include_usage, which tells the usage at the end", (False,)),
}

CHAT_REFUSED: Mapping[str, Refusal] = {
    "add_special_tokens": Refusal("the chat template writes the special tokens", (False,)),
    "best_of": _BEST_OF,
    "suffix": Refusal("it belongs to /v1/completions", ("",)),
    "chat_template": Refusal("a request cannot bring a template; start the server with --chat-template"),
    "documents": Refusal("put the documents into a message", ([],)),
    "echo": Refusal("it belongs to /v1/completions", (False,)),
    "enable_thinking": Refusal('use chat_template_kwargs: {"enable_thinking": ...}'),
    "audio": Refusal("this server produces text only"),
    "function_call": Refusal(_TOOLS, ("none", "auto")),
    "functions": Refusal(_TOOLS, ([],)),
    "modalities": Refusal('this server produces text only; use ["text"]', (["text"], [])),
    "moderation": Refusal("this server has no moderation model"),
    # Without tools both values ask for the same.
    "parallel_tool_calls": Refusal(_TOOLS, (True, False)),
    "prediction": Refusal("predicted outputs are not built"),
    "prompt_cache_options": Refusal("the prefix cache has no options per request", ({},)),
    "prompt_cache_retention": Refusal("the prefix cache has no retention per request", ("in_memory", "in-memory")),
    "reasoning_effort": Refusal(_REASONING),
    "response_format": Refusal(f'{_CONSTRAINED}; use {{"type": "text"}}', ({"type": "text"},)),
    "service_tier": Refusal("this server has one tier; use auto", ("auto", "default")),
    "store": Refusal("this server stores no answers; use false", (False,)),
    "tool_choice": Refusal(_TOOLS, ("none", "auto")),
    "tools": Refusal(_TOOLS, ([],)),
    "verbosity": Refusal("ask for the length in the prompt", ("medium",)),
    "web_search_options": Refusal("this server searches nothing"),
    **_OTHER_SERVERS,
}

COMPLETION_REFUSED: Mapping[str, Refusal] = {
    "add_special_tokens": Refusal("a text prompt always gets them; give token ids to choose yourself", (True,)),
    "best_of": _BEST_OF,
    "suffix": Refusal("filling in the middle is not built; put the model's own markers into the prompt", ("",)),
    "response_format": Refusal(f'{_CONSTRAINED}; use {{"type": "text"}}', ({"type": "text"},)),
    **_OTHER_SERVERS,
}


def refuse_unsupported(values: Mapping[str, object], refused: Mapping[str, Refusal]) -> None:
    """Raises InvalidRequestError for the first field of ``values`` that asks for something unsupported."""
    _refuse(values, refused, "")
    stream_options = values.get("stream_options")
    if isinstance(stream_options, Mapping):
        _refuse(stream_options, _STREAM_OPTIONS, "stream_options.")


def _refuse(values: Mapping[str, object], refused: Mapping[str, Refusal], path: str) -> None:
    for name, value in values.items():
        refusal = refused.get(name)
        if refusal is None or any(_same(value, neutral) for neutral in refusal.neutral):
            continue
        param = path + name
        raise InvalidRequestError(f"{param} is not supported: {refusal.reason}", param, "unsupported_parameter")


def _same(value: object, neutral: object) -> bool:
    """Equality that tells booleans from numbers, as JSON does."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral
