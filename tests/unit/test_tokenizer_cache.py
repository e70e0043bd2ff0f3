"""The disk cache of built tokenizers."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from neoserve.text.load import load_tokenizer
from neoserve.text.tokenizer_cache import default_cache_dir
from neoserve.types.errors import UnsupportedModelError
from neoserve.types.model import TokenizerSource

from .tiny_tokenizers import byte_level_metadata, sentencepiece_metadata

TEXT = "<|im_start|>hello  world é12</s>"


class Untouchable(dict[str, object]):
    """Metadata that fails the test when it is read."""

    def get(self, key: str, default: object = None) -> object:
        raise AssertionError(f"{key} was read")

    __getitem__ = get  # type: ignore[assignment]


@pytest.mark.parametrize("metadata", [byte_level_metadata(), sentencepiece_metadata(user_defined=("  ", "low"))])
def test_the_second_load_reads_the_cache_only_and_is_the_same(metadata: dict[str, object], tmp_path: Path) -> None:
    first = load_tokenizer(TokenizerSource(gguf=metadata, digest="d"), cache_dir=tmp_path)
    second = load_tokenizer(TokenizerSource(gguf=Untouchable(), digest="d"), cache_dir=tmp_path)
    for parse_special in (True, False):
        assert second.encode(TEXT, parse_special=parse_special) == first.encode(TEXT, parse_special=parse_special)
    assert [second.token_bytes(i) for i in range(second.vocab_size)] == [
        first.token_bytes(i) for i in range(first.vocab_size)
    ]
    for name in ("vocab_size", "bos_id", "eos_ids", "special_ids", "adds_bos", "named_tokens", "leading_blanks"):
        assert getattr(second, name) == getattr(first, name)


def test_digest_and_override_are_told_apart(tmp_path: Path) -> None:
    source = TokenizerSource(gguf=byte_level_metadata(), digest="d")
    one = load_tokenizer(source, cache_dir=tmp_path)
    other = load_tokenizer(source, cache_dir=tmp_path, pre_override="gpt-2")
    third = load_tokenizer(TokenizerSource(gguf=byte_level_metadata(pre="gpt-2"), digest="e"), cache_dir=tmp_path)
    assert one.encode("12") != other.encode("12") == third.encode("12")
    assert len(list(tmp_path.glob("*.tokenizer.json"))) == 3


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def other_json(path: Path) -> None:
    path.write_text(json.dumps({"sha256": 1}))


@pytest.mark.parametrize("damage", [cut, flip, empty, other_json])
@pytest.mark.parametrize("kind", ["tokenizer", "info"])
def test_a_damaged_entry_is_built_anew(
    damage: Callable[[Path], None], kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = TokenizerSource(gguf=byte_level_metadata(), digest="d")
    expected = load_tokenizer(source, cache_dir=tmp_path).encode(TEXT)
    (path,) = tmp_path.glob(f"*.{kind}.json")
    intact = path.read_bytes()
    damage(path)
    if path.read_bytes() == intact:
        pytest.fail("the damage changed nothing")
    with caplog.at_level(logging.WARNING):
        assert load_tokenizer(source, cache_dir=tmp_path).encode(TEXT) == expected
    assert "damaged" in caplog.text
    assert path.read_bytes() == intact


def test_no_part_files_are_left(tmp_path: Path) -> None:
    load_tokenizer(TokenizerSource(gguf=byte_level_metadata(), digest="d"), cache_dir=tmp_path)
    assert sorted(path.suffixes for path in tmp_path.iterdir()) == [[".info", ".json"], [".tokenizer", ".json"]]


def test_without_a_digest_nothing_is_cached(tmp_path: Path) -> None:
    load_tokenizer(TokenizerSource(gguf=byte_level_metadata()), cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_reported_and_survived(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with caplog.at_level(logging.WARNING):
        subject = load_tokenizer(TokenizerSource(gguf=byte_level_metadata(), digest="d"), cache_dir=blocked / "x")
    assert subject.encode("hello")
    assert "cannot cache the tokenizer" in caplog.text


def test_an_error_leaves_no_entry(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError):
        load_tokenizer(TokenizerSource(gguf=byte_level_metadata(pre=None), digest="d"), cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_default_folder_is_the_user_s_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "neoserve" / "tokenizers"
    load_tokenizer(TokenizerSource(gguf=byte_level_metadata(), digest="d"))
    assert len(list((tmp_path / "neoserve" / "tokenizers").iterdir())) == 2


@pytest.mark.parametrize("given", [None, "", "relative/cache"])
def test_only_an_absolute_xdg_folder_counts(given: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if given is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", given)
    assert default_cache_dir() == tmp_path / ".cache" / "neoserve" / "tokenizers"


def test_without_a_home_folder_nothing_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert default_cache_dir() is None
    subject = load_tokenizer(TokenizerSource(gguf=byte_level_metadata(), digest="d"))
    assert subject.encode("hello")
