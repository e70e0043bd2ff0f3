"""Token ids to text, piece by piece."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from neoserve.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Turns a stream of token ids into text deltas.

    Joined deltas, with ``finish`` at the end, equal ``tokenizer.decode`` of all ids for every sequence and every way
    of cutting it. Bytes of a character that is not complete yet are held back; nothing else is. Work and memory do
    not grow with the length of the stream.

    ``continues_text``: the ids follow other text of the same stream (a completion of a prompt), so a leading blank
    is part of the answer even where the vocabulary's decoder drops the one in front of a text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, *, continues_text: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._blanks_to_drop = 0 if continues_text else tokenizer.leading_blanks
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that ``ids`` complete."""
        tokenizer = self._tokenizer
        data = b"".join(
            tokenizer.token_bytes(token_id)
            for token_id in ids
            if not (self._skip_special and tokenizer.is_special(token_id))
        )
        if self._blanks_to_drop and data:
            data = self._without_leading_blanks(data)
        return self._decoder.decode(data)

    def finish(self) -> str:
        """The end of the text: one U+FFFD if the last character is incomplete, else nothing."""
        return self._decoder.decode(b"", final=True)

    def _without_leading_blanks(self, data: bytes) -> bytes:
        blanks = len(data) - len(data.lstrip(b" "))
        dropped = min(blanks, self._blanks_to_drop)
        # The first other character ends the start of the text.
        self._blanks_to_drop = self._blanks_to_drop - dropped if blanks == len(data) else 0
        return data[dropped:]
