"""What the text layer knows about a vocabulary beside the ``tokenizers`` object itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

# Control tokens by which published chat models end a turn or a text. A checkpoint may name only one of them as
# EOS (Gemma 3's GGUF names <eos>, while its chat answers end with <end_of_turn>), so all that exist count.
END_TOKENS = frozenset(
    {
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|eot|>",
        "<|end_of_turn|>",
        "<|END_OF_TURN_TOKEN|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<eos>",
        "</s>",
        "<EOT>",
        "[EOS]",
        "[EOT]",
        "<｜end▁of▁sentence｜>",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyInfo:
    """Facts about one vocabulary.

    ``vocab_size`` is one more than the largest id, unused ids included. ``eos_ids`` are all ids that end
    generation, the checkpoint's own first. ``add_bos`` is whether plain prompts start with BOS.
    ``longest_token`` is the most UTF-8 bytes of text that one token can stand for. ``named_tokens`` are the texts
    that chat templates know by name ("bos_token", "eos_token", ...).
    """

    vocab_size: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    add_bos: bool
    longest_token: int
    named_tokens: Mapping[str, str] = field(default_factory=dict)


def end_ids(declared: Iterable[int | None], control: Iterable[tuple[int, str]]) -> tuple[int, ...]:
    """The declared EOS ids (None: absent) followed by every control token (id, text) that ends a turn."""
    found = {text: token_id for token_id, text in control if text in END_TOKENS}
    if "<|return|>" in found:
        found.pop("<|end|>", None)  # gpt-oss ends each of an answer's messages with it, and the answer with <|return|>
    ids = [token_id for token_id in declared if token_id is not None]
    ids += sorted(found.values())
    return tuple(dict.fromkeys(ids))
