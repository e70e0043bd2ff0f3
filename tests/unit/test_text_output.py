"""Text deltas: detokenised, cut at stop strings, counted, with log probabilities."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neoserve.text.output import OutputProcessor, TextDelta
from neoserve.text.tokenizer import Tokenizer
from neoserve.types.request import FinishReason, GenerateRequest, TokenDelta, TokenLogprob
from neoserve.types.sampling import SamplingParams

from .tiny_tokenizers import byte_level_metadata, sentencepiece_metadata, tokenizer

SUBJECT = tokenizer(byte_level_metadata())
EOS = 2


def ids(text: str) -> tuple[int, ...]:
    """One token per byte."""
    return tuple(i for character in text.encode() for i in byte_id(character))


def byte_id(byte: int) -> tuple[int, ...]:
    return (next(i for i in range(4, 260) if SUBJECT.token_bytes(i) == bytes([byte])),)


def processor(subject: Tokenizer = SUBJECT, *, continues_text: bool = False, **sampling: object) -> OutputProcessor:
    request = GenerateRequest(
        request_id="r",
        prompt_token_ids=(5, 6, 7),
        sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
        eos_token_ids=(EOS, 0),
    )
    return OutputProcessor(subject, request, continues_text=continues_text)


def delta(
    token_ids: tuple[int, ...], finish: FinishReason | None = None, stop_token: int | None = None, **more: object
) -> TokenDelta:
    return TokenDelta(
        request_id="r",
        token_ids=token_ids,
        finish_reason=finish,
        stop_token_id=stop_token,
        **more,  # type: ignore[arg-type]
    )


def test_text_and_counts_grow_and_eos_is_counted_but_not_written() -> None:
    subject = processor()
    first = subject.process(delta(ids("ab"), cached_tokens=2))
    last = subject.process(delta((*ids("c"), EOS), "stop", EOS))
    assert (first.text, first.completion_tokens, first.finish_reason, first.cached_tokens) == ("ab", 2, None, 2)
    assert last == TextDelta(
        request_id="r",
        text="c",
        token_ids=(*ids("c"), EOS),
        prompt_tokens=3,
        completion_tokens=4,
        cached_tokens=2,
        finish_reason="stop",
    )
    assert subject.finished
    with pytest.raises(ValueError, match="finished"):
        subject.process(delta(ids("d")))


@pytest.mark.parametrize("skip", [True, False])
def test_the_token_that_ends_generation_is_never_written(skip: bool) -> None:
    stop_token = ids("!")[0]
    by_eos = processor(skip_special_tokens=skip).process(delta((*ids("a"), EOS), "stop", EOS))
    by_token = processor(skip_special_tokens=skip).process(delta((*ids("a!"),), "stop", stop_token))
    assert (by_eos.text, by_eos.stop_reason) == ("a", None)
    assert (by_token.text, by_token.stop_reason) == ("a", stop_token)


def test_an_ignored_eos_within_the_text_follows_skip_special_tokens() -> None:
    tokens = (*ids("a"), EOS, *ids("b"))
    assert processor(ignore_eos=True).process(delta(tokens, "length")).text == "ab"
    assert processor(ignore_eos=True, skip_special_tokens=False).process(delta(tokens, "length")).text == "a<|im_end|>b"


def test_a_stop_string_over_several_deltas() -> None:
    subject = processor(stop=("own fox",))
    texts = [subject.process(delta(ids(part))) for part in ("The quick br", "own", " f")]
    last = subject.process(delta(ids("ox jumps")))
    assert [item.text for item in texts] == ["The quick br", "", ""]
    assert (last.text, last.finish_reason, last.stop_reason, last.stopped_by_text) == ("", "stop", "own fox", True)
    assert last.token_ids == ids("ox")
    assert last.completion_tokens == len("The quick brown fox")


def test_a_near_miss_is_released_and_the_end_lets_everything_go() -> None:
    subject = processor(stop=("own fox",))
    assert subject.process(delta(ids("own"))).text == ""
    assert subject.process(delta(ids(" cat own"))).text == "own cat "
    last = subject.process(delta((), "length"))
    assert (last.text, last.finish_reason, last.stop_reason) == ("own", "length", None)


def test_a_stop_string_in_the_last_delta_needs_no_abort() -> None:
    last = processor(stop=("b",)).process(delta(ids("ab"), "length"))
    assert (last.text, last.finish_reason, last.stop_reason, last.stopped_by_text) == ("a", "stop", "b", False)


def test_a_stop_string_with_an_emoji_in_byte_tokens() -> None:
    subject = processor(stop=("🙂!",))
    parts = [subject.process(delta((token,))) for token in ids("é🙂!")]
    assert [part.text for part in parts] == ["", "é", "", "", "", "", ""]
    assert parts[-1].stop_reason == "🙂!"


def test_an_incomplete_character_at_the_end_is_one_replacement_character() -> None:
    subject = processor()
    assert subject.process(delta(ids("a🙂")[:-1])).text == "a"
    assert subject.process(delta((), "length")).text == "\ufffd"


def test_stop_strings_within_min_tokens_do_not_count() -> None:
    subject = processor(stop=("a",), min_tokens=2)
    assert subject.process(delta(ids("aa"))).text == "aa"
    last = subject.process(delta(ids("ba")))
    assert (last.text, last.stop_reason, last.completion_tokens) == ("b", "a", 4)


def test_a_stop_string_that_begins_within_min_tokens_and_ends_after_counts() -> None:
    subject = processor(stop=("END",), min_tokens=2)
    found = [subject.process(delta(ids(character))) for character in "xEND"]
    assert [item.text for item in found] == ["x", "", "", ""]
    assert (found[-1].finish_reason, found[-1].stop_reason, found[-1].completion_tokens) == ("stop", "END", 4)
    ended = processor(stop=("END",), min_tokens=4).process(delta(ids("xENDyyEN"), "length"))
    assert (ended.text, ended.finish_reason) == ("xENDyyEN", "length")


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="ab", max_size=12),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
    min_tokens=st.integers(0, 6),
    cut=st.integers(1, 4),
)
def test_min_tokens_only_decides_which_matches_count(text: str, stops: list[str], min_tokens: int, cut: int) -> None:
    """A token a character: the text ends before the first stop string whose end is beyond ``min_tokens``."""
    subject, sent, last = processor(stop=tuple(stops), min_tokens=min_tokens), "", None
    for start in range(0, len(text), cut):
        last = subject.process(delta(ids(text[start : start + cut])))
        sent += last.text
        if subject.finished:
            break
    if not subject.finished:
        last = subject.process(delta((), "length"))
        sent += last.text
    assert last is not None
    matches = [
        (end, stop)
        for end in range(min_tokens + 1, len(text) + 1)
        for stop in sorted(stops, key=len, reverse=True)
        if text[:end].endswith(stop)
    ]
    end, stop = matches[0] if matches else (len(text), None)
    assert (sent, last.stop_reason) == (text[: end - len(stop or "")], stop)
    assert last.completion_tokens == end


def test_logprobs_go_with_their_tokens() -> None:
    tokens = ids("🙂")
    entries = tuple(TokenLogprob(token, -0.5, ((token, -0.5), (9, -2.0))) for token in tokens)
    first = processor().process(delta(tokens, logprobs=entries, prompt_logprobs=(None, entries[0])))
    assert first.logprobs == entries
    assert first.prompt_logprobs == (None, entries[0])
    assert b"".join(SUBJECT.token_bytes(entry.token_id) for entry in first.logprobs).decode() == "🙂"
    stopped = processor(stop=("b",)).process(delta(ids("abc"), logprobs=entries[:3]))
    assert len(stopped.logprobs) == len(stopped.token_ids) == 2


def test_errors_pass_through() -> None:
    last = processor().process(delta((), "error", error="out of pages"))
    assert (last.finish_reason, last.error) == ("error", "out of pages")


def test_a_completion_keeps_the_blank_that_a_chat_answer_drops() -> None:
    pieces = tokenizer(sentencepiece_metadata())
    tokens = tuple(pieces.encode("hello world"))
    assert processor(pieces).process(delta(tokens)).text == "hello world"
    assert processor(pieces, continues_text=True).process(delta(tokens)).text == " hello world"


@settings(max_examples=100, deadline=None)
@given(
    tokens=st.lists(st.integers(0, SUBJECT.vocab_size - 1), max_size=30),
    stops=st.lists(st.text(alphabet="he lo\ufffdw", min_size=1, max_size=3), max_size=3),
    cut=st.integers(1, 7),
)
def test_streamed_and_whole_are_the_same(tokens: list[int], stops: list[str], cut: int) -> None:
    def run(step: int) -> tuple[str, object, int]:
        subject, text = processor(stop=tuple(stops)), ""
        pieces = [tuple(tokens[i : i + step]) for i in range(0, len(tokens), step)] or [()]
        for index, piece in enumerate(pieces):
            last = subject.process(delta(piece, "length" if index == len(pieces) - 1 else None))
            text += last.text
            if last.finish_reason is not None:
                return text, last.stop_reason, last.completion_tokens
        raise AssertionError("no finish reason")

    assert run(1) == run(cut) == run(1000)
