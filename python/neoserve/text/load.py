"""Opens the tokenizer of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from neoserve.text.gguf_vocabulary import build_from_gguf
from neoserve.text.tokenizer import Tokenizer
from neoserve.text.tokenizer_cache import cache_key, default_cache_dir, read_entry, write_entry
from neoserve.text.vocabulary import VocabularyInfo, end_ids
from neoserve.types.errors import CheckpointError, UnsupportedModelError
from neoserve.types.model import TokenizerSource

_MODELS = ("BPE", "Unigram")
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_tokenizer(
    source: TokenizerSource, *, pre_override: str | None = None, cache_dir: Path | None = None
) -> Tokenizer:
    """The tokenizer of a checkpoint, from its tokenizer.json or built from GGUF metadata.

    ``pre_override`` names the splitter of a GGUF file whose ``tokenizer.ggml.pre`` is missing or unknown.
    Tokenizers built from GGUF are cached in ``cache_dir`` (None: the user's cache folder) under
    ``source.digest``; without a digest or a home folder nothing is cached. On a cache hit the metadata's arrays are not
    touched.

    Raises CheckpointError if the tokenizer is missing or damaged, UnsupportedModelError if its kind is not built.
    """
    if source.gguf is not None:
        return Tokenizer(*_from_gguf(source, source.gguf, pre_override, cache_dir or default_cache_dir()))
    if source.tokenizer_json is None:
        raise CheckpointError("the checkpoint has no tokenizer: put the model's tokenizer.json beside its weights")
    if pre_override is not None:
        raise UnsupportedModelError(
            f"the splitter override {pre_override!r} applies to GGUF files only, but the tokenizer is "
            f"{source.tokenizer_json}; drop the override"
        )
    return Tokenizer(*_from_json(source, source.tokenizer_json))


def _from_gguf(
    source: TokenizerSource, metadata: Mapping[str, object], pre_override: str | None, folder: Path | None
) -> tuple[tokenizers.Tokenizer, VocabularyInfo]:
    if not source.digest or folder is None:
        return build_from_gguf(metadata, pre_override)
    key = cache_key(source.digest, pre_override)
    entry = read_entry(folder, key)
    if entry is None:
        entry = build_from_gguf(metadata, pre_override)
        write_entry(folder, key, *entry)
    return entry


def _from_json(source: TokenizerSource, path: str) -> tuple[tokenizers.Tokenizer, VocabularyInfo]:
    try:
        backend = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # the library raises bare Exception for everything
        raise CheckpointError(f"{path} cannot be read as a tokenizer.json: {error}") from error
    kind = type(backend.model).__name__
    if kind not in _MODELS:
        raise UnsupportedModelError(f"{path} holds a {kind} vocabulary; supported are {' and '.join(_MODELS)}")
    _add_configured_tokens(backend, source.tokenizer_config, path)
    named = {name: _named_token(backend, source, name, path) for name in _NAMED_TOKENS}
    bos_id = named["bos_token"]
    vocab = backend.get_vocab(with_added_tokens=True)
    special = [(i, token.content) for i, token in backend.get_added_tokens_decoder().items() if token.special]
    return backend, VocabularyInfo(
        vocab_size=max(vocab.values()) + 1,
        bos_id=bos_id,
        eos_ids=end_ids([named["eos_token"]], special),
        add_bos=bos_id is not None and _adds_bos(backend, source.tokenizer_config, bos_id, path),
        longest_token=max(len(text.encode()) for text in vocab),
        named_tokens={name: str(backend.id_to_token(i)) for name, i in named.items() if i is not None},
    )


def _add_configured_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, object], path: str) -> None:
    """Older checkpoints list added tokens in tokenizer_config.json only."""
    listed = config.get("added_tokens_decoder", {})
    if not isinstance(listed, Mapping):
        raise CheckpointError(f"added_tokens_decoder of the tokenizer_config.json beside {path} must be an object")
    known = backend.get_added_tokens_decoder()
    for token_id, token in sorted(_configured_tokens(listed, path).items()):
        if token_id in known:
            continue
        backend.add_tokens([token])
        if backend.token_to_id(token.content) != token_id:
            raise CheckpointError(
                f"added_tokens_decoder gives {token.content!r} the id {token_id}, but {path} leads to "
                f"{backend.token_to_id(token.content)}; the two files belong to different models"
            )


def _configured_tokens(listed: Mapping[str, Any], path: str) -> dict[int, tokenizers.AddedToken]:
    tokens = {}
    for key, fields in listed.items():
        try:
            kept = {name: value for name, value in fields.items() if name != "__type"}
            tokens[int(key)] = tokenizers.AddedToken(**kept)
        except (AttributeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"added_tokens_decoder[{key!r}] of the tokenizer_config.json beside {path} is not a token: {error}"
            ) from error
    return tokens


def _named_token(backend: tokenizers.Tokenizer, source: TokenizerSource, name: str, path: str) -> int | None:
    value = source.tokenizer_config.get(name)
    text = value.get("content") if isinstance(value, Mapping) else value
    if text is None:
        return None
    token_id: int | None = backend.token_to_id(text) if isinstance(text, str) else None
    if token_id is None:
        raise CheckpointError(f"{name} of the tokenizer_config.json is {text!r}, which is not a token of {path}")
    return token_id


def _adds_bos(backend: tokenizers.Tokenizer, config: Mapping[str, object], bos_id: int, path: str) -> bool:
    """The configuration's word, else what the file's own post-processor does."""
    flag = config.get("add_bos_token")
    if flag is None:
        ids: list[int] = backend.encode("a", add_special_tokens=True).ids
        return ids[:1] == [bos_id]
    if not isinstance(flag, bool):
        raise CheckpointError(f"add_bos_token of the tokenizer_config.json beside {path} is {flag!r}, not a boolean")
    return flag
