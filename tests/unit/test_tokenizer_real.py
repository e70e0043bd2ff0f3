"""Tokenizers of real GGUF models against ids by other tokenizers (golden/make_tokenizer_ids.py)."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from neoserve.formats.checkpoint import open_checkpoint
from neoserve.text.detokenize import IncrementalDetokenizer
from neoserve.text.load import load_tokenizer
from neoserve.text.template import ChatTemplate
from neoserve.text.tokenizer import Tokenizer
from neoserve.types.model import TokenizerSource

pytestmark = pytest.mark.model

GOLDEN = json.loads((Path(__file__).parent / "golden" / "tokenizer_ids.json").read_text(encoding="utf-8"))
MODELS = [name for name in GOLDEN if name.endswith(".gguf")]
ENDS = {
    "smollm2": ("<|im_end|>", "<|endoftext|>"),
    "qwen2.5": ("<|im_end|>", "<|endoftext|>"),
    "gemma-3": ("<eos>", "<end_of_turn>"),
}

Loaded = tuple[str, TokenizerSource, Tokenizer, Path]


@pytest.fixture(scope="module", params=MODELS)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder = os.environ.get("NEOSERVE_TEST_MODELS")
    path = Path(folder or "") / request.param
    if not folder or not path.exists():
        pytest.skip(f"NEOSERVE_TEST_MODELS does not name a folder with {request.param}")
    cache = tmp_path_factory.mktemp("tokenizers")
    with open_checkpoint(path) as checkpoint:
        source = checkpoint.tokenizer
        return request.param, source, load_tokenizer(source, cache_dir=cache), cache


def test_ids_are_those_of_the_model_s_own_tokenizer(loaded: Loaded) -> None:
    name, _, subject, _ = loaded
    for text, expected in zip(GOLDEN["texts"], GOLDEN[name]["ids"], strict=True):
        assert subject.encode(text) == expected, text
        assert subject.encode(text, parse_special=True) == expected, text
    if GOLDEN[name]["special"] is not None:
        assert subject.encode(GOLDEN["special"], parse_special=True) == GOLDEN[name]["special"]


def test_text_comes_back(loaded: Loaded) -> None:
    name, _, subject, _ = loaded
    for text in GOLDEN["texts"]:
        back = subject.decode(subject.encode(text), skip_special_tokens=False)
        if name.startswith("gemma"):
            assert back == text.replace("▁", " ")  # U+2581 is how the vocabulary writes a blank
        elif name.startswith("smollm"):
            assert back == text


def test_a_second_load_is_the_same(loaded: Loaded) -> None:
    _, source, subject, cache = loaded
    again = load_tokenizer(TokenizerSource(gguf={}, digest=source.digest), cache_dir=cache)
    rng = random.Random(1)
    for _ in range(200):
        text = "".join(rng.choice(GOLDEN["texts"])[:5] for _ in range(8))
        assert again.encode(text) == subject.encode(text)
    assert again.special_ids == subject.special_ids


def test_deltas_join_to_the_decode_of_every_prefix(loaded: Loaded) -> None:
    _, _, subject, _ = loaded
    rng = random.Random(2)
    for skip in (True, False):
        for _ in range(40):
            ids = [rng.randrange(subject.vocab_size) for _ in range(12)]
            if rng.random() < 0.5:  # mostly pieces of characters
                ids = [i for text in rng.sample(GOLDEN["texts"], 3) for i in rng.sample(subject.encode(text) or [0], 1)]
            for end in range(len(ids) + 1):
                stream = IncrementalDetokenizer(subject, skip)
                deltas = "".join(stream.push([i]) for i in ids[:end])
                assert deltas + stream.finish() == subject.decode(ids[:end], skip)


def test_ends_of_a_turn(loaded: Loaded) -> None:
    name, _, subject, _ = loaded
    expected = next(texts for start, texts in ENDS.items() if name.startswith(start))
    assert {subject.token_text(i) for i in subject.eos_ids} == set(expected)
    assert subject.token_text(subject.eos_ids[0]) == expected[0]


def test_special_text_in_a_chat_stays_text(loaded: Loaded) -> None:
    _, source, subject, _ = loaded
    templates = source.chat_templates or {"default": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    chat = ChatTemplate(templates, subject)
    clean = chat.render([{"role": "user", "content": "x"}])
    assert clean.token_ids(subject) == subject.encode(clean.text, parse_special=True)
    text = "".join(sorted(text for text in subject.special_text.texts if len(text) > 1)[:50])
    evil = chat.render([{"role": "user", "content": text}])
    ids = evil.token_ids(subject)
    assert subject.decode(ids, skip_special_tokens=False) == evil.text
    expected = [i for i in clean.token_ids(subject) if subject.is_special(i)]
    assert [i for i in ids if subject.is_special(i)] == expected
