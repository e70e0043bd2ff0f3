"""Incremental detokenisation: joined deltas equal the full decode, for every prefix of any id sequence."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neoserve.text.detokenize import IncrementalDetokenizer
from neoserve.text.tokenizer import Tokenizer

from .tiny_tokenizers import byte_level_metadata, sentencepiece_metadata, spelled, tokenizer

KINDS = {
    "byte_level": tokenizer(byte_level_metadata()),
    "sentencepiece": tokenizer(sentencepiece_metadata()),
    "no_prefix": tokenizer(sentencepiece_metadata(add_space_prefix=False, user_defined=("▁▁", "\n"))),
}


def ids_of(subject: Tokenizer) -> st.SearchStrategy[list[list[int]]]:
    """Sequences of ids, cut into pushes."""
    return st.lists(st.lists(st.integers(0, subject.vocab_size - 1), max_size=4), max_size=12)


def byte_ids(subject: Tokenizer, data: bytes) -> list[int]:
    """One byte token for each byte of ``data``."""
    by_bytes = {subject.token_bytes(i): i for i in reversed(range(subject.vocab_size)) if not subject.is_special(i)}
    return [by_bytes[bytes([byte])] for byte in data]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip_special_tokens", [True, False])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_deltas_of_every_prefix_join_to_its_decode(kind: str, skip_special_tokens: bool, data: st.DataObject) -> None:
    subject = KINDS[kind]
    pushes = data.draw(ids_of(subject))
    for end in range(len(pushes) + 1):
        stream = IncrementalDetokenizer(subject, skip_special_tokens)
        deltas = [stream.push(ids) for ids in pushes[:end]]
        whole = subject.decode([i for ids in pushes[:end] for i in ids], skip_special_tokens)
        assert "".join(deltas) + stream.finish() == whole


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=20))
def test_no_delta_holds_a_part_of_a_character(kind: str, text: str) -> None:
    subject = KINDS[kind]
    stream = IncrementalDetokenizer(subject, continues_text=True)
    deltas = [stream.push([i]) for i in byte_ids(subject, text.encode())]
    assert [delta for delta in deltas if delta] == list(text)
    assert stream.finish() == ""


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize(
    ("data", "deltas", "tail"),
    [
        (b"\xf0\x9f\x99\x82!", ["", "", "", "🙂", "!"], ""),
        (b"\xf0\x9f\x99", ["", "", ""], "\ufffd"),
        (b"a\xff", ["a", "\ufffd"], ""),
        (b"\xe2\x82A", ["", "", "\ufffdA"], ""),
        (b"\xe2\x82", ["", ""], "\ufffd"),
        (b"\xc3\xa9\xa9", ["", "é", "\ufffd"], ""),
        (
            "👨‍👩‍👧".encode(),
            ["", "", "", "👨", "", "", "\u200d", "", "", "", "👩", "", "", "\u200d", "", "", "", "👧"],
            "",
        ),
    ],
)
def test_known_byte_sequences(kind: str, data: bytes, deltas: list[str], tail: str) -> None:
    subject = KINDS[kind]
    stream = IncrementalDetokenizer(subject)
    assert [stream.push([i]) for i in byte_ids(subject, data)] == deltas
    assert stream.finish() == tail


def test_a_vocabulary_with_a_prefix_blank_drops_it_at_the_start_of_a_text_only() -> None:
    subject = KINDS["sentencepiece"]
    ids = subject.encode("hello world")
    fresh, continued = IncrementalDetokenizer(subject), IncrementalDetokenizer(subject, continues_text=True)
    assert fresh.push(ids) + fresh.push(ids) == "hello world hello world"
    assert continued.push(ids) == " hello world"


def test_special_tokens_are_skipped_or_written_out() -> None:
    subject = KINDS["byte_level"]
    ids = subject.encode("<|im_start|>hello<|im_end|><tool_call>", parse_special=True)
    assert len(ids) == 4
    assert IncrementalDetokenizer(subject).push(ids) == "hello<tool_call>"
    assert IncrementalDetokenizer(subject, False).push(ids) == "<|im_start|>hello<|im_end|><tool_call>"


def test_the_work_for_a_token_does_not_grow_with_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = tokenizer(byte_level_metadata())
    asked: list[int] = []
    original = Tokenizer.token_bytes
    monkeypatch.setattr(Tokenizer, "token_bytes", lambda self, i: asked.append(i) or original(self, i))
    stream = IncrementalDetokenizer(subject)
    ids = byte_ids(subject, b"\xe2" * 3000)
    asked.clear()
    for i in ids:
        stream.push([i])
    assert len(asked) == len(ids)


def test_bytes_of_a_token_written_outside_the_alphabet_are_its_text() -> None:
    subject = tokenizer(byte_level_metadata(tokens=None) | _with_token("<｜end｜>"))
    assert subject.token_bytes(0) == "<｜end｜>".encode()
    assert subject.token_bytes(subject.encode("hello")[0]) == b"hello"
    assert spelled(" é") == "ĠÃ©"


def _with_token(text: str) -> dict[str, object]:
    tokens = list(byte_level_metadata()["tokenizer.ggml.tokens"])  # type: ignore[call-overload]
    return {"tokenizer.ggml.tokens": [text, *tokens[1:]]}
