"""Fields of other servers that would change the answer: refused by name, or neutral (B41)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import pytest

from neoserve.api.body import parse
from neoserve.api.fields import CHAT_REFUSED, COMPLETION_REFUSED, Refusal
from neoserve.api.schemas import ChatCompletionRequest, CompletionRequest, SamplingFields
from neoserve.types.errors import InvalidRequestError

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "p"}

Row = tuple[str, object, list[object]]

# Name, a value that asks for something, and values that ask for nothing.
BOTH: list[Row] = [
    ("return_token_ids", True, [False]),
    ("thinking_budget", 100, []),
    ("n_probs", 5, [0]),
    ("repeat_last_n", 64, [-1]),
    ("top_n_sigma", 1.0, [-1, -1.0, 0]),
    ("dynatemp_range", 0.5, [0, 0.0]),
    ("samplers", ["top_k"], []),
    ("typ_p", 0.9, [1, 1.0]),
    ("mirostat_tau", 4.0, [5, 5.0]),
    ("mirostat_eta", 0.2, [0.1]),
    ("logits_processors", ["a.b"], [[]]),
    ("stop_sequences", ["x"], [[]]),
    ("max_output_tokens", 5, []),
    ("reasoning", {"effort": "low"}, [{}]),
    ("best_of", 2, [1]),
    ("suffix", "end", [""]),
]
CHAT_ONLY: list[Row] = [("add_special_tokens", True, [False]), ("parallel_tool_calls", "yes", [True, False])]
COMPLETIONS_ONLY: list[Row] = [("add_special_tokens", False, [True])]


def chat(**fields: object) -> SamplingFields:
    return _parse(CHAT, fields, ChatCompletionRequest, CHAT_REFUSED)


def text(**fields: object) -> SamplingFields:
    return _parse(TEXT, fields, CompletionRequest, COMPLETION_REFUSED)


def _parse(
    base: Mapping[str, object],
    fields: Mapping[str, object],
    schema: type[SamplingFields],
    refused: Mapping[str, Refusal],
) -> SamplingFields:
    return parse(json.dumps({**base, **fields}).encode(), schema, refused)


@pytest.mark.parametrize(
    ("read", "name", "value", "neutral"),
    [(read, *row) for read, rows in ((chat, BOTH + CHAT_ONLY), (text, BOTH + COMPLETIONS_ONLY)) for row in rows],
)
def test_refused_unless_neutral(
    read: Callable[..., SamplingFields], name: str, value: object, neutral: list[object]
) -> None:
    with pytest.raises(InvalidRequestError, match=name) as caught:
        read(**{name: value})
    assert caught.value.param == name
    assert caught.value.code == "unsupported_parameter"
    for nothing in (*neutral, None):
        assert read(**{name: nothing}).model == "m"


@pytest.mark.parametrize("read", [chat, text])
def test_stream_options_are_read_too(read: Callable[..., SamplingFields]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert caught.value.param == "stream_options.continuous_usage_stats"
    assert caught.value.code == "unsupported_parameter"
    assert read(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": False}).model == "m"


@pytest.mark.parametrize("read", [chat, text])
@pytest.mark.parametrize("field", ["cache_salt", "extra_key"])
@pytest.mark.parametrize("value", ["", 5, ["a"], True])
def test_a_salt_is_a_string_that_is_not_empty(read: Callable[..., SamplingFields], field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=field) as caught:
        read(**{field: value})
    assert (caught.value.param, caught.value.code) == (field, "invalid_value")
    assert getattr(read(**{field: "tenant"}), field) == "tenant"
