"""Answers in OpenAI's shape: whole objects and stream chunks of chat and text completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from neoserve.api.logprobs import Columns, CompletionLogprobs, TokenBytes, chat_logprobs, merge
from neoserve.api.usage import Usage
from neoserve.text.output import TextDelta

Json = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What every object of one answer has in common, equal over all chunks."""

    id: str
    model: str
    fingerprint: str | None
    created: int = field(default_factory=lambda: int(time.time()))

    def wrap(self, kind: str, choices: Sequence[Json], **more: object) -> Json:
        """An object of ``kind`` with ``choices``."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": list(choices),
            **more,
        }


class Renderer(Protocol):
    """Turns the deltas of one request into chunks or into one whole object.

    An instance serves one request in one of the two ways: ``chunks`` for a stream, or ``add`` and ``whole``.
    """

    def chunks(self, index: int, delta: TextDelta) -> list[Json]:
        """The choices arrays' entries that ``delta`` of choice ``index`` adds to a stream."""
        ...

    def chunk(self, choices: Sequence[Json], **more: object) -> Json:
        """A stream chunk around ``choices``."""
        ...

    def add(self, index: int, delta: TextDelta) -> None:
        """Keeps ``delta`` for ``whole``."""
        ...

    def whole(self, usage: Usage) -> Json:
        """The object of an answer that is not streamed."""
        ...


class ChatRenderer:
    """Objects ``chat.completion`` and ``chat.completion.chunk``."""

    def __init__(self, envelope: Envelope, choices: int, logprobs: bool, token_bytes: TokenBytes) -> None:
        self._envelope = envelope
        self._logprobs = logprobs
        self._token_bytes = token_bytes
        self._texts: list[list[str]] = [[] for _ in range(choices)]
        self._entries: list[list[Json]] = [[] for _ in range(choices)]
        self._reasons: list[str | None] = [None] * choices
        self._opened = [False] * choices

    def chunks(self, index: int, delta: TextDelta) -> list[Json]:
        """The role comes with a choice's first delta, the finish reason alone in its last chunk."""
        entries: list[Json] = []
        if not self._opened[index]:
            self._opened[index] = True
            entries.append(self._entry(index, {"role": "assistant", "content": "", "refusal": None}, None))
        content = chat_logprobs(delta.logprobs, self._token_bytes) if self._logprobs else []
        if delta.text or content:
            entries.append(self._entry(index, {"content": delta.text}, content or None))
        if delta.finish_reason is not None:
            entries.append({**self._entry(index, {}, None), "finish_reason": delta.finish_reason})
        return entries

    def chunk(self, choices: Sequence[Json], **more: object) -> Json:
        """See Renderer."""
        return self._envelope.wrap("chat.completion.chunk", choices, **more)

    def add(self, index: int, delta: TextDelta) -> None:
        """See Renderer."""
        self._texts[index].append(delta.text)
        if self._logprobs:
            self._entries[index].extend(chat_logprobs(delta.logprobs, self._token_bytes))
        self._reasons[index] = delta.finish_reason

    def whole(self, usage: Usage) -> Json:
        """See Renderer."""
        choices: list[Json] = [
            {
                "index": index,
                "message": {"role": "assistant", "content": "".join(self._texts[index]), "refusal": None},
                "logprobs": {"content": self._entries[index], "refusal": None} if self._logprobs else None,
                "finish_reason": reason,
            }
            for index, reason in enumerate(self._reasons)
        ]
        return self._envelope.wrap("chat.completion", choices, usage=usage.body())

    def _entry(self, index: int, delta: Json, content: list[Json] | None) -> Json:
        logprobs = None if content is None else {"content": content, "refusal": None}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt that a choice repeats before its own text."""

    text: str
    token_ids: tuple[int, ...]

    def offset(self, token_bytes: TokenBytes) -> int:
        """Where in ``text`` the first token's bytes begin: before it when the tokenizer put something in front."""
        raw = b"".join(token_bytes(token) for token in self.token_ids)
        return len(self.text) - len(raw.decode("utf-8", "replace"))


class CompletionRenderer:
    """Objects ``text_completion``, whole and as chunks, with echo and the older logprobs layout.

    ``writers`` and ``echoes`` have one entry per choice; a writer is None without logprobs. ``score_only`` drops what
    is generated (``max_tokens`` 0).
    """

    def __init__(
        self,
        envelope: Envelope,
        echoes: Sequence[Echo | None],
        writers: Sequence[CompletionLogprobs | None],
        score_only: bool = False,
    ) -> None:
        self._envelope = envelope
        self._echoes: list[Echo | None] = list(echoes)
        self._writers = writers
        self._score_only = score_only
        self._parts: list[list[Json]] = [[] for _ in echoes]

    def chunks(self, index: int, delta: TextDelta) -> list[Json]:
        """An entry only where there is text, log probabilities or the finish reason."""
        entry = self._entry(index, delta)
        logprobs = entry["logprobs"]
        scored = isinstance(logprobs, dict) and bool(logprobs["tokens"])
        return [entry] if entry["text"] or scored or delta.finish_reason is not None else []

    def chunk(self, choices: Sequence[Json], **more: object) -> Json:
        """See Renderer."""
        return self._envelope.wrap("text_completion", choices, **more)

    def add(self, index: int, delta: TextDelta) -> None:
        """See Renderer."""
        self._parts[index].append(self._entry(index, delta))

    def whole(self, usage: Usage) -> Json:
        """See Renderer."""
        choices: list[Json] = []
        for index, parts in enumerate(self._parts):
            logprobs = [part["logprobs"] for part in parts if isinstance(part["logprobs"], dict)]
            choices.append(
                {
                    "index": index,
                    "text": "".join(str(part["text"]) for part in parts),
                    "logprobs": None if self._writers[index] is None else merge(logprobs),
                    "finish_reason": parts[-1]["finish_reason"],
                }
            )
        return self._envelope.wrap("text_completion", choices, usage=usage.body())

    def _entry(self, index: int, delta: TextDelta) -> Json:
        echo, self._echoes[index] = self._echoes[index], None
        text = ("" if echo is None else echo.text) + ("" if self._score_only else delta.text)
        reason = "length" if self._score_only and delta.finish_reason is not None else delta.finish_reason
        writer = self._writers[index]
        logprobs = None if writer is None else self._logprobs(writer, echo, delta)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, writer: CompletionLogprobs, echo: Echo | None, delta: TextDelta) -> Columns:
        parts: list[Columns] = []
        if echo is not None and delta.prompt_logprobs is not None:
            parts.append(writer.prompt(echo.token_ids, delta.prompt_logprobs))
        if not self._score_only:
            parts.append(writer.generated(delta.logprobs))
        return merge(parts)
