"""One HTTP request as one or more engine requests, merged into batches of text.

Everything that has arrived when the consumer is ready comes as one batch, so that a stream makes one write per
engine step however many choices it has.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from neoserve.api.disconnect import cancel
from neoserve.api.errors import ApiError, about, unavailable
from neoserve.api.metrics import RequestTimer
from neoserve.api.state import ServerState, Service
from neoserve.text.output import OutputProcessor, TextDelta
from neoserve.types.errors import EngineDeadError, InvalidRequestError, QueueFullError
from neoserve.types.request import GenerateRequest, TokenDelta
from neoserve.types.sampling import SamplingParams

Batch = list[tuple[int, TextDelta]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One choice of an answer: what the engine is asked for.

    ``continues_text`` says that the output goes on where the prompt's text ends, instead of beginning a message.
    ``cache_salt`` and ``extra_key`` are the request's.
    """

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    prompt_logprobs: int | None = None
    continues_text: bool = False
    cache_salt: str | None = None
    extra_key: str | None = None


class Generation:
    """Runs all choices of one request. Use ``batches`` once, and close it: closing aborts what still runs.

    ``prompt_field`` is the request's name for the prompt, for errors of the engine about it.
    """

    def __init__(
        self, state: ServerState, service: Service, request_id: str, choices: Sequence[Choice], prompt_field: str
    ) -> None:
        self._state = state
        self._service = service
        self._request_id = request_id
        self._choices = tuple(choices)
        self._prompt_field = prompt_field
        self._pending: Batch = []
        self._news = asyncio.Event()
        self._error: Exception | None = None
        self._unfinished = len(self._choices)

    @property
    def finished(self) -> bool:
        """Whether the batches so far hold the finish reason of every choice."""
        return self._unfinished == 0

    def fail(self, error: Exception) -> None:
        """Ends the generation with ``error`` (raised by ``batches``) and aborts its engine requests."""
        if self._error is None:
            self._error = error
        self._news.set()

    async def batches(self, keep_alive: float | None = None) -> AsyncGenerator[Batch, None]:
        """Batches of (choice index, delta) in order of arrival, until every choice has its finish reason.

        With ``keep_alive``, an empty batch comes after so many seconds of silence. Raises what the engine raised
        (InvalidRequestError, QueueFullError, EngineDeadError) or ApiError when a choice failed.
        """
        self._state.ready()  # A drain may have begun while the prompt was being tokenised.
        self._state.enter(self)
        tasks: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(self._run(index, choice)) for index, choice in enumerate(self._choices)
        ]
        try:
            while self._unfinished:
                await self._wait_for_news(keep_alive)
                batch, self._pending = self._pending, []
                self._unfinished -= sum(delta.finish_reason is not None for _, delta in batch)
                if batch or self._error is None:
                    yield batch
                if self._error is not None:
                    raise self._error
        finally:
            # The client may leave while this waits: that cancellation must not skip the leaving.
            try:
                await cancel(*tasks)
            finally:
                self._state.leave(self)

    async def _wait_for_news(self, seconds: float | None) -> None:
        # Not asyncio.wait_for: before Python 3.12 it loses a cancellation that meets the end of what it waits for,
        # and the request of a client that has left would run to its end.
        alarm = None if seconds is None else asyncio.get_running_loop().call_later(seconds, self._news.set)
        try:
            await self._news.wait()
        finally:
            if alarm is not None:
                alarm.cancel()
        self._news.clear()

    async def _run(self, index: int, choice: Choice) -> None:
        timer = self._service.metrics.timer(len(choice.prompt_token_ids))
        try:
            with about(self._prompt_field):
                await self._generate(index, choice, timer)
        except (InvalidRequestError, QueueFullError) as error:
            timer.discard()
            self.fail(error)
        except Exception as error:
            timer.finish("error")
            self.fail(error)
        finally:
            # Only a cancelled request gets here without having been counted.
            timer.finish("abort")

    async def _generate(self, index: int, choice: Choice, timer: RequestTimer) -> None:
        model = self._service.model
        request = GenerateRequest(
            request_id=f"{self._request_id}-{index}",
            prompt_token_ids=choice.prompt_token_ids,
            sampling=choice.sampling,
            eos_token_ids=model.eos_token_ids,
            prompt_logprobs=choice.prompt_logprobs,
            cache_salt=choice.cache_salt,
            extra_key=choice.extra_key,
        )
        processor = OutputProcessor(model.tokenizer, request, continues_text=choice.continues_text)
        async with contextlib.aclosing(self._service.engine.generate(request)) as stream:
            async for delta in stream:
                timer.record(len(delta.token_ids))
                _check_delta(delta)
                text = processor.process(delta)
                self._pending.append((index, text))
                self._news.set()
                if text.finish_reason is not None:
                    timer.finish(text.finish_reason)
                    return
        raise EngineDeadError("the engine ended a request without a finish reason")


def _check_delta(delta: TokenDelta) -> None:
    if delta.finish_reason == "error":
        text = f"the request failed in the engine: {delta.error or 'no reason was given'}"
        raise ApiError(500, text, kind="server_error", code="engine_error")
    if delta.finish_reason == "abort":
        raise unavailable("the request was aborted before its end", "aborted")
