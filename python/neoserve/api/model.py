"""The served model as the HTTP layer sees it: names, text tools and defaults; no tensors."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from neoserve.types.model import GenerationDefaults

if TYPE_CHECKING:
    from neoserve.text.template import ChatTemplate
    from neoserve.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One model under one or more names; the first is the one that answers carry.

    ``context_length`` is the longest prompt plus output in tokens. ``details`` (JSON values: weight formats, KV
    type, threads) are shown by GET /v1/models so that a user can see what really runs.
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
        """The name that answers and metrics carry."""
        return self.names[0]
