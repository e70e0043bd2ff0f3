"""Lists of CPUs and nodes, and small system files that are damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neoserve.program.machine.files import format_ids, parse_count, parse_ids, read, read_count, read_ids

IDS = st.sets(st.integers(0, 5000), max_size=60)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("0-3,8,10-11\n", (0, 1, 2, 3, 8, 10, 11)),
        ("", ()),
        ("\n", ()),
        ("7", (7,)),
        ("5,3,4", (3, 4, 5)),
        ("1-2,2-3", (1, 2, 3)),
        ("1022-1025", (1022, 1023, 1024, 1025)),
    ],
)
def test_lists(text: str, ids: tuple[int, ...]) -> None:
    assert parse_ids(text) == ids


@pytest.mark.parametrize("text", ["a", "3-1", "-1", "1-", "1,,2", "0x3", "1-2-3", "1 2", "0-99999999999", "²"])
def test_what_is_no_list(text: str) -> None:
    with pytest.raises(ValueError, match="neither a number nor a range"):
        parse_ids(text)


@given(IDS)
def test_format_is_the_inverse_of_parse(ids: set[int]) -> None:
    assert parse_ids(format_ids(ids)) == tuple(sorted(ids))
    assert parse_ids(f" {format_ids(ids)}\n") == tuple(sorted(ids))


@given(IDS)
def test_format_is_the_shortest(ids: set[int]) -> None:
    runs = sum(1 for number in ids if number - 1 not in ids)
    assert len([part for part in format_ids(ids).split(",") if part]) == runs


@given(st.text(max_size=30))
def test_any_text_is_a_list_or_refused(text: str) -> None:
    try:
        ids = parse_ids(text)
    except ValueError:
        return
    assert list(ids) == sorted(set(ids))
    assert all(0 <= number < 1 << 20 for number in ids)


@given(st.text(max_size=30))
def test_any_text_is_a_count_or_none(text: str) -> None:
    assert parse_count(text) in (None, int(text) if text.isascii() and text.isdigit() else None)


def test_files_that_are_not_there_or_damaged(tmp_path: Path) -> None:
    assert (read(tmp_path / "no"), read_count(tmp_path / "no"), read_ids(tmp_path / "no")) == ("", None, None)
    assert read(tmp_path) == ""  # a folder
    (tmp_path / "bytes").write_bytes(b"\xff\xfe12")
    assert read_count(tmp_path / "bytes") is None
    assert read_ids(tmp_path / "bytes") is None
    (tmp_path / "long").write_text("9" * 5000)  # more digits than Python converts
    assert read_count(tmp_path / "long") is None
