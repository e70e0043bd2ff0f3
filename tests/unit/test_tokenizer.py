"""Tokenizers built from GGUF metadata: ids, special tokens, refusals."""

from __future__ import annotations

import heapq
import random
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neoserve.text.load import load_tokenizer
from neoserve.text.splitters import SPLITTERS
from neoserve.text.tokenizer import Tokenizer
from neoserve.text.vocabulary import end_ids
from neoserve.types.errors import CheckpointError, ContextLengthError, InvalidRequestError, UnsupportedModelError
from neoserve.types.model import TokenizerSource

from .tiny_tokenizers import byte_level_metadata, sentencepiece_metadata, tokenizer

BYTES = tokenizer(byte_level_metadata())
PIECES = tokenizer(sentencepiece_metadata())


def texts(subject: Tokenizer, ids: list[int]) -> list[str]:
    return [subject.token_text(i) for i in ids]


# Byte-level BPE


def test_byte_level_merges_and_splits() -> None:
    assert texts(BYTES, BYTES.encode("hello world  12")) == ["hello", " world", "  ", "1", "2"]


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40))
def test_byte_level_decode_inverts_encode(text: str) -> None:
    assert BYTES.decode(BYTES.encode(text), skip_special_tokens=False) == text


def test_the_splitter_decides_the_words() -> None:
    by_three = tokenizer(byte_level_metadata(pre="gpt-2"))
    assert texts(by_three, by_three.encode("12")) == ["12"]
    assert texts(BYTES, BYTES.encode("12")) == ["1", "2"]


def test_an_override_replaces_the_file_s_splitter() -> None:
    subject = load_tokenizer(TokenizerSource(gguf=byte_level_metadata(pre=None)), pre_override="gpt-2")
    assert texts(subject, subject.encode("12")) == ["12"]


@pytest.mark.parametrize("pre", [None, "default", "never-heard-of", 7])
def test_an_unknown_splitter_is_refused_with_the_known_ones(pre: object) -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"tokenizer\.ggml\.pre is .*override it with one of: .*llama-bpe.*qwen2"
    ):
        tokenizer(byte_level_metadata(pre=pre))


@pytest.mark.parametrize("kind", ["bert", "t5", "rwkv", "plamo2", None])
def test_other_kinds_of_vocabulary_are_refused_by_name(kind: object) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"tokenizer\.ggml\.model is {kind!r}"):
        tokenizer(byte_level_metadata(model=kind))


@pytest.mark.parametrize("name", sorted(SPLITTERS))
@settings(max_examples=10, deadline=None)
@given(text=st.text(max_size=40))
def test_every_splitter_compiles_and_loses_nothing(name: str, text: str) -> None:
    pieces = SPLITTERS[name].pre_tokenizer().pre_tokenize_str(text)
    ends = [span for _, span in pieces]
    assert ends == sorted(ends)
    assert "".join(text[start:end] for start, end in ends) == text


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("llama-bpe", "I'M 12345 a\n\n b", ["I", "'M", " ", "123", "45", " a", "\n\n", " b"]),
        ("qwen2", "I'm 123 (x)", ["I", "'m", " ", "1", "2", "3", " (", "x", ")"]),
        ("smollm", "a 12  b", ["a", " ", "1", "2", " ", " b"]),
        ("gpt-2", "it's 12  b", ["it", "'s", " 12", " ", " b"]),
        ("tekken", "CamelCase 12", ["Camel", "Case", " ", "1", "2"]),
        ("gpt-4o", "don't 1234", ["don't", " ", "123", "4"]),
        ("deepseek-v3", "a12345b 漢字x", ["a", "123", "45", "b", " ", "漢字", "x"]),
        ("deepseek-llm", "ab 12", ["ab", " ", "1", "2"]),
        ("falcon", "a,b 12345", ["a", ",", "b", " ", "123", "45"]),
        ("tiny_aya", "12345", ["12", "345"]),
        ("qwen35", "ไทย ก็", ["ไทย", " ก็"]),
    ],
)
def test_words_of_splitters(name: str, text: str, words: list[str]) -> None:
    pieces = SPLITTERS[name].pre_tokenizer().pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in pieces] == words


def test_qwen2_normalises_to_nfc() -> None:
    subject = tokenizer(byte_level_metadata(pre="qwen2"))
    assert subject.encode("e\u0301") == subject.encode("é")
    assert BYTES.encode("e\u0301") != BYTES.encode("é")


def test_ignored_merges_take_a_whole_word() -> None:
    metadata = byte_level_metadata(pre="llama-bpe", merges=["h e"])
    assert texts(tokenizer(metadata), tokenizer(metadata).encode("hello")) == ["hello"]
    plain = tokenizer({**metadata, "tokenizer.ggml.pre": "glm4"})
    assert texts(plain, plain.encode("hello")) == ["he", "l", "l", "o"]


# Special and user-defined tokens


def test_special_text_is_parsed_only_when_asked() -> None:
    text = "<|im_start|>hello<|im_end|>"
    assert BYTES.encode(text, parse_special=True) == [1, *BYTES.encode("hello"), 2]
    plain = BYTES.encode(text)
    assert BYTES.special_ids.isdisjoint(plain)
    assert BYTES.decode(plain) == text


def test_user_defined_tokens_are_matched_in_any_text() -> None:
    expected = [BYTES.encode("<tool_call>")[0], *BYTES.encode("hello")]
    assert len(BYTES.encode("<tool_call>")) == 1
    assert BYTES.encode("<tool_call>hello") == expected
    assert not BYTES.is_special(expected[0])


def test_unused_ids_count_but_have_no_text() -> None:
    assert BYTES.vocab_size == 4 + 256 + 11 + 2
    assert BYTES.token_bytes(BYTES.vocab_size - 1) == b""
    assert BYTES.vocab_size - 1 not in BYTES.encode("[PAD]")
    with pytest.raises(InvalidRequestError, match=f"token id is {BYTES.vocab_size}"):
        BYTES.token_bytes(BYTES.vocab_size)


def test_bos_is_never_doubled() -> None:
    ids = BYTES.encode("hello")
    assert BYTES.encode("hello", add_bos=True) == [1, *ids]
    assert BYTES.encode("<|im_start|>hello", add_bos=True, parse_special=True) == [1, *ids]
    assert BYTES.encode("", add_bos=True) == [1]
    assert BYTES.encode_marked("<|im_start|>a<\ufdd0|im_end|>", "\ufdd0", add_bos=True)[:2] == [1, BYTES.encode("a")[0]]


def test_ends_are_the_declared_eos_and_every_known_end_of_turn() -> None:
    assert BYTES.eos_ids == (2, 0)
    assert PIECES.eos_ids == (2,)
    assert tokenizer(byte_level_metadata(eos_token_id=None, eot_token_id=1)).eos_ids == (1, 0, 2)


def test_a_harmony_answer_does_not_end_with_its_first_message() -> None:
    control = [(1, "<|end|>"), (2, "<|return|>"), (3, "<|call|>"), (4, "<|start|>")]
    assert end_ids([2], control) == (2, 3)
    assert end_ids([None], control[:1]) == (1,)


def test_whether_bos_is_added_follows_the_file_then_the_kind() -> None:
    assert not BYTES.adds_bos
    assert tokenizer(byte_level_metadata(pre="llama-bpe")).adds_bos
    assert not tokenizer(byte_level_metadata(pre="llama-bpe", add_bos_token=False)).adds_bos
    assert PIECES.adds_bos
    assert not tokenizer(sentencepiece_metadata(bos_token_id=None)).adds_bos


def test_plain_text_that_merges_into_a_control_token_is_refused() -> None:
    kinds = list(byte_level_metadata()["tokenizer.ggml.token_type"])  # type: ignore[call-overload]
    tokens = byte_level_metadata()["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    kinds[tokens.index("hello")] = 3
    with pytest.raises(InvalidRequestError, match="control token"):
        tokenizer(byte_level_metadata(token_type=kinds)).encode("hello")


# SentencePiece BPE


def reference_pieces(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's BPE by its definition: merge the best-scored pair, the leftmost of equals, until none is left."""
    symbols: list[str | None] = list(text)
    agenda: list[tuple[float, int, int, str]] = []

    def neighbours(index: int, step: int) -> int | None:
        index += step
        while 0 <= index < len(symbols) and symbols[index] is None:
            index += step
        return index if 0 <= index < len(symbols) else None

    def consider(left: int | None, right: int | None) -> None:
        if left is None or right is None:
            return
        merged = f"{symbols[left]}{symbols[right]}"
        if merged in scores:
            heapq.heappush(agenda, (-scores[merged], left, right, merged))

    for index in range(len(symbols) - 1):
        consider(index, index + 1)
    while agenda:
        _, left, right, merged = heapq.heappop(agenda)
        if symbols[left] is None or symbols[right] is None or f"{symbols[left]}{symbols[right]}" != merged:
            continue
        symbols[left], symbols[right] = merged, None
        consider(neighbours(left, -1), left)
        consider(left, neighbours(left, 1))
    return [symbol for symbol in symbols if symbol is not None]


def trained_pieces(rng: random.Random, alphabet: str, merges: int) -> dict[str, float]:
    """A vocabulary as BPE training leaves it: each piece joins two earlier ones and scores below them."""
    pieces = list(alphabet)
    made: list[str] = []
    while len(made) < merges:
        piece = rng.choice(pieces) + rng.choice(pieces)
        if piece not in pieces and len(piece) <= 12:
            pieces.append(piece)
            made.append(piece)
    return {piece: -float(rank) for rank, piece in enumerate([*made, *alphabet])}


@pytest.mark.parametrize("seed", range(20))
def test_merges_from_scores_are_sentencepiece_s(seed: int) -> None:
    rng = random.Random(seed)
    scores = trained_pieces(rng, "ab▁" if seed % 2 else "abcd", 12)
    subject = tokenizer(sentencepiece_metadata(scores, add_space_prefix=False))
    ids = {piece: 3 + 256 + index for index, piece in enumerate(scores)}
    for _ in range(200):
        text = "".join(rng.choice("ab " if seed % 2 else "abcd") for _ in range(rng.randrange(1, 25)))
        expected = [ids[piece] for piece in reference_pieces(text.replace(" ", "▁"), scores)]
        assert subject.encode(text) == expected, text


def test_a_prefix_blank_and_byte_fallback() -> None:
    assert texts(PIECES, PIECES.encode("hello world")) == [" hello", " world"]
    assert [PIECES.token_bytes(i) for i in PIECES.encode("ü")] == [b" ", b"\xc3", b"\xbc"]
    assert PIECES.decode(PIECES.encode("hello ü 🙂")) == "hello ü 🙂"


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=30).filter(lambda text: "▁" not in text))
def test_sentencepiece_decode_inverts_encode(text: str) -> None:
    assert PIECES.decode(PIECES.encode(text)) == text


def test_byte_and_control_pieces_are_never_built_from_text() -> None:
    assert PIECES.decode(PIECES.encode("<0x41></s><unk>")) == "<0x41></s><unk>"
    assert set(PIECES.encode("<0x41></s><unk>")).isdisjoint({0, 1, 2, 3 + 0x41})


def test_user_defined_pieces_come_before_merging() -> None:
    # Stored with real blanks, as the converter writes them.
    subject = tokenizer(sentencepiece_metadata(user_defined=("  ", "\n\n", "low"), add_space_prefix=False))
    found = texts(subject, subject.encode("hello   world\n\n\nhellow"))
    assert found == ["hello", "  ", " world", "\n\n", "\n", "he", "l", "low"]


def test_an_added_token_of_blanks_beside_a_piece_of_blanks() -> None:
    scores = {"▁▁": 0.0, "▁": -1.0, "a": -2.0}
    subject = tokenizer(sentencepiece_metadata(scores, user_defined=("  ",), add_space_prefix=False))
    assert subject.encode("a  a")[1] == 3
    assert subject.token_bytes(3) == subject.token_bytes(3 + 1 + 256) == b"  "


def test_user_defined_pieces_of_blanks_beside_a_prefix_blank() -> None:
    subject = tokenizer(sentencepiece_metadata(user_defined=("   ", "low")))
    assert texts(subject, subject.encode("hello   world")) == [" hello", "   ", " world"]
    assert texts(subject, subject.encode("low")) == ["low"]


def test_pieces_that_reach_over_a_blank_are_found() -> None:
    scores = {"o▁": 0.0, "lo▁": -1.0, "l": -2.0, "o": -3.0, "▁": -4.0, "w": -5.0}
    subject = tokenizer(sentencepiece_metadata(scores, add_space_prefix=False))
    assert texts(subject, subject.encode("lo wo")) == ["lo ", "w", "o"]


# Damage


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (byte_level_metadata(tokens=None), r"tokenizer\.ggml\.tokens is missing"),
        (byte_level_metadata(tokens=[]), r"tokenizer\.ggml\.tokens is list"),
        (byte_level_metadata(token_type=None), r"token_type is missing"),
        (byte_level_metadata(token_type=[1, 2]), r"token_type has 2 entries for 273 tokens"),
        (byte_level_metadata(merges=None), r"merges is missing"),
        (byte_level_metadata(merges=["h e", "ab"]), r"merges\[1\] is 'ab'"),
        (byte_level_metadata(merges=["h e x"]), r"merges\[0\] is 'h e x'"),
        (byte_level_metadata(merges=["zz yy"]), r"merges does not fit"),
        (byte_level_metadata(bos_token_id=5000), r"bos_token_id is 5000; it must be an id below 273"),
        (byte_level_metadata(eos_token_id="2"), r"eos_token_id is '2'"),
        (byte_level_metadata(add_bos_token=1), r"add_bos_token is 1; it must be a boolean"),
        (sentencepiece_metadata(scores=None), r"scores is missing"),
        (sentencepiece_metadata(scores=[0.0]), r"scores has 1 entries"),
        (sentencepiece_metadata({"a": float("nan")}), r"scores is NaN for token 'a'"),
        (sentencepiece_metadata({"a": 1.0}, user_defined=("a",)), r"has 'a' twice, as ids 3 and 260"),
    ],
)
def test_damaged_metadata_is_one_clear_error(metadata: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        tokenizer(metadata)


def test_a_vocabulary_that_would_lose_characters_is_refused() -> None:
    metadata = sentencepiece_metadata({"a": 0.0})
    tokens = list(metadata["tokenizer.ggml.tokens"])  # type: ignore[call-overload]
    tokens[tokens.index("<0x41>")] = "<0x_1>"
    with pytest.raises(CheckpointError, match="lacks some of the pieces"):
        tokenizer({**metadata, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.unknown_token_id": None})
    assert tokenizer({**metadata, "tokenizer.ggml.tokens": tokens}).encode("a")


@pytest.mark.parametrize("key", ["remove_extra_whitespaces", "precompiled_charsmap"])
def test_unbuilt_normalisation_is_refused_by_name(key: str) -> None:
    with pytest.raises(UnsupportedModelError, match=key):
        tokenizer(sentencepiece_metadata(**{key: True}))


# Giant and hostile text


def test_text_that_cannot_fit_is_refused_before_any_work() -> None:
    longest = 3 * len("<|endoftext|>")
    with pytest.raises(ContextLengthError, match=rf"{10 * longest + 1} bytes, which cannot fit 10 tokens") as caught:
        BYTES.encode("a" * (10 * longest + 1), max_tokens=10)
    assert caught.value.code == "context_length_exceeded"
    assert len(BYTES.encode("a" * 10 * longest, max_tokens=10)) == 10 * longest


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="at character 1, half of a surrogate pair"):
        BYTES.encode("a\ud800")


@pytest.mark.parametrize("subject", [BYTES, PIECES, tokenizer(byte_level_metadata(pre="deepseek-llm"))])
@pytest.mark.parametrize("unit", ["a", " ", "🙂", "\n", " \n", "'", "aB1 ", "<", "\u0301"])
def test_long_monotonous_text_takes_linear_time(subject: Tokenizer, unit: str) -> None:
    def seconds(repeats: int) -> float:
        start = time.process_time()
        subject.encode(unit * repeats + "!")
        return time.process_time() - start

    seconds(1000)
    small, large = seconds(10_000), seconds(100_000)
    # Quadratic work would take a hundred times as long; the rest is room for a busy machine.
    assert large < 40 * max(small, 0.005)


def test_encoding_lets_other_threads_run() -> None:
    ticks = 0
    done = threading.Event()

    def work() -> None:
        BYTES.encode("hello world 12 " * 30_000)
        done.set()

    worker = threading.Thread(target=work)
    worker.start()
    while not done.wait(0.001):
        ticks += 1
    worker.join()
    assert ticks > 3


def test_threads_share_a_tokenizer() -> None:
    expected = BYTES.encode("hello <|im_end|> world")
    found: list[list[int]] = []
    workers = [
        threading.Thread(target=lambda: found.extend(BYTES.encode("hello <|im_end|> world") for _ in range(50)))
        for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert found == [expected] * 200
