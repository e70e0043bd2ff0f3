"""Messages in all the shapes that clients send."""

from __future__ import annotations

from typing import Any

import pytest

from neoserve.text.template import ChatTemplate
from neoserve.types.errors import InvalidRequestError

from .tiny_tokenizers import byte_level_metadata, tokenizer

SUBJECT = tokenizer(byte_level_metadata())
PRINT = (
    "{% for m in messages %}({{ m.role }}|{{ m.content }}"
    "{% for c in m.tool_calls or [] %}|{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %})"
    "{% endfor %}"
)
USER = {"role": "user", "content": "q"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def render(messages: list[dict[str, Any]], text: str = PRINT) -> str:
    return ChatTemplate({"default": text}, SUBJECT).render(messages).text


@pytest.mark.parametrize(
    "content", [{}, {"content": None}, {"content": ""}, {"content": []}, {"content": [{"type": "text", "text": ""}]}]
)
def test_an_assistant_without_content_is_rendered_as_nothing(content: dict[str, Any]) -> None:
    chat = [USER, {"role": "assistant", "tool_calls": [CALL], **content}, {"role": "tool", **content}]
    assert render(chat) == "(user|q)(assistant||f{})(tool|)"


@pytest.mark.parametrize("arguments", ["", " ", "{}", {}, None])
def test_a_call_without_arguments(arguments: object) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    assert render([USER, {"role": "assistant", "tool_calls": [call]}]) == "(user|q)(assistant||f{})"


def test_broken_arguments_stay_the_text_they_are() -> None:
    call = {"function": {"name": "f", "arguments": '{"a": '}}
    assert render([{"role": "assistant", "tool_calls": [call]}]) == '(assistant||f"{\\"a\\": ")'


@pytest.mark.parametrize("calls", [None, []])
def test_no_calls_are_as_absent(calls: object) -> None:
    text = "{{ 'tool_calls' in messages[0] }}{{ 'name' in messages[0] }}"
    assert render([{"role": "assistant", "content": "a", "tool_calls": calls, "name": None}], text) == "FalseFalse"


def test_text_parts_are_joined_by_lines() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
    assert render([{"role": "user", "content": parts}]) == "(user|a\nb)"


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", None])
def test_other_parts_are_refused_by_name(kind: object) -> None:
    chat = [USER, {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind}]}]
    with pytest.raises(
        InvalidRequestError, match=rf"messages\[1\]\.content\[1\]\.type is {kind!r}.*text only"
    ) as caught:
        render(chat)
    assert caught.value.param == "messages[1].content[1].type"


def test_developer_is_system_for_templates_that_do_not_know_it() -> None:
    assert render([{"role": "developer", "content": "d"}, USER]) == "(system|d)(user|q)"
    knows = "{% for m in messages %}{{ 'D' if m['role'] == 'developer' else m.role }}:{{ m.content }};{% endfor %}"
    assert render([{"role": "developer", "content": "d"}, USER], knows) == "D:d;user:q;"
    by_table = "{% set names = {'developer': 'D', 'user': 'U'} %}{% for m in messages %}{{ names[m.role] }}{% endfor %}"
    assert render([{"role": "developer", "content": "d"}, USER], by_table) == "DU"


def test_several_instructions_are_joined_at_the_front() -> None:
    chat = [
        USER,
        {"role": "developer", "content": "one"},
        {"role": "system", "content": [{"type": "text", "text": "two"}]},
    ]
    assert render(chat) == "(system|one\n\ntwo)(user|q)"


def test_system_messages_alone_are_left_where_they_are() -> None:
    assert render([USER, {"role": "system", "content": "s"}]) == "(user|q)(system|s)"


@pytest.mark.parametrize("role", ["banana", None, 3])
def test_an_invented_role_is_refused(role: object) -> None:
    with pytest.raises(
        InvalidRequestError, match=rf"messages\[0\]\.role is {role!r}; .* system, developer, user"
    ) as caught:
        render([{"role": role, "content": "x"}])
    assert caught.value.param == "messages[0].role"


def test_a_role_that_the_template_compares_with_is_taken() -> None:
    knows = "{% for m in messages %}{% if m.role in ['user', 'banana'] %}{{ m.role }}{% endif %}{% endfor %}"
    assert render([{"role": "banana", "content": "x"}], knows) == "banana"
    with pytest.raises(InvalidRequestError, match="tool, banana"):
        render([{"role": "apple", "content": "x"}], knows)


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_is_found_under_the_names_that_templates_read(name: str) -> None:
    chat = [USER, {"role": "assistant", "content": "4", name: "2+2"}]
    assert render(chat, "{{ messages[1].reasoning_content }} {{ messages[1].thinking }}") == "2+2 2+2"


@pytest.mark.parametrize(
    ("messages", "path"),
    [
        ("hi", "messages"),
        ([3], r"messages\[0\]"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content"),
        ([{"role": "user", "content": {"a": 1}}], r"messages\[0\]\.content"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\]\.content\[0\]\.text"),
        ([{"role": "assistant", "tool_calls": {"a": 1}}], r"messages\[0\]\.tool_calls"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], r"messages\[0\]\.tool_calls\[0\]\.function"),
        ([{"role": "user", "content": "a", "name": object()}], r"messages\[0\]\.name"),
    ],
)
def test_a_message_of_the_wrong_shape_is_named_by_its_path(messages: Any, path: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{path} is "):
        render(messages)


def test_deep_nesting_is_refused() -> None:
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    subject = ChatTemplate({"default": PRINT}, SUBJECT)
    for arguments in ({"tools": [deep]}, {"documents": [deep]}, {"variables": {"v": deep}}):
        with pytest.raises(InvalidRequestError, match="nested more than 100 levels deep"):
            subject.render([USER], **arguments)
