"""Request bodies: read within a bound, parsed strictly, nulls dropped, known but unsupported fields refused."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from concurrent.futures import Executor
from typing import NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from neoserve.api.errors import ApiError
from neoserve.api.fields import Refusal, refuse_unsupported
from neoserve.types.errors import InvalidRequestError

logger = logging.getLogger(__name__)

Schema = TypeVar("Schema", bound=BaseModel)

# Parsing this much JSON takes well under a millisecond; more goes to a worker thread.
INLINE_BYTES = 64 * 1024
_SHOWN_CHARACTERS = 80


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body; raises ApiError 413 as soon as it is known to exceed ``limit`` bytes."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        chunks.append(chunk)
    return b"".join(chunks)


async def parse_body(raw: bytes, schema: type[Schema], refused: Mapping[str, Refusal], worker: Executor) -> Schema:
    """``raw`` as a checked ``schema``; large bodies are parsed by ``worker`` so that the event loop stays free.

    ``refused`` is the table of known but unsupported fields, see fields.py.
    Raises InvalidRequestError naming the field at fault.
    """
    if len(raw) <= INLINE_BYTES:
        return parse(raw, schema, refused)
    return await asyncio.get_running_loop().run_in_executor(worker, parse, raw, schema, refused)


def parse(raw: bytes, schema: type[Schema], refused: Mapping[str, Refusal]) -> Schema:
    """See parse_body."""
    values = _load_object(raw)
    refuse_unsupported(values, refused)
    try:
        parsed = schema.model_validate(values)
    except ValidationError as error:
        raise _first_fault(error) from None
    if parsed.model_extra:
        logger.debug("ignoring unknown request fields: %s", ", ".join(sorted(parsed.model_extra)))
    return parsed


def shown(value: object) -> str:
    """``value`` for an error text: its repr, cut to a readable length."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def without_nulls(value: object) -> object:
    """``value`` with every null member of every object dropped, as OpenAI's clients expect null to mean absent."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def _load_object(raw: bytes) -> dict[str, object]:
    try:
        values = json.loads(raw, parse_constant=_refuse_constant)
        if not isinstance(values, dict):
            text = f"the body is a JSON {_json_kind(values)}; it must be an object"
            raise InvalidRequestError(text, code="invalid_json")
        if b"\\ud" in raw or b"\\uD" in raw:
            _refuse_lone_surrogates(values)
        cleaned = without_nulls(values)
    except RecursionError:
        raise InvalidRequestError("the body's JSON is nested too deeply", code="invalid_json") from None
    except ValueError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    assert isinstance(cleaned, dict)
    return cleaned


def _refuse_lone_surrogates(values: object) -> None:
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("a string holds half of a surrogate pair, which is no character") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _json_kind(value: object) -> str:
    kinds = {list: "array", str: "string", bool: "boolean", int: "number", float: "number", type(None): "null"}
    return kinds.get(type(value), "value")


def _first_fault(error: ValidationError) -> InvalidRequestError:
    fault = error.errors(include_url=False)[0]
    param = _dotted(fault["loc"])
    if fault["type"] == "missing":
        return InvalidRequestError(f"{param} is missing; the request must have it", param, "missing_required_parameter")
    reason = fault["msg"][0].lower() + fault["msg"][1:]
    return InvalidRequestError(f"{param} is {shown(fault['input'])}; {reason}", param, "invalid_value")


def _dotted(location: tuple[int | str, ...]) -> str:
    """("messages", 0, "role") as "messages[0].role"."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes, this server's limit", code="body_too_large")
