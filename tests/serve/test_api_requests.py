"""Request bodies: strict parsing, refused fields, bounds. No server and no engine."""

from __future__ import annotations

import json

import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params

from neoserve.api.body import parse
from neoserve.api.fields import CHAT_REFUSED, COMPLETION_REFUSED
from neoserve.api.limits import RequestLimits
from neoserve.api.messages import check_messages
from neoserve.api.params import chat_sampling, completion_sampling
from neoserve.api.prompts import parse_prompts
from neoserve.api.schemas import ChatCompletionRequest, CompletionRequest
from neoserve.types.errors import InvalidRequestError
from neoserve.types.model import GenerationDefaults
from neoserve.types.sampling import SamplingParams

LIMITS = RequestLimits()
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}
NO_DEFAULTS = GenerationDefaults()


def chat(**fields: object) -> ChatCompletionRequest:
    return parse(json.dumps({**CHAT, **fields}).encode(), ChatCompletionRequest, CHAT_REFUSED)


def text(**fields: object) -> CompletionRequest:
    return parse(json.dumps({**TEXT, **fields}).encode(), CompletionRequest, COMPLETION_REFUSED)


def chat_params_of(**fields: object) -> SamplingParams:
    return chat_sampling(chat(**fields), NO_DEFAULTS, LIMITS)[0]


def text_params_of(**fields: object) -> SamplingParams:
    return completion_sampling(text(**fields), NO_DEFAULTS, LIMITS)[0]


# B41: every documented field is honoured, an annotation, or refused by name.

ANNOTATIONS = {"user", "metadata", "safety_identifier", "prompt_cache_key"}


def test_every_openai_chat_field_has_a_rule() -> None:
    documented = set(chat_params.CompletionCreateParamsBase.__annotations__) | {"stream"}
    known = set(ChatCompletionRequest.model_fields) | set(CHAT_REFUSED) | ANNOTATIONS
    assert documented - known == set()
    assert not set(ChatCompletionRequest.model_fields) & set(CHAT_REFUSED)


def test_every_openai_completion_field_has_a_rule() -> None:
    documented = set(completion_params.CompletionCreateParamsBase.__annotations__) | {"stream"}
    assert documented - set(CompletionRequest.model_fields) - set(COMPLETION_REFUSED) == set()
    assert not set(CompletionRequest.model_fields) & set(COMPLETION_REFUSED)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("audio", {"voice": "x", "format": "wav"}),
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("modalities", ["text", "audio"]),
        ("prediction", {"type": "content", "content": "x"}),
        ("reasoning_effort", "low"),
        ("response_format", {"type": "json_object"}),
        ("service_tier", "flex"),
        ("store", True),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("verbosity", "low"),
        ("web_search_options", {}),
        ("guided_json", {"type": "object"}),
        ("use_beam_search", True),
        ("chat_template", "{{ messages }}"),
        ("prompt_logprobs", 5),
        ("include_stop_str_in_output", True),
        ("n_predict", 5),
        ("repeat_penalty", 1.1),
    ],
)
def test_unsupported_chat_fields_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=field) as caught:
        chat(**{field: value})
    assert caught.value.param == field
    assert caught.value.code == "unsupported_parameter"


@pytest.mark.parametrize("field", ["best_of", "suffix"])
def test_unsupported_completion_fields_are_refused_by_name(field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        text(**{field: 2 if field == "best_of" else "end"})
    assert caught.value.param == field


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
        {"response_format": {"type": "text"}, "modalities": ["text"]},
        {"store": False, "service_tier": "auto", "verbosity": "medium"},
        {"user": "u", "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k"},
    ],
)
def test_neutral_values_and_annotations_pass(fields: dict[str, object]) -> None:
    assert chat(**fields).model == "m"


def test_a_number_is_no_neutral_boolean() -> None:
    with pytest.raises(InvalidRequestError):
        chat(store=0)
    with pytest.raises(InvalidRequestError):
        text(best_of=True)


def test_nulls_count_as_absent_everywhere() -> None:
    nulls = dict.fromkeys([*chat_params.CompletionCreateParamsBase.__annotations__, "stream", "unheard_of"])
    body = parse(json.dumps({**nulls, **CHAT}).encode(), ChatCompletionRequest, CHAT_REFUSED)
    assert body == chat()
    with pytest.raises(InvalidRequestError, match="model is missing"):
        chat(model=None)


def test_unknown_fields_are_ignored_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", logger="neoserve.api.body"):
        assert chat(unheard_of=1).model == "m"
    assert "unheard_of" in caplog.text


# Strict types (B73).


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "1"),
        ("temperature", True),
        ("max_tokens", "5"),
        ("max_tokens", True),
        ("max_tokens", 5.5),
        ("n", "1"),
        ("n", 0),
        ("n", 1.5),
        ("stream", "true"),
        ("stream", 1),
        ("seed", 1.0),
        ("logprobs", 1),
        ("top_logprobs", True),
        ("stop_token_ids", ["1"]),
        ("stop_token_ids", [True]),
        ("ignore_eos", 1),
        ("logit_bias", {"1": "x"}),
        ("logit_bias", {"1": True}),
        ("logit_bias", [1]),
        ("model", 3),
        ("user", 3),
    ],
)
def test_wrong_types_are_refused_with_the_field(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat(**{field: value})
    assert (caught.value.param or "").split(".")[0].split("[")[0] == field


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"nonsense",
        b"[]",
        b"3",
        b"null",
        b'{"model": NaN}',
        b'{"model": "\\ud800", "messages": []}',
        b"\xff\xfe\xfa",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"seed": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda raw: raw[:12],
)
def test_what_is_not_a_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse(raw, ChatCompletionRequest, CHAT_REFUSED)
    assert len(str(caught.value)) < 300


def test_deeply_nested_values_are_refused_not_crashed_on() -> None:
    deep = '{"model":"m","messages":' + "[" * 900 + "]" * 900 + "}"
    with pytest.raises(InvalidRequestError):
        check_messages(parse(deep.encode(), ChatCompletionRequest, CHAT_REFUSED).messages, LIMITS.messages)


# Sampling parameters.


def test_defaults_come_from_the_request_then_the_checkpoint_then_openai() -> None:
    defaults = GenerationDefaults(temperature=0.6, top_k=20, top_p=0.9, min_p=0.1, repetition_penalty=1.1)
    got = chat_sampling(chat(temperature=0.2), defaults, LIMITS)[0]
    assert (got.temperature, got.top_k, got.top_p, got.min_p, got.repetition_penalty) == (0.2, 20, 0.9, 0.1, 1.1)
    plain = chat_params_of()
    assert (plain.temperature, plain.top_k, plain.top_p, plain.max_tokens) == (1.0, 0, 1.0, None)
    assert text_params_of().max_tokens == 16


def test_every_sampling_field_arrives() -> None:
    fields: dict[str, object] = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.5,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "seed": 11,
        "max_tokens": 9,
        "min_tokens": 2,
        "stop_token_ids": [3, 4],
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    for got in (chat_params_of(**fields), text_params_of(**fields)):
        for name, value in fields.items():
            assert getattr(got, name) == (tuple(value) if isinstance(value, list) else value)


def test_max_completion_tokens_wins_over_max_tokens() -> None:
    """B38."""
    assert chat_params_of(max_completion_tokens=5).max_tokens == 5
    assert chat_params_of(max_completion_tokens=5, max_tokens=9).max_tokens == 5
    assert chat_params_of(max_completion_tokens=None, max_tokens=9).max_tokens == 9


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_token_limit_below_one_is_refused(field: str, value: int) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat_params_of(**{field: value})
    assert caught.value.param == field


def test_max_tokens_zero_is_for_echo_only() -> None:
    """B26: scoring draws one token and drops it."""
    assert text_params_of(max_tokens=0, echo=True).max_tokens == 1
    with pytest.raises(InvalidRequestError, match="echo"):
        text_params_of(max_tokens=0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("top_k", -2),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("max_tokens", 2**31),
        ("min_tokens", -1),
        ("n", 129),
        ("stop", 5),
        ("stop", [5]),
        ("stop", [""]),
        ("stop", ["x"] * 17),
        ("stop", "x" * 257),
        ("stop", ["ok", "x" * 257]),
        ("stop_token_ids", list(range(257))),
        ("logit_bias", {"abc": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1.5": 1}),
        ("logit_bias", {"99999999999": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"1": -1e9}),
        ("logit_bias", {str(index): 1 for index in range(1025)}),
    ],
)
def test_values_out_of_range_name_the_field(field: str, value: object) -> None:
    """B73, B74, B40."""
    for params_of in (chat_params_of, text_params_of):
        with pytest.raises(InvalidRequestError) as caught:
            params_of(**{field: value})
        assert caught.value.param == field


def test_chat_logprobs() -> None:
    """B37."""
    assert chat_params_of().logprobs is None
    assert chat_params_of(logprobs=False).logprobs is None
    assert chat_params_of(logprobs=True).logprobs == 0
    assert chat_params_of(logprobs=True, top_logprobs=20).logprobs == 20
    for fields in ({"logprobs": True, "top_logprobs": 21}, {"top_logprobs": 2}, {"logprobs": True, "top_logprobs": -1}):
        with pytest.raises(InvalidRequestError) as caught:
            chat_params_of(**fields)
        assert caught.value.param == "top_logprobs"


def test_completion_logprobs() -> None:
    assert text_params_of(logprobs=0).logprobs == 0
    assert text_params_of(logprobs=5).logprobs == 5
    for bad in (21, -1, 10**9):
        with pytest.raises(InvalidRequestError) as caught:
            text_params_of(logprobs=bad)
        assert caught.value.param == "logprobs"


def test_choices_have_seeds_of_their_own() -> None:
    """B40: n choices must differ, and be those of single requests with the seeds that follow."""
    seeds = [params.seed for params in chat_sampling(chat(n=3, seed=7), NO_DEFAULTS, LIMITS)]
    assert seeds == [7, 8, 9]
    top = [params.seed for params in chat_sampling(chat(n=2, seed=2**64 - 1), NO_DEFAULTS, LIMITS)]
    assert top == [2**64 - 1, 0]
    assert [params.seed for params in chat_sampling(chat(n=2), NO_DEFAULTS, LIMITS)] == [None, None]


def test_stop_is_a_string_or_a_list() -> None:
    assert chat_params_of(stop="a").stop == ("a",)
    assert chat_params_of(stop=["a", "b"]).stop == ("a", "b")
    assert chat_params_of(stop=[]).stop == ()
    assert chat_params_of(stop=["x" * 256] * 16).stop == ("x" * 256,) * 16


def test_stream_options_need_a_stream() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat_params_of(stream_options={"include_usage": True})
    assert caught.value.param == "stream_options"
    with pytest.raises(InvalidRequestError) as caught:
        chat_params_of(stream=True, stream_options={"include_obfuscation": True})
    assert caught.value.param == "stream_options.include_obfuscation"


# Messages (B42); contents, parts and tool calls are checked by the text layer, see test_api_chat.py.


def messages(*raw: object) -> list[dict[str, object]]:
    return check_messages(list(raw), LIMITS.messages)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hi", "messages[0]"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": ["user"], "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "system"}, "messages[0].content"),
        ({"role": "assistant", "audio": {"id": "x"}}, "messages[0].audio"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "messages[0].function_call"),
    ],
)
def test_a_faulty_message_is_named_by_its_path(message: object, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        messages(message)
    assert caught.value.param == param


@pytest.mark.parametrize("raw", [None, [], {}, "hi", 5])
def test_messages_must_be_a_list_with_something_in_it(raw: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_messages(raw, LIMITS.messages)
    assert caught.value.param == "messages"


def test_the_number_of_messages_is_bounded() -> None:
    with pytest.raises(InvalidRequestError, match="8192"):
        messages(*[{"role": "user", "content": ""}] * 8193)


# Prompts.


@pytest.mark.parametrize(
    ("raw", "prompts"),
    [
        ("a", ["a"]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_the_four_forms_of_a_prompt(raw: object, prompts: list[object]) -> None:
    assert parse_prompts(raw, LIMITS) == prompts


@pytest.mark.parametrize(
    "raw", [None, [], {}, 5, [[]], [None], [True], [1, "a"], [1, True], [1.5], ["a", [1]], [["a"]], [[1], []]]
)
def test_other_prompts_are_refused(raw: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_prompts(raw, LIMITS)
    assert caught.value.param == "prompt"


def test_the_number_of_prompts_is_bounded() -> None:
    """B73: the message names the limit and does not repeat the list."""
    with pytest.raises(InvalidRequestError, match="256") as caught:
        parse_prompts(["x"] * 100_000, LIMITS)
    assert len(str(caught.value)) < 200
