"""AsyncLLM: concurrent streams, from an engine in a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any

from neoserve.engine.client import AsyncEngine
from neoserve.engine.load import LoadedModel
from neoserve.llm.model import EncodedPrompt, LoadedText, Messages, Prompt, engine_options
from neoserve.text.output import TextDelta
from neoserve.text.tokenizer import Tokenizer
from neoserve.types.sampling import SamplingParams


class AsyncLLM:
    """A model in this process for concurrent streams, run by a thread of its own. Arguments as for LLM.

    Loading blocks; the engine starts with the first request. Use as an asynchronous context manager, or call
    ``close``.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        chat_template: str | Path | None = None,
        tokenizer_pre: str | None = None,
        **options: Any,
    ) -> None:
        self._model = LoadedText(model, engine_options(options), chat_template, tokenizer_pre)
        self._client = AsyncEngine(self._model.loaded.core)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._model.tokenizer

    @property
    def client(self) -> AsyncEngine:
        """The engine's client."""
        return self._client

    @property
    def loaded(self) -> LoadedModel:
        """What was loaded: configuration, summary, details."""
        return self._model.loaded

    def default_sampling_params(self) -> SamplingParams:
        """What ``generate`` uses without ``sampling_params``: the checkpoint's recommendation."""
        return self._model.default_sampling()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        prompt_logprobs: int | None = None,
    ) -> AsyncGenerator[TextDelta, None]:
        """Completes a prompt piece by piece; the last delta has a ``finish_reason``.

        Leaving the stream (aclose, cancellation) aborts the request within a step. Raises InvalidRequestError,
        ContextLengthError, QueueFullError or EngineDeadError at the first item.
        """
        encoded = await asyncio.to_thread(self._model.encode, prompt)
        async with aclosing(self._stream(encoded, sampling_params, prompt_logprobs)) as stream:
            async for delta in stream:
                yield delta

    async def chat(
        self, messages: Messages, sampling_params: SamplingParams | None = None, **template_arguments: Any
    ) -> AsyncGenerator[TextDelta, None]:
        """Answers a conversation piece by piece; arguments as for LLM.chat, otherwise as ``generate``."""
        encoded = await asyncio.to_thread(self._model.encode_chat, messages, template_arguments)
        async with aclosing(self._stream(encoded, sampling_params, None)) as stream:
            async for delta in stream:
                yield delta

    async def close(self, drain_seconds: float = 0.0) -> None:
        """Refuses new requests, lets those in flight go on for ``drain_seconds``, then ends the engine."""
        await self._client.stop(drain_seconds)

    async def __aenter__(self) -> AsyncLLM:
        await self._client.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _stream(
        self, prompt: EncodedPrompt, sampling: SamplingParams | None, prompt_logprobs: int | None
    ) -> AsyncGenerator[TextDelta, None]:
        request = self._model.request(prompt, sampling, prompt_logprobs)
        processor = self._model.processor(prompt, request)
        await self._client.start()
        async with aclosing(self._client.generate(request)) as stream:
            async for delta in stream:
                text = processor.process(delta)
                yield text
                if text.finish_reason is not None:
                    return
