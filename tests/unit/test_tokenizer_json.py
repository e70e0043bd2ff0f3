"""Tokenizers from tokenizer.json: against the library, with BOS, added tokens and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from neoserve.text.load import load_tokenizer
from neoserve.text.token_bytes import BYTE_ALPHABET
from neoserve.text.tokenizer import Tokenizer
from neoserve.types.errors import CheckpointError, UnsupportedModelError
from neoserve.types.model import TokenizerSource

TEXTS = ["", "hello", " hello  world", "a\n\nb", "é🙂", "<s>hello</s> x", "<think>hello"]


def byte_level() -> tokenizers.Tokenizer:
    """Special tokens outside the model's vocabulary, as in Qwen and Llama 3."""
    vocab = {character: index for index, character in enumerate(BYTE_ALPHABET)}
    vocab.update({"he": 256, "ll": 257, "hell": 258, "hello": 259})
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o")]
    built = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("</s>", normalized=False)])
    built.add_tokens([AddedToken("<think>", normalized=False)])
    built.add_special_tokens([AddedToken("<|end|>", normalized=False, rstrip=True)])
    built.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 260)]
    )
    return built


def metaspace(prepend_scheme: str) -> tokenizers.Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"helowrd", "he", "ll", "▁he"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [("h", "e"), ("l", "l"), ("▁", "he")]
    built = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    built.decoder = decoders.Sequence(steps + ([] if prepend_scheme == "never" else [decoders.Strip(" ", 1, 0)]))
    built.add_special_tokens([AddedToken(text, normalized=False) for text in pieces[:3]])
    return built


def saved(built: tokenizers.Tokenizer, folder: Path, **config: object) -> Tokenizer:
    path = folder / "tokenizer.json"
    built.save(str(path))
    return load_tokenizer(TokenizerSource(tokenizer_json=str(path), tokenizer_config=config))


@pytest.mark.parametrize("built", [byte_level(), metaspace("first"), metaspace("always"), metaspace("never")])
@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_are_the_library_s(built: tokenizers.Tokenizer, text: str, tmp_path: Path) -> None:
    subject = saved(built, tmp_path)
    ids = built.encode(text, add_special_tokens=False).ids
    assert subject.encode(text, parse_special=True) == ids
    for skip in (True, False):
        assert subject.decode(ids, skip) == built.decode(ids, skip_special_tokens=skip)


def test_special_tokens_outside_the_model_keep_their_ids(tmp_path: Path) -> None:
    subject = saved(byte_level(), tmp_path, bos_token="<s>", eos_token={"content": "</s>"})
    assert subject.vocab_size == 264
    assert subject.special_ids == {260, 261, 263}
    assert (subject.bos_id, subject.eos_ids) == (260, (261, 263))
    assert subject.named_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert subject.encode("<s><think>", parse_special=True) == [260, 262]
    assert subject.encode("<s><think>")[-1] == 262
    assert subject.decode(subject.encode("<s><think>")) == "<s><think>"


def test_the_file_s_own_post_processor_says_whether_bos_is_added(tmp_path: Path) -> None:
    assert saved(byte_level(), tmp_path, bos_token="<s>").adds_bos
    assert not saved(byte_level(), tmp_path, bos_token="<s>", add_bos_token=False).adds_bos
    assert not saved(byte_level(), tmp_path).adds_bos
    assert not saved(metaspace("first"), tmp_path, bos_token="<s>").adds_bos
    assert saved(byte_level(), tmp_path, bos_token="<s>").encode("hello", add_bos=True) == [260, 259]


def test_truncation_and_padding_in_the_file_do_not_apply(tmp_path: Path) -> None:
    built = byte_level()
    built.enable_truncation(2)
    built.enable_padding(length=9)
    assert len(saved(built, tmp_path).encode("a b c d")) == 7


def test_a_prefix_blank_for_the_start_only_is_not_put_behind_special_tokens(tmp_path: Path) -> None:
    subject, mark = saved(metaspace("first"), tmp_path), "\ufdd0"
    marked = f"hello</s>hello<{mark}s>"
    expected = subject.encode("hello</s>hello", parse_special=True)
    assert subject.encode_marked(marked, mark)[: len(expected)] == expected
    assert subject.decode(subject.encode_marked(marked, mark), False) == "hello</s>hello<s>"


def test_blanks_that_a_special_token_swallows_are_swallowed_with_marks_too(tmp_path: Path) -> None:
    subject, mark = saved(byte_level(), tmp_path), "\ufdd0"
    expected = subject.encode("a<|end|>  hello", parse_special=True)
    assert subject.encode_marked(f"a<|end|>  hello<{mark}s>", mark)[: len(expected)] == expected


def test_tokens_that_only_the_configuration_lists_are_added(tmp_path: Path) -> None:
    entry = {"content": "<extra>", "special": True, "normalized": False, "lstrip": False, "rstrip": False}
    subject = saved(byte_level(), tmp_path, added_tokens_decoder={"264": entry, "260": {"content": "<s>"}})
    assert subject.encode("<extra>", parse_special=True) == [264]
    assert subject.is_special(264)
    with pytest.raises(CheckpointError, match="'<extra>' the id 300"):
        saved(byte_level(), tmp_path, added_tokens_decoder={"300": entry})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bos_token": "<nope>"}, "bos_token of the tokenizer_config.json is '<nope>'"),
        ({"bos_token": "<s>", "add_bos_token": "yes"}, "add_bos_token .* is 'yes'"),
        ({"added_tokens_decoder": [1]}, "added_tokens_decoder"),
        ({"added_tokens_decoder": {"x": {"content": "<y>"}}}, r"added_tokens_decoder\['x'\]"),
        ({"added_tokens_decoder": {"264": "<y>"}}, r"added_tokens_decoder\['264'\]"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(config: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        saved(byte_level(), tmp_path, **config)


def test_damaged_files_and_missing_tokenizers_are_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    for content in ("", "{}", "[1]", '{"model": {"type": "BPE"'):
        path.write_text(content)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
            load_tokenizer(TokenizerSource(tokenizer_json=str(path)))
    with pytest.raises(CheckpointError, match="no tokenizer"):
        load_tokenizer(TokenizerSource())


def test_other_kinds_are_refused_by_name(tmp_path: Path) -> None:
    words = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    with pytest.raises(UnsupportedModelError, match="WordPiece vocabulary"):
        saved(words, tmp_path)
    built = byte_level()
    built.decoder = decoders.CTC()
    with pytest.raises(UnsupportedModelError, match="CTC"):
        saved(built, tmp_path)
    path = tmp_path / "tokenizer.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({**fields, "decoder": None}))
    with pytest.raises(UnsupportedModelError, match="no decoder"):
        load_tokenizer(TokenizerSource(tokenizer_json=str(path)))
    byte_level().save(str(path))
    with pytest.raises(UnsupportedModelError, match="override 'gpt-2' applies to GGUF files only"):
        load_tokenizer(TokenizerSource(tokenizer_json=str(path)), pre_override="gpt-2")


def test_a_normaliser_of_the_file_applies(tmp_path: Path) -> None:
    built = byte_level()
    built.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    subject = saved(built, tmp_path)
    assert subject.encode("ＨＥＬＬＯ") == subject.encode("hello") == [259]


def test_gaps_between_added_ids_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    byte_level().save(str(path))
    fields = json.loads(path.read_text())
    fields["added_tokens"][-1]["id"] = 300
    path.write_text(json.dumps(fields))
    try:
        library = tokenizers.Tokenizer.from_file(str(path))
    except Exception:
        pytest.skip("this version of tokenizers refuses gaps itself")
    subject = load_tokenizer(TokenizerSource(tokenizer_json=str(path)))
    text = "<s>hello<think><|end|>"
    assert subject.encode(text, parse_special=True) == library.encode(text, add_special_tokens=False).ids
    assert subject.decode(subject.encode(text)) == text
