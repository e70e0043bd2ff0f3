"""What a GGUF file says about text: tokenizer metadata, chat templates, generation defaults."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Final

from neoserve.formats.fields import Fields
from neoserve.formats.gguf import GGUFFile, GGUFMetadata
from neoserve.types.errors import CheckpointError
from neoserve.types.model import GenerationDefaults, TokenizerSource

_PREFIX: Final = "tokenizer."
_TEMPLATE: Final = "tokenizer.chat_template"
_EOS_KEYS: Final = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
_ID_KEYS: Final = (*_EOS_KEYS, "tokenizer.ggml.bos_token_id")


class TokenizerMetadata(Mapping[str, object]):
    """The ``tokenizer.*`` keys of a GGUF file as Python values, each decoded when it is looked up.

    A built tokenizer comes from the cache on most starts; its vocabulary is then never decoded. Pickles as a dict.
    """

    def __init__(self, metadata: GGUFMetadata) -> None:
        self._metadata = metadata
        self._keys = [key for key in metadata if key.startswith(_PREFIX)]

    def __getitem__(self, key: str) -> object:
        if not key.startswith(_PREFIX):
            raise KeyError(key)
        return self._metadata[key]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key.startswith(_PREFIX) and key in self._metadata

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __reduce__(self) -> tuple[type[dict[str, object]], tuple[dict[str, object]]]:
        return dict, (dict(self),)


def read_gguf_tokenizer(gguf: GGUFFile) -> TokenizerSource:
    """The tokenizer's metadata, chat templates by name, and the digest of the stored values."""
    metadata = gguf.metadata
    digest = hashlib.sha256(b"gguf tokenizer")
    templates: dict[str, str] = {}
    for key in sorted(key for key in metadata if key.startswith(_PREFIX)):
        kind, count, data = metadata.raw_value(key)
        digest.update(f"\n{key} {kind} {count} {len(data)}\n".encode())
        digest.update(data)
        if key == _TEMPLATE:
            templates["default"] = metadata.get_str(key)
        elif key.startswith(_TEMPLATE + "."):
            templates[key[len(_TEMPLATE) + 1 :]] = metadata.get_str(key)
    return TokenizerSource(
        gguf=TokenizerMetadata(metadata),
        chat_templates=templates,
        chat_template_origin=f"{gguf.paths[0].name}: {_TEMPLATE}" if templates else None,
        digest=digest.hexdigest(),
    )


def read_gguf_generation(gguf: GGUFFile, vocab_size: int) -> GenerationDefaults:
    """The sampling defaults (``general.sampling.*``) and the ids that the file declares as EOS, EOT and EOM.

    Many files declare less than a chat needs; the tokenizer adds the tokens whose text ends a turn. Raises
    CheckpointError for a special token id outside the vocabulary or a default out of range.
    """
    metadata = gguf.metadata
    ids: dict[int, None] = {}
    for key in _ID_KEYS:
        value = metadata.get_int(key, None)
        if value is None:
            continue
        if not 0 <= value < vocab_size:
            raise CheckpointError(f"{gguf.paths[0].name}: {key} is {value}; it must be in [0, {vocab_size - 1}]")
        if key in _EOS_KEYS:
            ids[value] = None
    sampling = Fields(metadata, gguf.paths[0].name, "general.sampling.")
    return GenerationDefaults(
        eos_token_ids=tuple(ids),
        temperature=sampling.optional_number("temp", 0.0, 100.0),
        top_k=sampling.optional_integer("top_k", 0, 2**31 - 1),
        top_p=sampling.optional_positive("top_p", 1.0),
        min_p=sampling.optional_number("min_p", 0.0, 1.0),
        repetition_penalty=sampling.optional_positive("penalty_repeat", 100.0),
    )
