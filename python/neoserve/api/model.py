"""The served model as the HTTP layer sees it: names, text tools and defaults; no tensors."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from neoserve.text.load import load_tokenizer
from neoserve.text.template import ChatTemplate
from neoserve.text.tokenizer import Tokenizer
from neoserve.types.errors import ConfigurationError
from neoserve.types.model import GenerationDefaults, TokenizerSource

_NAME_CHARACTERS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One model under one or more names; the first is the one that metrics carry.

    ``context_length`` is the longest prompt plus output in tokens. ``fingerprint`` is OpenAI's
    ``system_fingerprint``: equal fingerprints and seeds give equal answers. ``details`` (JSON values: weight formats,
    KV type, threads) are shown by GET /v1/models so that a user can see what really runs.
    """

    names: tuple[str, ...]
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    generation: GenerationDefaults
    eos_token_ids: tuple[int, ...]
    context_length: int
    fingerprint: str | None = None
    details: Mapping[str, object] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def name(self) -> str:
        """The first name."""
        return self.names[0]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; none for ids beyond the tokenizer, which a padded output layer can rank among the
        alternatives although they are never drawn."""
        return self.tokenizer.token_bytes(token_id) if 0 <= token_id < self.tokenizer.vocab_size else b""


def build_served_model(
    source: TokenizerSource,
    *,
    names: Sequence[str],
    generation: GenerationDefaults,
    context_length: int,
    digest: str = "",
    details: Mapping[str, object] | None = None,
    template_file: str | None = None,
    tokenizer_pre: str | None = None,
) -> ServedModel:
    """Loads the tokenizer and templates of a checkpoint.

    ``template_file`` replaces the checkpoint's default chat template; ``tokenizer_pre`` names the splitter of a GGUF
    file that names none. Generation ends at the checkpoint's EOS ids and at every end-of-turn token of the
    vocabulary. Raises ConfigurationError for a bad name or file, and what load_tokenizer raises.
    """
    for name in names:
        if not name.strip() or len(name) > _NAME_CHARACTERS or not name.isprintable():
            text = f"served-model-name is {name!r}; it must have 1 to {_NAME_CHARACTERS} printable characters"
            raise ConfigurationError(text)
    tokenizer = load_tokenizer(source, pre_override=tokenizer_pre)
    templates = dict(source.chat_templates)
    origin = source.chat_template_origin
    if template_file is not None:
        templates["default"] = _read_template(template_file)
        origin = template_file
    return ServedModel(
        names=tuple(dict.fromkeys(names)),
        tokenizer=tokenizer,
        chat_template=ChatTemplate(templates, tokenizer, origin=origin) if templates else None,
        generation=generation,
        eos_token_ids=tuple(dict.fromkeys((*generation.eos_token_ids, *tokenizer.eos_ids))),
        context_length=context_length,
        fingerprint=_fingerprint(digest, details or {}),
        details=details or {},
    )


def _read_template(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigurationError(f"chat-template file {path} cannot be read: {reason}") from None


def _fingerprint(digest: str, details: Mapping[str, object]) -> str:
    """A short name of what decides an answer beside the request: the weights and how they are run."""
    deciding = ("architecture", "weight_formats", "kv_dtype")
    text = repr([digest, *((name, details.get(name)) for name in deciding)])
    return f"fp_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
