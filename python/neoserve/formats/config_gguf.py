"""Metadata of a GGUF file -> ModelConfig, GenerationDefaults and TokenizerSource.

Conventions of the format that are undone or filled in here:

* Mistral models are written as architecture ``llama``, Llama 3's frequency scaling as the tensor ``rope_freqs.weight``.
* Gemma 3 files say neither which layers are global (every sixth) nor the base of local layers (10000) unless they
  differ, and not ``query_pre_attn_scalar``, which is the head size except in the 62-layer model (hidden / heads).
* Rope scaling without a type is linear.
"""

from __future__ import annotations

import logging
import math
from collections import ChainMap
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from typing import Final, cast

from neoserve.formats.fields import LIMITS, REQUIRED, Fields
from neoserve.formats.gguf import GGUFFile
from neoserve.formats.names import GGUF_ROPE_FACTORS
from neoserve.formats.parameters import check_config
from neoserve.types.errors import CheckpointError, ConfigurationError, UnsupportedModelError
from neoserve.types.model import ModelConfig, RopeConfig

ARCHITECTURES: Final = ("gemma3", "llama", "qwen2", "qwen3")

_GEMMA3_PERIOD: Final = 6
_GEMMA3_LOCAL_THETA: Final = 10_000.0
_GEMMA3_27B_LAYERS: Final = 62
_BIG: Final = 1e12

# Keys that change the computation and are not built; each with the values that leave it unchanged.
_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "expert_count": (0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.temperature_scale": (0.0,),
    "attention.temperature_length": (0,),
    "use_parallel_residual": (False,),
    "rope.scaling.alpha": (0.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
}

# Keys that only describe.
_REMARKS: Final = frozenset({"rope.scaling.finetuned", "attention.layer_norm_epsilon", "tensor_data_layout"})

_log = logging.getLogger(__name__)


def read_gguf_config(gguf: GGUFFile, overrides: Mapping[str, object] | None = None) -> ModelConfig:
    """The model that a GGUF file describes. ``overrides`` replace metadata keys (full names) before they are read.

    Raises UnsupportedModelError for what is not built, CheckpointError for keys that are missing or cannot be,
    ConfigurationError for an override that nothing reads.
    """
    file = gguf.paths[0].name
    values = ChainMap(dict(overrides or {}), cast("MutableMapping[str, object]", gguf.metadata))
    general = Fields(values, file, "general.")
    if general.text("type", "model") != "model":
        raise UnsupportedModelError(f"{file}: general.type is {general.get('type')!r}; only 'model' can be served")
    architecture = general.text("architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file}: general.architecture {architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    fields = Fields(values, file, f"{architecture}.")
    for name, neutral in _NEUTRAL.items():
        if name in fields and fields.get(name) not in neutral:
            raise UnsupportedModelError(f"{file}: {fields.prefix}{name} {fields.get(name)!r} is not supported")
    config = check_config(_read(gguf, fields, architecture), file)
    unknown = [name for name in fields.names() if fields.prefix + name not in fields.used and name not in _REMARKS]
    if unknown:
        _log.warning("%s: %s%s is not known (%d such keys); left out", file, fields.prefix, unknown[0], len(unknown))
    unread = sorted(set(overrides or {}) - fields.used - general.used)
    if unread:
        raise ConfigurationError(
            f"override {unread[0]!r} is not a key that a {architecture} model reads; "
            f"keys: {', '.join(sorted(fields.used))}"
        )
    return config


def _read(gguf: GGUFFile, fields: Fields, architecture: str) -> ModelConfig:
    hidden = fields.integer("embedding_length", 1, LIMITS["hidden_size"])
    layers = fields.integer("block_count", 1, LIMITS["num_layers"])
    heads = _uniform(fields, "attention.head_count", LIMITS["num_heads"], None)
    head_dim = _head_dim(fields, hidden, heads)
    max_position = fields.integer("context_length", 1, LIMITS["max_position"])
    tensors = gguf.tensors
    config = ModelConfig(
        architecture=architecture,
        vocab_size=_vocab_size(gguf, fields),
        hidden_size=hidden,
        intermediate_size=_uniform(fields, "feed_forward_length", LIMITS["intermediate_size"], None),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_uniform(fields, "attention.head_count_kv", LIMITS["num_heads"], heads),
        head_dim=head_dim,
        max_position=max_position,
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon", 1e-12, 1.0),
        attention_scale=fields.number("attention.scale", 0.0, 1e6, 0.0) or 1.0 / math.sqrt(head_dim),
        ropes=(_rope(gguf, fields, head_dim, max_position),),
        layer_ropes=(0,) * layers,
        layer_windows=_windows(fields, architecture, layers, max_position),
        # llama.cpp takes these biases for granted where the file has them; the accounting of tensors then
        # demands them of every layer.
        qkv_bias=architecture == "qwen2" or "blk.0.attn_q.bias" in tensors,
        attention_output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        qk_norm=architecture in ("qwen3", "gemma3"),
        tie_embeddings="output.weight" not in tensors,
    )
    return _gemma3(fields, config) if architecture == "gemma3" else config


def _uniform(fields: Fields, name: str, high: int, default: int | None) -> int:
    """A size that may be written once or per layer; layers that differ are not supported."""
    value = fields.get(name)
    if isinstance(value, list):
        if not value or any(item != value[0] for item in value):
            raise UnsupportedModelError(
                f"{fields.file}: {fields.prefix}{name} differs between layers; only equal layers are supported"
            )
        return Fields({fields.prefix + name: value[0]}, fields.file, fields.prefix).integer(name, 1, high)
    return fields.integer(name, 1, high, REQUIRED if default is None else default)


def _vocab_size(gguf: GGUFFile, fields: Fields) -> int:
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        found = "missing" if embedding is None else f"of shape {embedding.shape}"
        raise CheckpointError(f"{fields.file}: tensor 'token_embd.weight' is {found}; expected (vocabulary, hidden)")
    rows = embedding.shape[0]
    if not 1 <= rows <= LIMITS["vocab_size"]:
        raise CheckpointError(f"{fields.file}: token_embd.weight has {rows} rows; at most {LIMITS['vocab_size']}")
    stated = fields.optional_integer("vocab_size", 1, LIMITS["vocab_size"])
    if stated is not None and stated != rows:
        raise fields.fault("vocab_size", f"{rows}, the rows of token_embd.weight")
    tokens = "tokenizer.ggml.tokens"
    if tokens in gguf.metadata and gguf.metadata.array_length(tokens) > rows:
        raise CheckpointError(
            f"{fields.file}: {tokens} has {gguf.metadata.array_length(tokens)} entries, but token_embd.weight only "
            f"{rows} rows"
        )
    return rows


def _head_dim(fields: Fields, hidden: int, heads: int) -> int:
    if "attention.key_length" not in fields and hidden % heads:
        raise fields.fault(
            "attention.head_count", f"a divisor of embedding_length ({hidden}), or attention.key_length must be given"
        )
    head_dim = fields.integer("attention.key_length", 2, LIMITS["head_dim"], hidden // heads)
    if not 2 <= head_dim <= LIMITS["head_dim"]:
        raise fields.fault("attention.head_count", f"such that embedding_length ({hidden}) / it is at least 2")
    value_dim = fields.integer("attention.value_length", 1, LIMITS["head_dim"], head_dim)
    if value_dim != head_dim:
        raise UnsupportedModelError(
            f"{fields.file}: {fields.prefix}attention.value_length is {value_dim} but key_length is {head_dim}; "
            "only equal lengths are supported"
        )
    return head_dim


def _rope(gguf: GGUFFile, fields: Fields, head_dim: int, max_position: int) -> RopeConfig:
    rope = RopeConfig(
        theta=fields.number("rope.freq_base", 1.0, _BIG, 10_000.0),
        rotary_dim=fields.integer("rope.dimension_count", 2, LIMITS["head_dim"], head_dim),
        frequency_factors=_frequency_factors(gguf),
    )
    legacy = fields.number("rope.scale_linear", 0.0, 1e6, 0.0)
    # A factor of 0 means "none" in this format.
    factor = fields.number("rope.scaling.factor", 0.0, 1e6, legacy) or 1.0
    kind = fields.text("rope.scaling.type", "linear")
    match kind:
        case "none":
            return rope
        case "linear":
            return rope if factor == 1.0 else replace(rope, kind="linear", factor=factor)
        case "yarn":
            original = fields.integer("rope.scaling.original_context_length", 0, LIMITS["max_position"], 0)
            return replace(
                rope,
                kind="yarn",
                factor=factor,
                original_max_position=original or max_position,
                beta_fast=fields.number("rope.scaling.yarn_beta_fast", 1e-6, 1e6, 32.0),
                beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1e-6, 1e6, 1.0),
                attention_factor=_yarn_attention_factor(fields, factor),
            )
    raise UnsupportedModelError(
        f"{fields.file}: {fields.prefix}rope.scaling.type {kind!r} is not supported; supported: none, linear, yarn"
    )


def _yarn_attention_factor(fields: Fields, factor: float) -> float | None:
    """GGUF's factor multiplies the one of the paper; None leaves the paper's alone."""
    stated = fields.optional_number("rope.scaling.attn_factor", 1e-6, 1e6)
    extra = fields.optional_number("rope.scaling.yarn_attn_factor", -1.0, 1e6)
    if stated is None and extra is not None and extra > 0:
        stated = extra
    return None if stated is None else stated * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)


def _frequency_factors(gguf: GGUFFile) -> tuple[float, ...] | None:
    tensor = gguf.tensors.get(GGUF_ROPE_FACTORS)
    if tensor is None:
        return None
    values = [float(value) for value in tensor.read_f32().reshape(-1)]
    bad = next((value for value in values if not (math.isfinite(value) and value > 0)), None)
    if bad is not None:
        raise CheckpointError(
            f"{gguf.paths[0].name}: tensor {GGUF_ROPE_FACTORS!r} holds {bad}; factors must be finite and above 0"
        )
    return tuple(values)


def _windows(fields: Fields, architecture: str, layers: int, max_position: int) -> tuple[int | None, ...]:
    # Zero is how converters write "no window".
    window = fields.integer("attention.sliding_window", 0, LIMITS["max_position"], 0)
    if not window or (architecture != "gemma3" and window >= max_position):
        return (None,) * layers
    if architecture == "llama":
        return (window,) * layers
    if architecture == "gemma3":
        return _gemma3_windows(fields, layers, window)
    raise UnsupportedModelError(
        f"{fields.file}: {fields.prefix}attention.sliding_window is {window}; a GGUF file does not say which layers of "
        f"a {architecture} model it is for: use the safetensors checkpoint"
    )


def _gemma3_windows(fields: Fields, layers: int, window: int) -> tuple[int | None, ...]:
    """``sliding_window_pattern`` is a period (its last layer is global) or one flag per layer (true: windowed)."""
    name = "attention.sliding_window_pattern"
    pattern = fields.get(name)
    if isinstance(pattern, list):
        if len(pattern) != layers or not all(isinstance(item, bool) for item in pattern):
            raise fields.fault(name, f"a period or {layers} booleans (one per layer)")
        return tuple(window if windowed else None for windowed in pattern)
    period = fields.integer(name, 1, LIMITS["num_layers"], _GEMMA3_PERIOD)
    return tuple(window if (index + 1) % period else None for index in range(layers))


def _gemma3(fields: Fields, config: ModelConfig) -> ModelConfig:
    is_27b = config.num_layers == _GEMMA3_27B_LAYERS
    scalar = config.hidden_size // config.num_heads if is_27b else config.head_dim
    (rope,) = config.ropes
    # Scaling and factors stretch the global layers only.
    local = RopeConfig(
        theta=fields.number("rope.freq_base_swa", 1.0, _BIG, _GEMMA3_LOCAL_THETA), rotary_dim=rope.rotary_dim
    )
    return replace(
        config,
        ropes=(rope, local),
        layer_ropes=tuple(0 if window is None else 1 for window in config.layer_windows),
        attention_scale=fields.number("attention.scale", 0.0, 1e6, 0.0) or scalar**-0.5,
        activation="gelu_tanh",
        post_norms=True,
        embedding_scale=math.sqrt(config.hidden_size),
    )
