"""Prompts as token ids: the four forms of a completion prompt, and chats through the model's template.

Everything here may take long for long texts and runs on a worker thread (see ServerState.worker).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from neoserve.api.body import shown
from neoserve.api.errors import about
from neoserve.api.limits import RequestLimits
from neoserve.api.messages import check_messages
from neoserve.api.model import ServedModel
from neoserve.api.schemas import ChatCompletionRequest
from neoserve.types.errors import InvalidRequestError

NO_TEMPLATE = "the model has no chat template; give one with --chat-template, or use /v1/completions"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a completion request; ``text`` is None if it came as token ids."""

    token_ids: tuple[int, ...]
    text: str | None


def parse_prompts(raw: object, limits: RequestLimits) -> list[str | list[int]]:
    """``prompt``: a string, a list of strings, a list of token ids, or a list of such lists.

    Raises InvalidRequestError with the path of the fault. Ids are checked against the vocabulary by the engine.
    """
    if isinstance(raw, str):
        return [raw]
    if not isinstance(raw, list) or not raw:
        text = "it must be a string, a list of strings, a list of token ids, or a list of lists of token ids"
        raise InvalidRequestError(f"prompt is {shown(raw)}; {text}", "prompt", "invalid_value")
    if _is_id(raw[0]):
        return [_ids(raw, "prompt")]
    if len(raw) > limits.prompts:
        raise InvalidRequestError(f"prompt has {len(raw)} entries; at most {limits.prompts} are taken", "prompt")
    prompts: list[str | list[int]] = []
    for index, item in enumerate(raw):
        prompts.append(item if isinstance(item, str) else _ids(item, f"prompt[{index}]"))
    if len({type(prompt) for prompt in prompts}) > 1:
        raise InvalidRequestError("prompt mixes strings and token ids; give one kind", "prompt", "invalid_value")
    return prompts


def encode_prompts(model: ServedModel, prompts: Sequence[str | list[int]]) -> list[Prompt]:
    """Token ids of each prompt; a text gets the model's BOS and may spell special tokens, ids are taken as they are."""
    with about("prompt"):
        return [_encode_text(model, item) if isinstance(item, str) else Prompt(tuple(item), None) for item in prompts]


def _encode_text(model: ServedModel, text: str) -> Prompt:
    tokenizer = model.tokenizer
    ids = tokenizer.encode(text, add_bos=tokenizer.adds_bos, parse_special=True, max_tokens=model.context_length)
    return Prompt(tuple(ids), text)


def encode_chat(model: ServedModel, request: ChatCompletionRequest, limits: RequestLimits) -> tuple[int, ...]:
    """Token ids of a chat, rendered by the model's template; special tokens inside message texts stay text."""
    messages = check_messages(request.messages, limits.messages)
    if model.chat_template is None:
        raise InvalidRequestError(NO_TEMPLATE, "messages", "no_chat_template")
    with about("messages"):
        chat = model.chat_template.render(
            messages,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            variables=request.chat_template_kwargs,
        )
        return tuple(chat.token_ids(model.tokenizer, max_tokens=model.context_length))


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _ids(raw: object, path: str) -> list[int]:
    if not isinstance(raw, list) or not raw:
        text = "it must be a string or a list of token ids with at least one"
        raise InvalidRequestError(f"{path} is {shown(raw)}; {text}", "prompt", "invalid_value")
    for index, token in enumerate(raw):
        if not _is_id(token):
            text = f"{path}[{index}] is {shown(token)}; token ids must be integers"
            raise InvalidRequestError(text, "prompt", "invalid_value")
    return raw
