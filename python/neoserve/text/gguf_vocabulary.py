"""Builds a ``tokenizers.Tokenizer`` from the ``tokenizer.ggml.*`` metadata of a GGUF file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from neoserve.text.splitters import SPLITTERS, Splitter
from neoserve.text.vocabulary import VocabularyInfo, end_ids
from neoserve.types.errors import CheckpointError, UnsupportedModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_TOKEN_TYPES = frozenset({NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE})
_SPACE = "▁"
_PREFIX = "tokenizer.ggml."
# Names in chat templates, and the metadata keys of their ids.
_NAMED_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # spelled so in the format
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
}


def build_from_gguf(
    metadata: Mapping[str, object], pre_override: str | None
) -> tuple[tokenizers.Tokenizer, VocabularyInfo]:
    """Build the tokenizer that ``metadata`` (all ``tokenizer.*`` keys as Python values) describes.

    ``pre_override`` replaces ``tokenizer.ggml.pre``. Raises CheckpointError on damaged metadata and
    UnsupportedModelError, with what is supported, on a kind that is not built.
    """
    kind = metadata.get(_PREFIX + "model")
    if kind == "gpt2":
        return _Builder(metadata).byte_level(_splitter(metadata, pre_override))
    if kind == "llama":
        if pre_override is not None:
            raise UnsupportedModelError(
                f"tokenizer.ggml.model is 'llama', which has no splitter, but the override {pre_override!r} was "
                "given; drop the override"
            )
        return _Builder(metadata).sentencepiece()
    raise UnsupportedModelError(
        f"tokenizer.ggml.model is {kind!r}; supported are 'gpt2' (byte-level BPE) and 'llama' (SentencePiece BPE): "
        "use a safetensors checkpoint of this model with its tokenizer.json"
    )


def _splitter(metadata: Mapping[str, object], pre_override: str | None) -> Splitter:
    name = pre_override if pre_override is not None else metadata.get(_PREFIX + "pre")
    splitter = SPLITTERS.get(name) if isinstance(name, str) else None
    if splitter is None:
        origin = "the override" if pre_override is not None else "tokenizer.ggml.pre"
        found = "missing" if name is None else f"{name!r}, which names no known splitter"
        raise UnsupportedModelError(
            f"{origin} is {found}; text would be cut into the wrong tokens. If you know the model's splitter, "
            f"override it with one of: {', '.join(sorted(SPLITTERS))}"
        )
    return splitter


class _Builder:
    """Checked views of the metadata, shared by both kinds of vocabulary."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._metadata = metadata
        self._tokens: Sequence[str] = self._array("tokens", str)
        self._types: Sequence[int] = self._array("token_type", int)
        if len(self._types) != len(self._tokens):
            raise CheckpointError(
                f"tokenizer.ggml.token_type has {len(self._types)} entries for {len(self._tokens)} tokens; "
                "convert the model again"
            )
        unknown = set(self._types) - _TOKEN_TYPES
        if unknown:
            raise CheckpointError(f"tokenizer.ggml.token_type holds {min(unknown)}; the known types are 1 to 6")

    def byte_level(self, splitter: Splitter) -> tuple[tokenizers.Tokenizer, VocabularyInfo]:
        vocab = self._vocab(self._tokens)
        merges = [self._merge(index, text) for index, text in enumerate(self._array("merges", str))]
        model = _bpe(vocab, merges, ignore_merges=splitter.ignore_merges)
        tokenizer = tokenizers.Tokenizer(model)
        if splitter.nfc:
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = splitter.pre_tokenizer()
        tokenizer.decoder = decoders.ByteLevel()
        self._add_tokens(tokenizer, self._tokens, normalized=False)
        # A byte is one character of the byte-level alphabet; raw text of special tokens may take more.
        longest = max(
            len(t) if k == NORMAL else len(t.encode()) for t, k in zip(self._tokens, self._types, strict=True)
        )
        return tokenizer, self._info(longest, add_bos=splitter.add_bos)

    def sentencepiece(self) -> tuple[tokenizers.Tokenizer, VocabularyInfo]:
        self._refuse_normalisation()
        prefix = self._flag("add_space_prefix", default=True)
        raw = set(self._tokens)
        tokens = self._tokens if prefix else [self._as_met(token, raw) for token in self._tokens]
        unknown = self._token_id("unknown_token_id")
        if unknown is None and not {f"<0x{byte:02X}>" for byte in range(256)} <= raw:
            raise CheckpointError(
                "tokenizer.ggml.tokens lacks some of the pieces <0x00> to <0xFF> and unknown_token_id is missing; "
                "characters outside the vocabulary would be lost: convert the model again"
            )
        model = _bpe(
            self._vocab(tokens),
            self._scored_merges(tokens),
            byte_fallback=True,
            fuse_unk=True,
            unk_token=None if unknown is None else tokens[unknown],
        )
        tokenizer = tokenizers.Tokenizer(model)
        to_space = normalizers.Replace(" ", _SPACE)
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), to_space]) if prefix else to_space
        if self._words_start_at_spaces(tokens):
            tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"{_SPACE}+[^{_SPACE}]*|[^{_SPACE}]+"), "isolated")
        steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
        # SentencePiece matches user-defined pieces in the text after blanks were replaced. With a prefix blank that
        # would add one to the pieces themselves, so they are matched in the raw text, and the text behind one gets
        # a prefix blank again, as in Hugging Face and llama.cpp.
        self._add_tokens(tokenizer, tokens, normalized=not prefix)
        return tokenizer, self._info(max(len(t.encode()) for t in tokens), add_bos=True)

    @staticmethod
    def _as_met(token: str, raw: set[str]) -> str:
        """A user-defined piece as the text that it meets, where U+2581 has replaced the blanks.

        One that would then be the same as a piece keeps its spelling: it was added to the vocabulary for raw text.
        """
        met = token.replace(" ", _SPACE)
        return token if met in raw else met

    def _refuse_normalisation(self) -> None:
        if self._flag("remove_extra_whitespaces", default=False):
            raise UnsupportedModelError(
                "tokenizer.ggml.remove_extra_whitespaces is true; this normalisation is not built: use a safetensors "
                "checkpoint with its tokenizer.json"
            )
        if self._metadata.get(_PREFIX + "precompiled_charsmap"):
            raise UnsupportedModelError(
                "tokenizer.ggml.precompiled_charsmap is set; SentencePiece character maps are not built: use a "
                "safetensors checkpoint with its tokenizer.json"
            )

    def _scored_merges(self, tokens: Sequence[str]) -> list[tuple[str, str]]:
        """The merges that SentencePiece's BPE makes, in its order: the pair that gives the best-scored piece first.

        Two splits of one piece tie in SentencePiece, which then takes the leftmost pair in the text; runs of equal
        characters hold their longer pieces at the left, so the longer left half comes first here. Only normal
        pieces take part: SentencePiece never builds control or byte pieces from text, and it matches
        user-defined ones before merging. Equal scores rank by id, as in vocabularies that give all pieces one score.
        """
        scores = self._array("scores", (int, float))
        if len(scores) != len(tokens):
            raise CheckpointError(f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens")
        bad = next((token for token, score in zip(tokens, scores, strict=True) if score != score), None)
        if bad is not None:
            raise CheckpointError(f"tokenizer.ggml.scores is NaN for token {bad!r}; convert the model again")
        pieces = [i for i, kind in enumerate(self._types) if kind == NORMAL]
        normal = {tokens[i] for i in pieces}
        merges: list[tuple[str, str]] = []
        for i in sorted(pieces, key=lambda piece: -scores[piece]):
            token = tokens[i]
            for cut in range(len(token) - 1, 0, -1):
                if token[:cut] in normal and token[cut:] in normal:
                    merges.append((token[:cut], token[cut:]))
        return merges

    def _words_start_at_spaces(self, tokens: Sequence[str]) -> bool:
        """Whether no normal piece holds U+2581 after another character.

        Then no merge crosses such a place, and cutting the text there changes nothing but the time: words are
        cached, and a long text is not one word.
        """
        inner = re.compile(f"[^{_SPACE}]{_SPACE}")
        return not any(k == NORMAL and inner.search(t) for t, k in zip(tokens, self._types, strict=True))

    def _vocab(self, tokens: Sequence[str]) -> dict[str, int]:
        """Token text -> id. Unused ids are left out, so that no text can become one."""
        vocab: dict[str, int] = {}
        for token_id, (token, kind) in enumerate(zip(tokens, self._types, strict=True)):
            if kind == UNUSED:
                continue
            if vocab.setdefault(token, token_id) != token_id:
                raise CheckpointError(
                    f"tokenizer.ggml.tokens has {token!r} twice, as ids {vocab[token]} and {token_id}; "
                    "convert the model again"
                )
        return vocab

    def _merge(self, index: int, text: str) -> tuple[str, str]:
        left, blank, right = text.partition(" ")
        if not (left and blank and right) or " " in right:
            raise CheckpointError(f"tokenizer.ggml.merges[{index}] is {text!r}; it must be two tokens and a blank")
        return left, right

    def _add_tokens(self, tokenizer: tokenizers.Tokenizer, tokens: Sequence[str], *, normalized: bool) -> None:
        kinds = list(zip(tokens, self._types, strict=True))
        special = [AddedToken(t, special=True, normalized=False) for t, k in kinds if t and k in (CONTROL, UNKNOWN)]
        plain = [AddedToken(t, special=False, normalized=normalized) for t, k in kinds if t and k == USER_DEFINED]
        tokenizer.add_special_tokens(special)
        tokenizer.add_tokens(plain)

    def _info(self, longest: int, *, add_bos: bool) -> VocabularyInfo:
        bos_id = self._token_id("bos_token_id")
        declared = [self._token_id(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id")]
        named = {name: self._token_id(key) for name, key in _NAMED_TOKENS.items()}
        control = [(i, t) for i, (t, k) in enumerate(zip(self._tokens, self._types, strict=True)) if k == CONTROL]
        return VocabularyInfo(
            vocab_size=len(self._tokens),
            bos_id=bos_id,
            eos_ids=end_ids(declared, control),
            add_bos=bos_id is not None and self._flag("add_bos_token", default=add_bos),
            longest_token=longest,
            named_tokens={name: self._tokens[token_id] for name, token_id in named.items() if token_id is not None},
        )

    def _array(self, key: str, kind: Any) -> Sequence[Any]:
        value = self._metadata.get(_PREFIX + key)
        if not isinstance(value, Sequence) or isinstance(value, (str, bytes)) or not value:
            found = "missing" if value is None else f"{type(value).__name__} instead of a filled array"
            raise CheckpointError(f"tokenizer.ggml.{key} is {found}; convert the model again")
        if not isinstance(value[0], kind):
            raise CheckpointError(f"tokenizer.ggml.{key} holds {type(value[0]).__name__}; convert the model again")
        return value

    def _flag(self, key: str, *, default: bool) -> bool:
        value = self._metadata.get(_PREFIX + key, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"tokenizer.ggml.{key} is {value!r}; it must be a boolean")
        return value

    def _token_id(self, key: str) -> int | None:
        value = self._metadata.get(_PREFIX + key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < len(self._tokens):
            raise CheckpointError(f"tokenizer.ggml.{key} is {value!r}; it must be an id below {len(self._tokens)}")
        return value


def _bpe(vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab=vocab, merges=merges, **options)
    except Exception as error:  # the library raises bare Exception, for a merge of tokens that do not exist
        raise CheckpointError(f"tokenizer.ggml.merges does not fit tokenizer.ggml.tokens: {error}") from error
