"""Log probabilities in OpenAI's two layouts: that of chat and the older one of completions.

``bytes`` are always the token's own bytes. A token that is only a part of a character has no text; its ``token`` is
then its bytes written as ``\\xe2\\x80``, with ``bytes:`` before them in the layout of completions, as OpenAI does.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from neoserve.types.request import TokenLogprob

TokenBytes = Callable[[int], bytes]

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


@dataclass(slots=True)
class CompletionLogprobs:
    """The older layout, built up over the life of one choice.

    ``text_offset`` counts characters of the choice's text (the echoed prompt included) before each token.
    """

    token_bytes: TokenBytes
    _offset: int = 0
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )

    def body(self, token_ids: Sequence[int], entries: Sequence[TokenLogprob | None]) -> dict[str, list[object]]:
        """The object for the next tokens; an entry is None where there is no probability (the first prompt token)."""
        result: dict[str, list[object]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, entry in zip(token_ids, entries, strict=True):
            raw = self.token_bytes(token)
            result["tokens"].append(_text(raw, "bytes:"))
            result["text_offset"].append(self._offset)
            self._offset += len(self._decoder.decode(raw))
            result["token_logprobs"].append(None if entry is None else _finite(entry.logprob))
            result["top_logprobs"].append(None if entry is None else self._alternatives(entry))
        return result

    def _alternatives(self, entry: TokenLogprob) -> dict[str, float]:
        """Best first; the chosen token is always among them. Of two tokens with one text the likelier stays."""
        best: dict[str, float] = {}
        for token, value in (*entry.top, (entry.token_id, entry.logprob)):
            best.setdefault(_text(self.token_bytes(token), "bytes:"), _finite(value))
        return best


def merge(parts: Iterable[dict[str, list[object]]]) -> dict[str, list[object]]:
    """Several objects of the older layout as one."""
    merged: dict[str, list[object]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for part in parts:
        for key, values in part.items():
            merged[key].extend(values)
    return merged


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
