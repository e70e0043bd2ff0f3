"""The bytes that each token stands for, read off a tokenizer's decoder.

Decoding here is: join the bytes of the tokens, then read the whole as UTF-8 with U+FFFD for each maximal invalid
part. For byte-level vocabularies that is what the ``tokenizers`` library does. For SentencePiece vocabularies the
library replaces every byte of a run of byte tokens as soon as one of them is invalid, which no stream could
reproduce without holding the whole run back; on valid UTF-8 the two agree.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import tokenizers

from neoserve.types.errors import UnsupportedModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes are themselves, the other 68 follow from U+0100 in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


BYTE_ALPHABET: Mapping[str, int] = _byte_alphabet()


class TokenBytes:
    """Maps token text to bytes as the decoder of one tokenizer does.

    ``leading_blanks`` is how many blanks the decoder drops at the start of a text. Raises
    UnsupportedModelError for a decoder that is not byte-level, SentencePiece-like or Metaspace.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self.leading_blanks = 0
        self._byte_level = False
        self._byte_fallback = False
        self._replacements: list[tuple[str, str]] = []
        if tokenizer.decoder is None:
            raise UnsupportedModelError("tokenizer.json has no decoder; token text cannot be joined without one")
        self._read(json.loads(tokenizer.decoder.__getstate__()))

    def of(self, text: str) -> bytes:
        """The bytes of the token whose vocabulary entry is ``text``."""
        if self._byte_level:
            found = [BYTE_ALPHABET.get(character) for character in text]
            # A special token written outside the alphabet is plain text.
            return text.encode() if None in found else bytes(byte for byte in found if byte is not None)
        for old, new in self._replacements:
            text = text.replace(old, new)
        byte = _BYTE_TOKEN.fullmatch(text) if self._byte_fallback else None
        return bytes([int(byte[1], 16)]) if byte else text.encode()

    def _read(self, decoder: dict[str, Any]) -> None:
        kind = decoder.get("type")
        if kind == "Sequence":
            for part in decoder["decoders"]:
                self._read(part)
        elif kind == "ByteLevel":
            self._byte_level = True
        elif kind == "ByteFallback":
            self._byte_fallback = True
        elif kind == "Fuse":
            pass  # tokens are always joined here
        elif kind == "Replace" and "String" in decoder["pattern"]:
            self._replacements.append((decoder["pattern"]["String"], decoder["content"]))
        elif kind == "Strip" and decoder["content"] == " " and decoder["stop"] == 0:
            self.leading_blanks += decoder["start"]
        elif kind == "Metaspace":
            self._replacements.append((decoder["replacement"], " "))
            self.leading_blanks += decoder.get("prepend_scheme", "always") != "never"
        else:
            raise UnsupportedModelError(
                f"tokenizer.json's decoder {decoder} is not supported; supported are ByteLevel, Metaspace, and "
                "Sequence of Replace, ByteFallback, Fuse and Strip of leading blanks"
            )
