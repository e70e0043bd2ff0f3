"""What a checkpoint says about its model, in one vocabulary for every format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]
RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """One rotary embedding (half-rotation pairing i, i + rotary_dim / 2, as Hugging Face stores q and k).

    ``frequency_factors`` are GGUF's per-pair divisors of the inverse frequencies (``rope_freqs.weight``).
    Fields that a kind does not use stay None.
    """

    theta: float
    rotary_dim: int
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    frequency_factors: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape and behaviour of a decoder-only model.

    ``layer_windows[i]`` is layer i's sliding window in tokens (a query sees keys in
    ``(position - window, position]``), or None for full attention. ``layer_ropes[i]`` indexes ``ropes``.
    ``norm`` weights are canonical: Gemma's +1 is already added. ``attention_scale`` multiplies q.k.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    attention_scale: float
    ropes: tuple[RopeConfig, ...]
    layer_ropes: tuple[int, ...]
    layer_windows: tuple[int | None, ...]
    activation: Activation = "silu"
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    embedding_scale: float = 1.0
    tie_embeddings: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Defaults that the checkpoint recommends (``generation_config.json``); None where it says nothing."""

    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSource:
    """All that the text layer needs to build a tokenizer; it opens no model file itself.

    Either ``tokenizer_json`` (path of a Hugging Face tokenizer.json, with ``tokenizer_config`` and
    ``special_tokens_map`` as parsed JSON) or ``gguf`` (the ``tokenizer.*`` metadata, arrays as Python
    lists) is set. ``chat_templates`` maps a template's name to its text; "default" is the usual one.
    ``digest`` identifies the content and keys the on-disk cache of built tokenizers.
    """

    tokenizer_json: str | None = None
    tokenizer_config: Mapping[str, object] = field(default_factory=dict)
    gguf: Mapping[str, object] | None = None
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    chat_template_origin: str | None = None
    digest: str = ""
