"""Chat messages of the OpenAI shape, brought into the form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from neoserve.types.errors import InvalidRequestError

Message = dict[str, Any]

_ROLES = ("system", "developer", "user", "assistant", "tool")
# A message's reasoning goes under several names; templates read the first, some the second.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_PART_SEPARATOR = "\n"
_DEEPEST = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateHabits:
    """What one template takes. ``roles``: roles it names beside the usual ones.

    ``strings`` / ``parts``: whether it takes content as a string / as a list of text parts.
    ``argument_objects``: whether it takes a tool call's arguments as an object rather than as JSON text.
    """

    roles: frozenset[str] = frozenset()
    developer: bool = False
    strings: bool = True
    parts: bool = False
    argument_objects: bool = True


def normalise_messages(messages: Any, habits: TemplateHabits) -> list[Message]:
    """Plain copies of ``messages`` for a template with these ``habits``.

    Null fields are as absent. Absent or empty content is "". ``developer`` is ``system`` unless the template knows
    it, and then all instructions are joined in one message at the front. Raises InvalidRequestError with the path
    of the field at fault.
    """
    if not isinstance(messages, (list, tuple)):
        raise InvalidRequestError(f"messages is {type(messages).__name__}; it must be a list of messages", "messages")
    plain = [_message(message, f"messages[{index}]", habits) for index, message in enumerate(messages)]
    if not habits.developer and any(message["role"] == "developer" for message in plain):
        plain = _instructions_first(plain)
    for message in plain:
        message["content"] = _fitting(message["content"], habits)
    return plain


def plain_json(value: Any, path: str, depth: int = 0) -> Any:
    """A copy of ``value`` made of JSON types only, so that a template finds no methods but theirs."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if depth > _DEEPEST:
        raise InvalidRequestError(f"{path.split('.')[0]} is nested more than {_DEEPEST} levels deep", path)
    if isinstance(value, Mapping):
        return {str(key): plain_json(item, f"{path}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
    raise InvalidRequestError(f"{path} is of type {type(value).__name__}; it must be a JSON value", path)


def system_into_user(messages: list[Message]) -> list[Message]:
    """Put the text of leading system messages before that of the first user message."""
    count = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if not count or count == len(messages) or messages[count]["role"] != "user":
        return messages
    texts = [_text_of(message["content"]) for message in messages[: count + 1]]
    merged = {**messages[count], "content": "\n\n".join(text for text in texts if text)}
    return [merged, *messages[count + 1 :]]


def _message(raw: Any, path: str, habits: TemplateHabits) -> Message:
    if not isinstance(raw, Mapping):
        raise InvalidRequestError(f"{path} is {type(raw).__name__}; it must be an object with role and content", path)
    message: Message = {key: plain_json(value, f"{path}.{key}") for key, value in raw.items() if value is not None}
    role = message.get("role")
    if role not in _ROLES and role not in habits.roles:
        known = ", ".join([*_ROLES, *sorted(habits.roles - set(_ROLES))])
        raise InvalidRequestError(f"{path}.role is {role!r}; it must be one of {known}", f"{path}.role")
    message["content"] = _content(message.get("content", ""), f"{path}.content")
    calls = message.pop("tool_calls", None)
    if calls:
        message["tool_calls"] = _tool_calls(calls, f"{path}.tool_calls", habits)
    reasoning = next((message[name] for name in _REASONING_FIELDS if name in message), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _content(raw: Any, path: str) -> str | list[dict[str, str]]:
    """The text, or its parts if there are any."""
    if isinstance(raw, str):
        return raw
    if not isinstance(raw, list):
        raise InvalidRequestError(f"{path} is {type(raw).__name__}; it must be a string or a list of text parts", path)
    return [_part(part, f"{path}[{index}]") for index, part in enumerate(raw)] or ""


def _part(raw: Any, path: str) -> dict[str, str]:
    kind = raw.get("type") if isinstance(raw, dict) else None
    if kind not in ("text", "refusal"):
        raise InvalidRequestError(
            f"{path}.type is {kind!r}; the model takes text only, so it must be 'text'",
            f"{path}.type",
            "unsupported_content_type",
        )
    text = raw.get(kind)
    if not isinstance(text, str):
        raise InvalidRequestError(f"{path}.{kind} is {type(text).__name__}; it must be a string", f"{path}.{kind}")
    return {"type": "text", "text": text}


def _tool_calls(raw: Any, path: str, habits: TemplateHabits) -> list[Message]:
    if not isinstance(raw, list):
        raise InvalidRequestError(f"{path} is {type(raw).__name__}; it must be a list of tool calls", path)
    calls = []
    for index, call in enumerate(raw):
        here = f"{path}[{index}].function"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequestError(f"{here} is {function!r}; it must be an object with name and arguments", here)
        arguments = _arguments(function.get("arguments"), habits)
        kept = {key: value for key, value in call.items() if value is not None}
        calls.append({**kept, "function": {**function, "arguments": arguments}})
    return calls


def _arguments(raw: Any, habits: TemplateHabits) -> Any:
    """Arguments in the template's form. Models write broken JSON at times; that stays the text it is."""
    if raw is None or (isinstance(raw, str) and not raw.strip()):
        raw = {}
    if not habits.argument_objects:
        return raw if isinstance(raw, str) else json.dumps(raw, ensure_ascii=False)
    if not isinstance(raw, str):
        return raw
    try:
        parsed = json.loads(raw)
    except (ValueError, RecursionError):
        return raw
    return parsed if isinstance(parsed, dict) else raw


def _instructions_first(messages: list[Message]) -> list[Message]:
    """All system and developer messages as one system message at the front."""
    instructions = [message for message in messages if message["role"] in ("system", "developer")]
    others = [message for message in messages if message["role"] not in ("system", "developer")]
    first = {**instructions[0], "role": "system"}
    if len(instructions) > 1:
        texts = [_text_of(message["content"]) for message in instructions]
        first["content"] = "\n\n".join(text for text in texts if text)
    return [first, *others]


def _fitting(content: str | list[dict[str, str]], habits: TemplateHabits) -> str | list[dict[str, str]]:
    if isinstance(content, list):
        return content if habits.parts else _text_of(content)
    return content if habits.strings or not content else [{"type": "text", "text": content}]


def _text_of(content: str | list[dict[str, str]]) -> str:
    if isinstance(content, str):
        return content
    return _PART_SEPARATOR.join(part["text"] for part in content)
