"""Log probabilities in OpenAI's two layouts: that of chat and the older one of completions.

``bytes`` are always the token's own bytes. A token that is only a part of a character has no text; its ``token`` is
then its bytes written as ``\\xe2\\x80``, with ``bytes:`` before them in the layout of completions, as OpenAI does.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Iterable, Sequence

from neoserve.types.request import TokenLogprob

TokenBytes = Callable[[int], bytes]
Columns = dict[str, list[object]]

# JSON has no minus infinity; this is what other servers send for a probability of zero.
LOWEST_LOGPROB = -9999.0


def chat_logprobs(entries: Iterable[TokenLogprob], token_bytes: TokenBytes) -> list[dict[str, object]]:
    """``choices[].logprobs.content`` for some tokens."""
    content: list[dict[str, object]] = []
    for entry in entries:
        item = _chat_entry(entry.token_id, entry.logprob, token_bytes)
        item["top_logprobs"] = [_chat_entry(token, value, token_bytes) for token, value in entry.top]
        content.append(item)
    return content


class CompletionLogprobs:
    """The older layout, built up over the life of one choice.

    ``text_offset`` counts characters of the choice's text, the echoed prompt included, before each token. ``offset``
    is where the first token's bytes begin; it is negative when bytes at the start (BOS, a blank that the tokenizer
    adds) are not in the text. ``hidden`` are ids that are not shown in generated text.
    """

    def __init__(self, token_bytes: TokenBytes, offset: int = 0, hidden: Collection[int] = ()) -> None:
        self._token_bytes = token_bytes
        self._offset = offset
        self._hidden = hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def prompt(self, token_ids: Sequence[int], entries: Sequence[TokenLogprob | None]) -> Columns:
        """The object for an echoed prompt; the entry of its first token is None, as nothing predicts it."""
        return self._columns(token_ids, entries, ())

    def generated(self, entries: Sequence[TokenLogprob]) -> Columns:
        """The object for the next generated tokens."""
        return self._columns([entry.token_id for entry in entries], entries, self._hidden)

    def _columns(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprob | None], hidden: Collection[int]
    ) -> Columns:
        columns = _no_columns()
        for token, entry in zip(token_ids, entries, strict=True):
            raw = self._token_bytes(token)
            columns["tokens"].append(_text(raw, "bytes:"))
            columns["text_offset"].append(max(self._offset, 0))
            if token not in hidden:
                self._offset += len(self._decoder.decode(raw))
            columns["token_logprobs"].append(None if entry is None else _finite(entry.logprob))
            columns["top_logprobs"].append(None if entry is None else self._alternatives(entry))
        return columns

    def _alternatives(self, entry: TokenLogprob) -> dict[str, float]:
        """Best first; the chosen token is always among them. Of two tokens with one text the likelier stays."""
        best: dict[str, float] = {}
        for token, value in (*entry.top, (entry.token_id, entry.logprob)):
            best.setdefault(_text(self._token_bytes(token), "bytes:"), _finite(value))
        return best


def merge(parts: Iterable[Columns]) -> Columns:
    """Several objects of the older layout as one."""
    merged = _no_columns()
    for part in parts:
        for key, values in part.items():
            merged[key].extend(values)
    return merged


def _no_columns() -> Columns:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _chat_entry(token: int, value: float, token_bytes: TokenBytes) -> dict[str, object]:
    raw = token_bytes(token)
    return {"token": _text(raw, ""), "logprob": _finite(value), "bytes": list(raw)}


def _text(raw: bytes, prefix: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(value: float) -> float:
    return max(float(value), LOWEST_LOGPROB)
