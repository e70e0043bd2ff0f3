"""Text to token ids and back."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import tokenizers
from tokenizers import pre_tokenizers

from neoserve.text.special_text import SpecialText
from neoserve.text.token_bytes import TokenBytes
from neoserve.text.vocabulary import VocabularyInfo
from neoserve.types.errors import ContextLengthError, InvalidRequestError

# One text at a time gains nothing from the library's thread pool, whose threads would compete with the engine's and
# not have the priority of the calling thread.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Unicode normalisation can shorten text (three conjoining Hangul letters become one), at most to a third.
_NORMALISATION_SHRINKS = 3


class Tokenizer:
    """A vocabulary with its rules, safe to share between threads.

    "Special" tokens are the control tokens of the vocabulary (BOS, end of turn, ...). User-defined tokens, like
    Qwen's ``<tool_call>``, are not special: they are matched in any text, as Hugging Face does.
    """

    def __init__(self, backend: tokenizers.Tokenizer, info: VocabularyInfo) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._info = info
        self._added: dict[int, tokenizers.AddedToken] = backend.get_added_tokens_decoder()
        special = {token_id for token_id, token in self._added.items() if token.special}
        ends = {token_id for token_id in (info.bos_id, *info.eos_ids) if token_id is not None}
        self._special_ids = frozenset(special | ends)
        self._bytes = TokenBytes(backend)
        self._bytes_of_id: dict[int, bytes] = {}

    @property
    def vocab_size(self) -> int:
        """One more than the largest id; some ids below it may stand for no text."""
        return self._info.vocab_size

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of all control tokens."""
        return self._special_ids

    @property
    def bos_id(self) -> int | None:
        """The beginning-of-sequence token, if the vocabulary has one."""
        return self._info.bos_id

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every token that ends a turn or a text, the checkpoint's own EOS first."""
        return self._info.eos_ids

    @property
    def adds_bos(self) -> bool:
        """Whether the model was trained with BOS in front of plain prompts."""
        return self._info.add_bos

    @property
    def leading_blanks(self) -> int:
        """How many blanks the decoder drops at the start of a text (1 for Llama 2, 0 for byte-level BPE)."""
        return self._bytes.leading_blanks

    @property
    def named_tokens(self) -> Mapping[str, str]:
        """Texts of the tokens that chat templates know by name: "bos_token", "eos_token", ..."""
        return self._info.named_tokens

    def is_special(self, token_id: int) -> bool:
        """Whether ``token_id`` is a control token."""
        return token_id in self._special_ids

    def encode(
        self, text: str, *, add_bos: bool = False, parse_special: bool = False, max_tokens: int | None = None
    ) -> list[int]:
        """Token ids of ``text``.

        ``parse_special`` turns the text of special tokens into those tokens; without it they are ordinary text.
        ``add_bos`` puts BOS in front unless the ids already start with it. ``max_tokens`` refuses, before any
        work, a text too long to fit that many tokens (ContextLengthError); a text that passes may still be longer.
        The interpreter lock is released meanwhile. Raises InvalidRequestError for text that is not Unicode.
        """
        self._check_length(text, max_tokens)
        if parse_special:
            ids = _ids(self._backend, text)
        else:
            ids = _ids(self._plain, text)
            self._check_plain(ids)
        return self._with_bos(ids) if add_bos else ids

    def encode_marked(self, text: str, mark: str, *, add_bos: bool = False, max_tokens: int | None = None) -> list[int]:
        """Token ids of ``text`` with special tokens parsed, except where ``mark`` breaks their text.

        ``mark`` is one character put into special-token text that must stay ordinary
        (``SpecialText.broken_by``); it is dropped. Text without a mark is encoded as a whole.
        """
        if mark not in text:
            return self.encode(text, add_bos=add_bos, parse_special=True, max_tokens=max_tokens)
        self._check_length(text, max_tokens)
        ids: list[int] = []
        pieces = self._around_special(text)
        for index, piece in enumerate(pieces):
            if index % 2:
                ids.append(self._id_of_special[piece])
                continue
            clean = piece.replace(mark, "")
            found = _ids(self._continued if index else self._plain, clean) if clean else []
            self._check_plain(found)
            ids += found
        return self._with_bos(ids) if add_bos else ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids``: their bytes as UTF-8, U+FFFD for each invalid part. Ids without text give none."""
        data = b"".join(
            self.token_bytes(token_id)
            for token_id in ids
            if not (skip_special_tokens and token_id in self._special_ids)
        )
        for _ in range(self.leading_blanks):
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that ``token_id`` stands for; empty for ids without text.

        Raises InvalidRequestError for an id outside the vocabulary.
        """
        known = self._bytes_of_id.get(token_id)
        if known is None:
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequestError(f"token id is {token_id}; it must be in [0, {self.vocab_size})")
            text = self._backend.id_to_token(token_id)
            known = self._bytes_of_id[token_id] = b"" if text is None else self._bytes.of(text)
        return known

    def token_text(self, token_id: int) -> str:
        """The token's own text, with U+FFFD for bytes that are not whole characters."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    @cached_property
    def special_text(self) -> SpecialText:
        """A search for the text of special tokens."""
        return SpecialText(self._id_of_special)

    @cached_property
    def _id_of_special(self) -> dict[str, int]:
        texts = ((self._backend.id_to_token(token_id), token_id) for token_id in self._special_ids)
        return {text: token_id for text, token_id in texts if text}

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """Like the backend, but blind to special tokens."""
        return self._blind(self._backend.pre_tokenizer)

    @cached_property
    def _continued(self) -> tokenizers.Tokenizer:
        """Like ``_plain``, for text that does not start the prompt."""
        current = self._backend.pre_tokenizer
        if not isinstance(current, pre_tokenizers.Metaspace):
            return self._plain
        state = json.loads(current.__getstate__())
        if state.get("prepend_scheme") != "first":
            return self._plain
        never = pre_tokenizers.Metaspace(state["replacement"], prepend_scheme="never", split=state["split"])
        return self._blind(never)

    def _blind(self, pre_tokenizer: Any) -> tokenizers.Tokenizer:
        blind = tokenizers.Tokenizer(self._backend.model)  # shares the model, so it costs next to nothing
        if self._backend.normalizer is not None:
            blind.normalizer = self._backend.normalizer
        if pre_tokenizer is not None:
            blind.pre_tokenizer = pre_tokenizer
        blind.add_tokens([token for _, token in sorted(self._added.items())])
        if blind.get_added_tokens_decoder().keys() != self._added.keys():
            # Added ids with gaps cannot be given one by one; a full copy keeps them.
            blind = copy.deepcopy(self._backend)
            if pre_tokenizer is not None:
                blind.pre_tokenizer = pre_tokenizer
        blind.encode_special_tokens = True
        return blind

    def _around_special(self, text: str) -> list[str]:
        """Text and special tokens in turn, starting with text; blanks that a token swallows are dropped."""
        pieces = self.special_text.pattern.split(text)
        for index in range(1, len(pieces), 2):
            token = self._added.get(self._id_of_special[pieces[index]])
            if token is not None and token.lstrip:
                pieces[index - 1] = pieces[index - 1].rstrip()
            if token is not None and token.rstrip:
                pieces[index + 1] = pieces[index + 1].lstrip()
        return pieces

    def _with_bos(self, ids: list[int]) -> list[int]:
        bos = self.bos_id
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]

    def _check_length(self, text: str, max_tokens: int | None) -> None:
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"the text has {text[error.start]!r} at character {error.start}, half of a surrogate pair; "
                "send valid Unicode"
            ) from error
        if max_tokens is None:
            return
        longest = self._info.longest_token * _NORMALISATION_SHRINKS
        if size > max_tokens * longest:
            raise ContextLengthError(
                f"the prompt has {size} bytes, which cannot fit {max_tokens} tokens of at most {longest} bytes; "
                "shorten it"
            )

    def _check_plain(self, ids: Sequence[int]) -> None:
        """Plain text must not become control tokens, whatever the vocabulary's merges can build."""
        if self._special_ids.isdisjoint(ids):
            return
        token_id = next(token_id for token_id in ids if token_id in self._special_ids)
        raise InvalidRequestError(
            f"the text holds {self.token_text(token_id)!r}, which this tokenizer cannot tell from its control "
            f"token {token_id}; remove it"
        )


def _ids(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    # The batch call is the one that releases the interpreter lock, and "fast" skips the offsets.
    ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids
