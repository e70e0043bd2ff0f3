"""Chat templates: messages to the text, and the token ids, that the model was trained to see."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes

from neoserve.text.messages import Message, TemplateHabits, normalise_messages, plain_json, system_into_user
from neoserve.text.render_budget import BudgetError, RenderLimits
from neoserve.text.sandbox import RaisedByTemplate, TemplateEnvironment, spending
from neoserve.text.tokenizer import Tokenizer
from neoserve.types.errors import InvalidRequestError
from neoserve.types.model import TokenizerSource

_log = logging.getLogger(__name__)

# Characters that Unicode sets aside for internal use: they mark places in text and never belong to it.
_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
_PROBE = "neoserve probe"
_PROBE_LIMITS = RenderLimits(operations=20_000, characters=1_000_000, total_characters=4_000_000, seconds=1.0)
_RESERVED = frozenset(
    {
        "messages",
        "conversation",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "tokenize",
        "tokenizer",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A rendered chat. ``text`` is the prompt.

    In ``marked``, ``mark`` (None: not needed) breaks special-token text that came with the request.
    """

    text: str
    marked: str
    mark: str | None

    def token_ids(self, tokenizer: Tokenizer, *, add_bos: bool = False, max_tokens: int | None = None) -> list[int]:
        """The prompt's ids, as Hugging Face gives them for the whole text: the template's special tokens are parsed.

        Special-token text from the request stays text. Only the template writes BOS unless ``add_bos``, and
        it is never doubled. ``max_tokens`` as in ``Tokenizer.encode``.
        """
        if self.mark is None:
            return tokenizer.encode(self.text, add_bos=add_bos, parse_special=True, max_tokens=max_tokens)
        return tokenizer.encode_marked(self.marked, self.mark, add_bos=add_bos, max_tokens=max_tokens)


class ChatTemplate:
    """The named chat templates of one model, in Hugging Face's dialect of Jinja. Safe to share between threads.

    A template that does not compile is reported once in the log and refuses every chat with the reason; completions
    are not affected. ``origin`` says where the templates come from. ``now`` is the clock of ``strftime_now``.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        tokenizer: Tokenizer,
        *,
        origin: str | None = None,
        limits: RenderLimits | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.origin = origin
        self._tokenizer = tokenizer
        self._limits = limits or RenderLimits()
        environment = TemplateEnvironment(now)
        self._fixed = dict(tokenizer.named_tokens)
        self._reserved = _RESERVED | set(self._fixed) | set(environment.globals)
        self._templates = {name: self._compile(environment, name, text) for name, text in templates.items()}

    @classmethod
    def from_source(cls, source: TokenizerSource, tokenizer: Tokenizer) -> ChatTemplate | None:
        """The templates of a checkpoint, or None if it has none."""
        if not source.chat_templates:
            return None
        return cls(source.chat_templates, tokenizer, origin=source.chat_template_origin)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the templates."""
        return tuple(self._templates)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        name: str | None = None,
        variables: Mapping[str, Any] | None = None,
        merge_system: bool = False,
    ) -> RenderedChat:
        """Render ``messages`` (see ``normalise_messages`` for what is taken).

        ``add_generation_prompt`` None means: unless ``continue_final_message``, which ends the prompt inside the last
        message. ``name`` picks a template; None is "tool_use" if there are tools and such a template, else
        "default". ``variables`` are further names for the template (``enable_thinking``). ``merge_system`` puts
        system text into the first user message, for templates without a system role.

        Raises InvalidRequestError: a bad message, a reserved variable, no such template, whatever the
        template raises, or a rendering beyond its limits.
        """
        template = self._pick(name, bool(tools))
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        if add_generation_prompt and continue_final_message:
            raise InvalidRequestError(
                "add_generation_prompt and continue_final_message exclude each other; give one",
                "continue_final_message",
            )
        inputs: dict[str, Any] = {
            "messages": normalise_messages(messages, template.habits),
            "tools": None if not tools else plain_json(list(tools), "tools"),
            "documents": None if documents is None else plain_json(list(documents), "documents"),
            "add_generation_prompt": add_generation_prompt,
            **self._checked_variables(variables or {}),
        }
        if merge_system:
            inputs["messages"] = system_into_user(inputs["messages"])
        strings = list(_strings(inputs))
        mark = self._mark(strings)
        if mark is not None:
            inputs = _marked(inputs, self._tokenizer, mark)
        if continue_final_message:
            text = self._continued(template, inputs, _unused(strings, but=mark))
        else:
            text = template.render({**self._fixed, **inputs})
        if mark is None:
            return RenderedChat(text, text, None)
        text = text.replace(_escaped(mark), mark)
        return RenderedChat(text.replace(mark, ""), text, mark)

    def _compile(self, environment: TemplateEnvironment, name: str, text: str) -> _Compiled:
        compiled = _Compiled(environment, name, text, self._limits, self._fixed)
        if compiled.fault is not None:
            _log.warning("%s; chats will be refused, completions are not affected", compiled.fault)
        return compiled

    def _pick(self, name: str | None, with_tools: bool) -> _Compiled:
        if name is None:
            name = "tool_use" if with_tools and "tool_use" in self._templates else "default"
        template = self._templates.get(name)
        if template is None:
            known = ", ".join(sorted(self._templates)) or "none"
            raise InvalidRequestError(
                f"the model has no chat template named {name!r} (there are: {known}); give one with --chat-template, "
                "or use /v1/completions",
                "messages",
                "no_chat_template",
            )
        return template

    def _checked_variables(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        for name in variables:
            if name in self._reserved or name.startswith("_"):
                raise InvalidRequestError(
                    f"chat_template_kwargs.{name} is reserved and cannot be set", f"chat_template_kwargs.{name}"
                )
        return {name: plain_json(value, f"chat_template_kwargs.{name}") for name, value in variables.items()}

    def _mark(self, strings: list[str]) -> str | None:
        """A character to break special-token text with, or None if the inputs hold none."""
        special = self._tokenizer.special_text
        return _unused(strings) if any(special.found_in(text) for text in strings) else None

    def _continued(self, template: _Compiled, inputs: dict[str, Any], tag: str) -> str:
        """The rendering up to the end of the last message's text."""
        messages: list[Message] = inputs["messages"]
        content = messages[-1]["content"] if messages else ""
        if not content:
            raise InvalidRequestError(
                "continue_final_message needs a last message with text to continue", "continue_final_message"
            )
        # A blank behind the tag shows whether the template trims the text.
        tagged: Any
        if isinstance(content, str):
            final, tagged = content, f"{content}{tag} "
        else:
            final = content[-1]["text"]
            tagged = [*content[:-1], {**content[-1], "text": f"{final}{tag} "}]
        inputs = {**inputs, "messages": [*messages[:-1], {**messages[-1], "content": tagged}]}
        text = template.render({**self._fixed, **inputs})
        place = text.rfind(tag)
        if place < 0 or final.strip() not in text:
            raise InvalidRequestError(
                "continue_final_message cannot be met: the chat template does not print the last message as it is",
                "continue_final_message",
            )
        return text[:place] if text.startswith(f"{tag} ", place) else text[:place].rstrip()


class _Compiled:
    """One template. ``fault`` says why it cannot be used."""

    def __init__(
        self, environment: TemplateEnvironment, name: str, text: str, limits: RenderLimits, fixed: Mapping[str, str]
    ) -> None:
        self.fault: str | None = None
        self._name = name
        self._limits = limits
        self._fixed = fixed
        self._roles: frozenset[str] = frozenset()
        self._knows_developer = False
        try:
            with spending(limits, None):
                self._template, tree = environment.compile_template(text)
            self._roles = frozenset(_roles(tree))
            self._knows_developer = any(node.value == "developer" for node in tree.find_all(nodes.Const))
        except jinja2.TemplateSyntaxError as error:
            self.fault = f"the chat template {name!r} is not valid: {error.message} (line {error.lineno})"
        except Exception as error:  # a hostile template can break the compiler in any way
            self.fault = f"the chat template {name!r} cannot be compiled: {_reason(error)}"

    @cached_property
    def habits(self) -> TemplateHabits:
        """What the template takes, found by rendering small chats."""
        known = TemplateHabits(roles=self._roles, developer=self._knows_developer)
        user = {"role": "user", "content": _PROBE}
        parts = {"role": "user", "content": [{"type": "text", "text": _PROBE}]}
        try:
            takes_parts = self._prints(_PROBE, [parts]) and not self._prints("'type'", [parts])
            takes_strings = self._prints(_PROBE, [user]) or not takes_parts
            takes_objects = self._calls({"probe": "value"}) or not self._calls('{"probe": "value"}')
        except BudgetError:  # a hostile template; whatever is rendered with it will say so
            return known
        return replace(known, strings=takes_strings, parts=takes_parts, argument_objects=takes_objects)

    def render(self, variables: Mapping[str, Any]) -> str:
        """The rendering; every failure is an InvalidRequestError."""
        if self.fault is not None:
            raise self._error(self.fault)
        try:
            return self._rendered(variables, self._limits)
        except RaisedByTemplate as error:
            raise self._error(str(error)) from error
        except (BudgetError, MemoryError, RecursionError) as error:
            raise self._error(f"rendering the chat template {self._name!r} was stopped: {_reason(error)}") from error
        except jinja2.exceptions.SecurityError as error:
            raise self._error(f"the chat template {self._name!r} does what is not allowed: {error}") from error
        except Exception as error:  # a template can fail like any program
            raise self._error(f"the chat template {self._name!r} failed on this chat: {_reason(error)}") from error

    def _rendered(self, variables: Mapping[str, Any], limits: RenderLimits) -> str:
        with spending(limits, variables):
            parts: list[str] = []
            size = 0
            for part in self._template.generate(variables):
                size += len(part)
                if size > limits.characters:
                    raise BudgetError(f"the prompt has more than {limits.characters} characters")
                parts.append(part)
            return "".join(parts)

    def _prints(self, text: str, messages: list[dict[str, Any]]) -> bool:
        try:
            variables = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": False}
            return self.fault is None and text in self._rendered({**self._fixed, **variables}, _PROBE_LIMITS)
        except BudgetError:
            raise
        except Exception:  # what the template cannot render is what the probe is for
            return False

    def _calls(self, arguments: Any) -> bool:
        call = {"id": "call00000", "type": "function", "function": {"name": "probe_tool", "arguments": arguments}}
        assistant = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "content": "", "tool_call_id": "call00000", "name": "probe_tool"}
        return self._prints('"probe"', [{"role": "user", "content": _PROBE}, assistant, result])

    @staticmethod
    def _error(text: str) -> InvalidRequestError:
        return InvalidRequestError(text, "messages", "chat_template_error")


def _roles(tree: nodes.Template) -> Iterator[str]:
    """Strings that the template compares roles with."""
    for comparison in tree.find_all(nodes.Compare):
        if any(_is_role(node) for node in comparison.find_all((nodes.Name, nodes.Getattr, nodes.Getitem))):
            texts = (node.value for node in comparison.find_all(nodes.Const) if isinstance(node.value, str))
            yield from (text for text in texts if text != "role")


def _is_role(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "role"
    return getattr(node, "attr", None) == "role" or getattr(node, "name", None) == "role"


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if not isinstance(error, BudgetError) else str(error)


def _strings(value: Any) -> Iterator[str]:
    """Every string in ``value``, names of members included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _marked(inputs: dict[str, Any], tokenizer: Tokenizer, mark: str) -> dict[str, Any]:
    def marked(value: Any) -> Any:
        if isinstance(value, str):
            return tokenizer.special_text.broken_by(value, mark)
        if isinstance(value, dict):
            return {marked(key): marked(item) for key, item in value.items()}
        return [marked(item) for item in value] if isinstance(value, list) else value

    return {name: marked(value) for name, value in inputs.items()}


def _unused(strings: list[str], but: str | None = None) -> str:
    """A noncharacter that occurs nowhere in ``strings``, neither as itself nor as a JSON escape."""
    for candidate in _NONCHARACTERS:
        if candidate != but and not any(candidate in text or _escaped(candidate) in text for text in strings):
            return candidate
    raise InvalidRequestError(
        "the messages hold every noncharacter from U+FDD0 to U+FDEF; remove them, they are not text", "messages"
    )


def _escaped(character: str) -> str:
    return json.dumps(character)[1:-1]
