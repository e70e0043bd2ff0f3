"""Small vocabularies as GGUF metadata, and the tokenizers built from them."""

from __future__ import annotations

from neoserve.text.load import load_tokenizer
from neoserve.text.token_bytes import BYTE_ALPHABET
from neoserve.text.tokenizer import Tokenizer
from neoserve.types.model import TokenizerSource

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_TO_ALPHABET = {byte: character for character, byte in BYTE_ALPHABET.items()}


def spelled(text: str) -> str:
    """``text`` in the byte-level alphabet."""
    return "".join(_TO_ALPHABET[byte] for byte in text.encode())


def byte_level_metadata(**changes: object) -> dict[str, object]:
    """Control tokens 0 to 3, the 256 bytes, a few merges, a user-defined token and an unused id."""
    words = ["he", "ll", "hell", "hello", "Ġw", "or", "Ġwor", "ld", "Ġworld", "ĠĠ", "12"]
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld", "Ġ Ġ", "1 2"]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>", *BYTE_ALPHABET, *words, "<tool_call>", "[PAD]"]
    kinds = [CONTROL] * 3 + [UNKNOWN] + [NORMAL] * (256 + len(words)) + [USER_DEFINED, UNUSED]
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return _changed(metadata, changes)


def sentencepiece_metadata(
    pieces: dict[str, float] | None = None, user_defined: tuple[str, ...] = (), **changes: object
) -> dict[str, object]:
    """<unk> <s> </s>, user-defined pieces, the 256 byte pieces, then ``pieces`` with their scores."""
    if pieces is None:
        order = ["he", "ll", "hell", "hello", "▁w", "or", "▁wor", "ld", "▁world", "▁hello"]
        letters = ["▁", "h", "e", "l", "o", "w", "r", "d", "é", "1"]
        pieces = {piece: -float(rank) for rank, piece in enumerate([*order, *letters])}
    tokens = ["<unk>", "<s>", "</s>", *user_defined, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[USER_DEFINED] * len(user_defined), *[BYTE] * 256, *[NORMAL] * len(pieces)]
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [0.0] * (len(tokens) - len(pieces)) + list(pieces.values()),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return _changed(metadata, changes)


def _changed(metadata: dict[str, object], changes: dict[str, object]) -> dict[str, object]:
    """``changes`` by the part of the key behind ``tokenizer.ggml.``; None removes the key."""
    metadata.update({f"tokenizer.ggml.{key}": value for key, value in changes.items()})
    return {key: value for key, value in metadata.items() if value is not None}


def tokenizer(metadata: dict[str, object]) -> Tokenizer:
    """Built without the disk cache."""
    return load_tokenizer(TokenizerSource(gguf=metadata))
