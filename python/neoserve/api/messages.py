"""Chat messages of a request: what the HTTP boundary checks before the text layer normalises them.

The text layer (``normalise_messages``) checks contents, parts and tool calls against the model's template. Here are
the bounds, what OpenAI requires, and what no template can take.
"""

from __future__ import annotations

from typing import NoReturn

from neoserve.api.body import shown
from neoserve.types.errors import InvalidRequestError

Message = dict[str, object]

_CONTENT_OPTIONAL = ("assistant", "tool")
_UNSUPPORTED = ("audio", "function_call")


def check_messages(raw: object, limit: int) -> list[Message]:
    """``messages`` of a chat request, as they came (nulls were dropped before).

    Content may be missing in assistant and tool messages only. Raises InvalidRequestError with the path of the
    member at fault.
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
    if not isinstance(role, str):
        _fault(f"{path}.role", role, "it must be a string such as user")
    for name in _UNSUPPORTED:
        if name in raw:
            raise InvalidRequestError(f"{path}.{name} is not supported", f"{path}.{name}", "unsupported_parameter")
    if "content" not in raw and role not in _CONTENT_OPTIONAL:
        text = f"{path}.content is missing; a message of role {shown(role)} must have it"
        raise InvalidRequestError(text, f"{path}.content", "missing_required_parameter")
    return raw


def _fault(path: str, value: object, must: str) -> NoReturn:
    raise InvalidRequestError(f"{path} is {shown(value)}; {must}", path, "invalid_value")
