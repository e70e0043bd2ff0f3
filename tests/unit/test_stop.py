"""Stop strings: what is held back, what is let go, where the text ends."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neoserve.text.stop import StopMatcher

SMALL = st.text(alphabet="ab🙂", max_size=30)
STOPS = st.lists(st.text(alphabet="ab🙂", min_size=1, max_size=5), max_size=4)


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before the stop that is complete first (the longest of those), by looking at every prefix."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def longest_possible_start(text: str, stops: list[str]) -> int:
    """Characters at the end of ``text`` that could begin a stop string."""
    return max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)


@settings(max_examples=200, deadline=None)
@given(text=SMALL, stops=STOPS, cuts=st.lists(st.integers(0, 30)))
def test_any_cut_of_the_text_gives_the_same_and_holds_back_the_least(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    expected, stop = reference(text, stops)
    matcher, sent, seen = StopMatcher(stops), "", ""
    edges = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    for start, end in itertools.pairwise(edges):
        emitted, stopped = matcher.push(text[start:end])
        sent, seen = sent + emitted, text[:end]
        if stopped:
            break
        assert len(seen) - len(sent) == longest_possible_start(seen, stops)
    assert matcher.matched == stop
    assert sent + matcher.finish() == expected


@pytest.mark.parametrize(
    ("stops", "pieces", "emitted"),
    [
        (["own fox"], ["The quick br", "own", " f", "ox jumps"], ["The quick br", "", "", ""]),
        (["own fox"], ["br", "own", " cat"], ["br", "", "own cat"]),
        (["x"], ["abc", "dxe"], ["abc", "d"]),
        (["ab", "abc"], ["zabc"], ["z"]),
        (["🙂🙃"], ["hi🙂", "🙂🙃"], ["hi", "🙂"]),
        (["\n\nUser:"], ["a\n", "\nUs", "e\n\nUser:"], ["a", "", "\n\nUse"]),
        ([], ["a", "b"], ["a", "b"]),
    ],
)
def test_streams(stops: list[str], pieces: list[str], emitted: list[str]) -> None:
    matcher = StopMatcher(stops)
    assert [matcher.push(piece)[0] for piece in pieces] == emitted


def test_a_stop_of_thirty_characters_does_not_delay_other_text() -> None:
    matcher = StopMatcher(["=" * 30])
    assert matcher.push("no window is held back here") == ("no window is held back here", False)
    assert matcher.push("==") == ("", False)
    assert matcher.finish() == "=="


def test_nothing_comes_after_a_stop() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.push("a STOP b") == ("a ", True)
    assert matcher.push("more") == ("", True)
    assert matcher.finish() == ""
    assert matcher.matched == "STOP"


def test_of_two_stops_the_one_complete_first_wins_however_the_text_comes() -> None:
    whole, single = StopMatcher(["bcd", "abcde"]), StopMatcher(["bcd", "abcde"])
    assert whole.push("abcde") == ("a", True)
    assert [single.push(character) for character in "abcd"] == [("", False), ("", False), ("", False), ("a", True)]


def test_a_match_that_does_not_count_holds_nothing_back_that_begins_no_other() -> None:
    matcher = StopMatcher(["ab", "abac"])
    assert matcher.push("xab", counts=False) == ("x", False)
    assert matcher.push("y", counts=False) == ("aby", False)
    assert matcher.push("aba", counts=False) == ("", False)
    assert matcher.push("c") == ("", True)
    overlapping = StopMatcher(["aa"])
    assert overlapping.push("aa", counts=False) == ("a", False)
    assert overlapping.push("a") == ("", True)


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


def test_long_texts_with_many_stops_take_one_pass() -> None:
    stops = ["a" * length + "b" for length in range(1, 200)]
    matcher = StopMatcher(stops)
    steps = 0
    original = matcher._step

    def counted(state: int, character: str) -> int:
        nonlocal steps
        steps += 1
        return original(state, character)

    matcher._step = counted  # type: ignore[method-assign]
    for _ in range(20):
        matcher.push("a" * 1000)
    assert steps == 20_000
    assert matcher.finish() == "a" * 199
