"""Writes tokenizer_ids.json: token ids of awkward strings by other tokenizers than ours.

Run with transformers, gguf and sentencepiece installed, on a folder with the three model files:
    python tests/unit/golden/make_tokenizer_ids.py FOLDER

Qwen2 and SmolLM2 are tokenised by transformers' own classes around the file's vocabulary and merges (SmolLM2 with
the pre-tokenizer of its published tokenizer.json: single digits, then GPT-2's words); Gemma 3 by the
sentencepiece library from a model assembled out of the file's pieces and scores.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import sentencepiece
from gguf import GGUFReader
from tokenizers import AddedToken, pre_tokenizers
from transformers import GPT2Tokenizer, Qwen2Tokenizer

TEXTS = [
    "",
    " ",
    "  ",
    "a",
    "Hello, world!",
    " leading and trailing ",
    "two  blanks,   three,                                   and many",
    "tabs\tand\t\ttabs\n\nnew\n\n\nlines\r\nand returns\r",
    "\n",
    "\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n",
    " \n \n\t \n",
    "It's we'll I'M THEY'RE can't 'twas ''",
    "3.14159 1,000,000 2024-01-31 0x1F 10^-5 12345678901234567890",
    "def f(x):\n    return x ** 2  # square\n\n\nclass A:\n\tpass\n",
    '<div class="a&b">x &lt; y</div> <!-- c --> <b></b>',
    "naïve café Zürich Ærøskøbing",
    "cafe\u0301 a\u030angstro\u0308m",
    "Привет, мир! Здравствуйте.",
    "你好,世界。今天天气很好!",
    "こんにちは、カタカナと漢字ABC123",
    "안녕하세요 세계",
    "مرحبا بالعالم שלום עולם",
    "नमस्ते दुनिया ไทยภาษา",
    "🙂🎉 👨‍👩‍👧‍👦 🇩🇪 👍🏽 ❤️",
    "𝕳𝖊𝖑𝖑𝖔 ① ½ Ⅳ ㎏ ﬁ",
    "a\u00a0b\u2003c\u3000d\u200be\ufefff\u2028g",
    "\x00\x01\x1b[31m\x7f",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "............ ---------- ========== !!!!!! ??? ...",
    "https://example.com/a_b?c=d&e=%20#f user@mail.org C:\\dir\\file.txt",
    "CamelCaseWORDSandsnake_case__dunder__ kebab-case",
    "▁under▁bar ▁ <0x41> Ġword Ċ",
    "[multimodal] <table><tr> </tr></table><ul>",
    "\U0010ffff\ue000\ufffd",
    "ſ'S K Å ẞ İ ı",
    "x\u0300\u0301\u0302\u0303\u0304 Z\u0351\u036b\u0343",
]
# Parsed as special tokens by each model's own vocabulary where it has them.
SPECIAL = "<|im_start|>user\nhi<|im_end|>\n<bos><start_of_turn>x<end_of_turn><eos> <tool_call> <|endoftext|>"


def metadata(path: Path) -> dict:
    return {key: field.contents() for key, field in GGUFReader(path).fields.items() if key.startswith("tokenizer.")}


def byte_level(fields: dict, kind: type) -> list[list[int]]:
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    vocab = {text: token for token, (text, type_) in enumerate(zip(tokens, types, strict=True)) if type_ != 5}
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = kind(vocab=vocab, merges=merges).backend_tokenizer
    for text, type_ in zip(tokens, types, strict=True):
        if type_ in (3, 4):
            (tokenizer.add_special_tokens if type_ == 3 else tokenizer.add_tokens)([AddedToken(text, normalized=False)])
    if fields["tokenizer.ggml.pre"] == "smollm":
        words = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in [*TEXTS, SPECIAL]]


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def blob(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def number(number: int, value: int) -> bytes:
    return varint(number << 3) + varint(value)


def sentencepiece_model(fields: dict) -> bytes:
    """A ModelProto: BPE with byte fallback, no prefix blank, no normalisation."""
    out = []
    kinds = {1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6}
    for token, (text, score, type_) in enumerate(
        zip(
            fields["tokenizer.ggml.tokens"],
            fields["tokenizer.ggml.scores"],
            fields["tokenizer.ggml.token_type"],
            strict=True,
        )
    ):
        kind = 2 if token == fields["tokenizer.ggml.unknown_token_id"] else kinds[type_]
        piece = blob(1, text.replace(" ", "▁").encode()) + b"\x15" + struct.pack("<f", score) + number(3, kind)
        out.append(blob(1, piece))
    special = (number(40, 3), number(41, 2), number(42, 1), number(43, 0))
    trainer = number(3, 2) + number(4, len(out)) + number(35, 1) + b"".join(special)
    normalizer = blob(1, b"identity") + number(3, 0) + number(4, 0) + number(5, 1)
    return b"".join(out) + blob(2, trainer) + blob(3, normalizer)


def main() -> None:
    folder = Path(sys.argv[1])
    smollm = byte_level(metadata(folder / "smollm2-135m-instruct-q4_1.gguf"), GPT2Tokenizer)
    qwen = byte_level(metadata(folder / "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"), Qwen2Tokenizer)
    gemma = metadata(folder / "gemma-3-270m-q4_k_m.gguf")
    pieces = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model(gemma))
    result = {
        "texts": TEXTS,
        "special": SPECIAL,
        "smollm2-135m-instruct-q4_1.gguf": {"ids": smollm[:-1], "special": smollm[-1]},
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf": {"ids": qwen[:-1], "special": qwen[-1]},
        # sentencepiece never parses special tokens from text.
        "gemma-3-270m-q4_k_m.gguf": {"ids": [pieces.encode(text) for text in TEXTS], "special": None},
    }
    target = Path(__file__).with_name("tokenizer_ids.json")
    target.write_text(json.dumps(result, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
