"""Chat messages of a request: checked one by one, with the path of the fault, and put into the templates' form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NoReturn, cast

from neoserve.api.body import shown
from neoserve.types.errors import InvalidRequestError

Message = dict[str, object]

ROLES = ("system", "developer", "user", "assistant", "tool")
_CONTENT_OPTIONAL = ("assistant", "tool")
_TEXT_KEYS = {"text": "text", "refusal": "refusal"}
_MEDIA = ("image_url", "input_image", "image", "input_audio", "audio_url", "video_url", "file")


def parse_messages(raw: object, limit: int) -> list[Message]:
    """``messages`` of a chat request as templates expect them.

    Each result has ``role`` and ``content`` (a string, or a list of text parts; "" where the request has none) and,
    where given, ``name``, ``tool_calls`` (arguments as objects), ``tool_call_id`` and ``reasoning_content``. Other
    members are dropped. Raises InvalidRequestError with the path of the member at fault.
    """
    if not isinstance(raw, list) or not raw:
        _fault("messages", raw, "it must be a list of at least one message")
    if len(raw) > limit:
        raise InvalidRequestError(f"messages has {len(raw)} entries; at most {limit} are taken", "messages")
    return [_message(item, f"messages[{index}]") for index, item in enumerate(raw)]


def _message(raw: object, path: str) -> Message:
    if not isinstance(raw, dict):
        _fault(path, raw, "it must be an object with role and content")
    role = raw.get("role")
    if role not in ROLES:
        _fault(f"{path}.role", role, f"it must be one of {', '.join(ROLES)}")
    for name in ("audio", "function_call"):
        if name in raw:
            raise InvalidRequestError(f"{path}.{name} is not supported", f"{path}.{name}", "unsupported_parameter")
    if "content" not in raw and role not in _CONTENT_OPTIONAL:
        raise InvalidRequestError(f"{path}.content is missing; a {role} message must have it", f"{path}.content")
    message: Message = {"role": role, "content": _content(raw.get("content", ""), f"{path}.content")}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if name in raw:
            message[name] = _text(raw[name], f"{path}.{name}")
    if "tool_calls" in raw:
        message["tool_calls"] = _tool_calls(raw["tool_calls"], f"{path}.tool_calls")
    return message


def _content(raw: object, path: str) -> str | list[dict[str, str]]:
    if isinstance(raw, str):
        return raw
    if not isinstance(raw, list):
        _fault(path, raw, "it must be a string or a list of text parts")
    return [_part(part, f"{path}[{index}]") for index, part in enumerate(raw)]


def _part(raw: object, path: str) -> dict[str, str]:
    if not isinstance(raw, dict):
        _fault(path, raw, 'it must be an object like {"type": "text", "text": "..."}')
    kind = raw.get("type")
    if kind in _MEDIA:
        text = f"{path}.type is {shown(kind)}; this server takes text only"
        raise InvalidRequestError(text, f"{path}.type", "unsupported_content_type")
    key = _TEXT_KEYS.get(kind) if isinstance(kind, str) else None
    if key is None:
        _fault(f"{path}.type", kind, "it must be text")
    return {"type": "text", "text": _text(raw.get(key), f"{path}.{key}")}


def _tool_calls(raw: object, path: str) -> list[dict[str, object]]:
    if not isinstance(raw, list):
        _fault(path, raw, "it must be a list of tool calls")
    calls: list[dict[str, object]] = []
    for index, call in enumerate(raw):
        here = f"{path}[{index}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            _fault(f"{here}.function", function, "it must be an object with name and arguments")
        name = _text(function.get("name"), f"{here}.function.name")
        arguments = _arguments(function.get("arguments", ""), f"{here}.function.arguments")
        entry: dict[str, object] = {"type": "function", "function": {"name": name, "arguments": arguments}}
        if "id" in call:
            entry["id"] = _text(call["id"], f"{here}.id")
        calls.append(entry)
    return calls


def _arguments(raw: object, path: str) -> object:
    """Templates print arguments with ``tojson``, so a JSON object is handed over parsed.

    Models can write broken JSON; a history that holds it is still a legal history, so it stays a string.
    """
    if isinstance(raw, Mapping):
        return dict(raw)
    text = _text(raw, path)
    if not text.strip():
        return {}
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return parsed if isinstance(parsed, dict) else text


def _text(raw: object, path: str) -> str:
    if not isinstance(raw, str):
        _fault(path, raw, "it must be a string")
    return cast(str, raw)


def _fault(path: str, value: object, must: str) -> NoReturn:
    raise InvalidRequestError(f"{path} is {shown(value)}; {must}", path, "invalid_value")
