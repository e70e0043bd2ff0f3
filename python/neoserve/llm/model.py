"""A loaded model with its text tools: what LLM and AsyncLLM share."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from neoserve.engine.load import LoadedModel, load_engine
from neoserve.text.load import load_tokenizer
from neoserve.text.output import OutputProcessor
from neoserve.text.template import ChatTemplate
from neoserve.text.tokenizer import Tokenizer
from neoserve.types.errors import ConfigurationError, InvalidRequestError
from neoserve.types.options import EngineOptions
from neoserve.types.request import GenerateRequest
from neoserve.types.sampling import SamplingParams

Prompt = str | Sequence[int]
"""A text (which may spell special tokens; BOS is added where the model wants it) or token ids, taken as they are."""
Messages = Sequence[Mapping[str, Any]]
"""One conversation in OpenAI's form: ``[{"role": "user", "content": "Hello"}]``."""

_SEED_BITS = 63


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as token ids, with its text if it had one. ``continues_text``: not the start of an answer."""

    token_ids: tuple[int, ...]
    text: str | None
    continues_text: bool


class LoadedText:
    """A loaded model with its text tools: what both interfaces share."""

    def __init__(
        self,
        model: str | Path | None,
        options: EngineOptions,
        chat_template: str | Path | None,
        tokenizer_pre: str | None,
    ) -> None:
        self.loaded: LoadedModel = load_engine(None if model is None else str(model), options)
        try:
            source = self.loaded.tokenizer_source
            self.tokenizer: Tokenizer = load_tokenizer(source, pre_override=tokenizer_pre)
            self.template = (
                ChatTemplate.from_source(source, self.tokenizer)
                if chat_template is None
                else ChatTemplate({"default": _template_text(chat_template)}, self.tokenizer)
            )
            self.loaded.core.restrict_vocabulary(self.tokenizer.vocab_size)
        except BaseException:
            self.loaded.close()
            raise
        # The tokenizer also knows end-of-turn tokens that a checkpoint need not declare.
        self.eos_token_ids = tuple(dict.fromkeys((*self.loaded.eos_token_ids, *self.tokenizer.eos_ids)))
        self._count = 0

    def default_sampling(self) -> SamplingParams:
        """SamplingParams as the checkpoint recommends; our defaults where it says nothing."""
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        given = {name: getattr(self.loaded.generation, name) for name in names}
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})

    def encode(self, prompt: Prompt) -> EncodedPrompt:
        """Raises ContextLengthError, before any work, for a text that cannot fit."""
        if not isinstance(prompt, str):
            return EncodedPrompt(tuple(prompt), None, True)
        limit = self.loaded.core.context_length
        ids = self.tokenizer.encode(prompt, add_bos=self.tokenizer.adds_bos, parse_special=True, max_tokens=limit)
        return EncodedPrompt(tuple(ids), prompt, True)

    def encode_chat(self, messages: Messages, arguments: Mapping[str, Any]) -> EncodedPrompt:
        """``arguments`` are those of ChatTemplate.render."""
        if self.template is None:
            raise InvalidRequestError(
                "the model has no chat template; give one as chat_template, or use generate()", "messages"
            )
        chat = self.template.render(messages, **arguments)
        ids = chat.token_ids(self.tokenizer, max_tokens=self.loaded.core.context_length)
        return EncodedPrompt(tuple(ids), chat.text, bool(arguments.get("continue_final_message")))

    def request(
        self, prompt: EncodedPrompt, sampling: SamplingParams | None, prompt_logprobs: int | None
    ) -> GenerateRequest:
        """A checked request with an id and a seed of its own."""
        sampling = sampling or self.default_sampling()
        if sampling.seed is None:
            sampling = replace(sampling, seed=secrets.randbits(_SEED_BITS))
        self._count += 1
        request = GenerateRequest(
            request_id=f"request-{self._count}",
            prompt_token_ids=prompt.token_ids,
            sampling=sampling,
            eos_token_ids=self.eos_token_ids,
            prompt_logprobs=prompt_logprobs,
        )
        self.loaded.core.check(request)
        return request

    def processor(self, prompt: EncodedPrompt, request: GenerateRequest) -> OutputProcessor:
        """What turns the request's deltas into text."""
        return OutputProcessor(self.tokenizer, request, continues_text=prompt.continues_text)


def engine_options(given: Mapping[str, Any]) -> EngineOptions:
    """EngineOptions from keyword arguments; raises ConfigurationError for an unknown one, with the known ones."""
    known = [field.name for field in fields(EngineOptions)]
    for name in given:
        if name not in known:
            raise ConfigurationError(f"option {name} is unknown; the options are {', '.join(known)}")
    return EngineOptions(**given)


def _template_text(template: str | Path) -> str:
    if isinstance(template, str):
        return template
    try:
        return template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"chat_template {template}: {error}; give a readable UTF-8 file") from error
