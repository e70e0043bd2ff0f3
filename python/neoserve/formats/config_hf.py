"""config.json of a Hugging Face checkpoint -> ModelConfig, in the old and the transformers-5 spelling."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, cast

from neoserve.formats.fields import LIMITS, REQUIRED, Fields
from neoserve.formats.parameters import check_config
from neoserve.formats.rope import LAYER_TYPES, read_layer_ropes, read_rope
from neoserve.types.errors import CheckpointError, ConfigurationError, UnsupportedModelError
from neoserve.types.model import Activation, ModelConfig

CONFIG_FILE: Final = "config.json"

_log = logging.getLogger(__name__)

# Class name in ``architectures`` -> (our name, the ``model_type`` that goes with it).
_CLASSES: Final[Mapping[str, tuple[str, str]]] = {
    "LlamaForCausalLM": ("llama", "llama"),
    "MistralForCausalLM": ("mistral", "mistral"),
    "Qwen2ForCausalLM": ("qwen2", "qwen2"),
    "Qwen3ForCausalLM": ("qwen3", "qwen3"),
    "Gemma3ForCausalLM": ("gemma3", "gemma3_text"),
    "Gemma3ForConditionalGeneration": ("gemma3", "gemma3"),
}
_ACTIVATIONS: Final[Mapping[str, Activation]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Defaults:
    """What transformers assumes where config.json is silent; None means that there is no fixed value."""

    max_position: int
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    tie: bool = False
    head_dim: int | None = None
    window: int | None = 4096


_DEFAULTS: Final[Mapping[str, _Defaults]] = {
    "llama": _Defaults(max_position=2048, window=None),
    "mistral": _Defaults(max_position=131_072),
    "qwen2": _Defaults(max_position=32_768),
    "qwen3": _Defaults(max_position=32_768, head_dim=128),
    "gemma3": _Defaults(max_position=131_072, tie=True, head_dim=256),
}
# Published Gemma 3 files leave out whatever equals the defaults of the configuration class.
_GEMMA3_SHAPE: Final[Mapping[str, int]] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def read_hf_config(
    values: Mapping[str, object], *, file: str = CONFIG_FILE, overrides: Mapping[str, object] | None = None
) -> ModelConfig:
    """The model that a parsed config.json describes.

    ``overrides`` replace fields before they are read, e.g. ``{"rope_scaling": {...}}``; in a multimodal
    configuration they act on the text part. Raises UnsupportedModelError for what is not built (architecture,
    rope type, activation, quantisation, soft caps), CheckpointError for values that cannot be, and
    ConfigurationError for an override that nothing reads.
    """
    outer = Fields(values, file)
    architecture = _architecture(outer)
    text = _text_table(outer, values)
    fields = Fields({**text, **(overrides or {})}, file)
    _refuse_unsupported(outer, fields, architecture)
    config = check_config(_read(fields, architecture, outer), file)
    unread = sorted(set(overrides or {}) - fields.used)
    if unread:
        raise ConfigurationError(
            f"override {unread[0]!r} is not a field that a {architecture} model reads; "
            f"fields: {', '.join(sorted(fields.used))}"
        )
    return config


def _architecture(outer: Fields) -> str:
    classes, model_type = outer.texts("architectures"), outer.text("model_type")
    if classes:
        found = _CLASSES.get(classes[0])
        if found is None:
            raise UnsupportedModelError(
                f"{outer.file}: architecture {classes[0]!r} is not supported; supported: {', '.join(_CLASSES)}"
            )
        name, expected = found
        if model_type is not None and model_type != expected:
            raise CheckpointError(
                f"{outer.file}: architectures says {classes[0]!r} but model_type is {model_type!r}; "
                f"expected {expected!r}"
            )
        return name
    by_type = {expected: name for name, expected in _CLASSES.values()}
    if model_type in by_type:
        return by_type[model_type]
    raise UnsupportedModelError(
        f"{outer.file}: model_type is {model_type!r} and architectures is absent; "
        f"supported model types: {', '.join(by_type)}"
    )


def _text_table(outer: Fields, values: Mapping[str, object]) -> Mapping[str, object]:
    """The table that describes the text model: ``text_config`` of a multimodal checkpoint, else the file itself."""
    if outer.get("model_type") != "gemma3" and outer.table("text_config") is None:
        return values
    if outer.table("text_config") is None:
        raise CheckpointError(f"{outer.file}: text_config is missing; a multimodal checkpoint needs it")
    text = dict(cast("Mapping[str, object]", outer.get("text_config")))
    if "tie_word_embeddings" not in text and "tie_word_embeddings" in values:
        text["tie_word_embeddings"] = values["tie_word_embeddings"]
    return text


def _refuse_unsupported(outer: Fields, fields: Fields, architecture: str) -> None:
    """Refuses by name what would change the result if it were skipped."""
    for source in (outer, fields):
        quantisation = source.table("quantization_config")
        if quantisation is not None:
            method = quantisation.get("quant_method")
            raise UnsupportedModelError(
                f"{source.file}: quantization_config.quant_method {method!r} is not supported in safetensors; use the "
                "float16, bfloat16 or float32 checkpoint, or a GGUF file of this model"
            )
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if fields.optional_number(name, 0.0, 1e6):
            raise UnsupportedModelError(f"{fields.file}: {name} is {fields.get(name)!r}; only null is supported")
    refused = ["use_bidirectional_attention"]
    if architecture != "llama":
        refused.append("mlp_bias")
    if architecture == "mistral":
        refused.append("attention_bias")
    for name in refused:
        if fields.get(name):
            raise UnsupportedModelError(
                f"{fields.file}: {name} is {fields.get(name)!r}; {architecture} is supported without it"
            )


def _read(fields: Fields, architecture: str, outer: Fields) -> ModelConfig:
    defaults = _DEFAULTS[architecture]
    shape = _GEMMA3_SHAPE if architecture == "gemma3" else {}

    def size(name: str, limit: str) -> int:
        return fields.integer(name, 1, LIMITS[limit], shape.get(name, REQUIRED))

    hidden, heads = size("hidden_size", "hidden_size"), size("num_attention_heads", "num_heads")
    layers = size("num_hidden_layers", "num_layers")
    head_dim = _head_dim(fields, hidden, heads, defaults.head_dim)
    max_position = fields.integer("max_position_embeddings", 1, LIMITS["max_position"], defaults.max_position)
    bias = architecture != "qwen2" and fields.flag("attention_bias", False)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=size("vocab_size", "vocab_size"),
        hidden_size=hidden,
        intermediate_size=size("intermediate_size", "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=fields.integer(
            "num_key_value_heads", 1, LIMITS["num_heads"], shape.get("num_key_value_heads", heads)
        ),
        head_dim=head_dim,
        max_position=max_position,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-12, 1.0, defaults.rms_norm_eps),
        attention_scale=1.0 / math.sqrt(head_dim),
        ropes=(),
        layer_ropes=(0,) * layers,
        layer_windows=(None,) * layers,
        activation=_activation(fields, architecture),
        qkv_bias=bias or architecture == "qwen2",
        attention_output_bias=bias,
        mlp_bias=architecture == "llama" and fields.flag("mlp_bias", False),
        qk_norm=architecture in ("qwen3", "gemma3"),
        tie_embeddings=fields.flag("tie_word_embeddings", defaults.tie),
    )
    if architecture == "gemma3":
        return _gemma3(fields, config)
    rope = read_rope(fields, head_dim=head_dim, max_position=max_position, theta=defaults.rope_theta)
    return replace(config, ropes=(rope,), layer_windows=_windows(fields, architecture, layers))


def _head_dim(fields: Fields, hidden: int, heads: int, default: int | None) -> int:
    if default is not None and not fields.states("head_dim"):
        return default
    if "head_dim" in fields:
        return fields.integer("head_dim", 2, LIMITS["head_dim"])
    if hidden % heads:
        raise fields.fault("num_attention_heads", f"a divisor of hidden_size ({hidden}), or head_dim must be given")
    head_dim = hidden // heads
    if not 2 <= head_dim <= LIMITS["head_dim"]:
        raise fields.fault("num_attention_heads", f"such that hidden_size ({hidden}) / it is 2 to {LIMITS['head_dim']}")
    return head_dim


def _activation(fields: Fields, architecture: str) -> Activation:
    field, default = ("hidden_activation", "gelu_pytorch_tanh") if architecture == "gemma3" else ("hidden_act", "silu")
    name = fields.text(field, default)
    if name is None or name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"{fields.file}: {field} {name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _window(fields: Fields, default: int | None) -> int | None:
    """``sliding_window`` in tokens; an explicit null means full attention, an absent field the default."""
    if not fields.states("sliding_window"):
        return default
    return fields.optional_integer("sliding_window", 1, LIMITS["max_position"])


def _windows(fields: Fields, architecture: str, layers: int) -> tuple[int | None, ...]:
    window = _window(fields, _DEFAULTS[architecture].window)
    if architecture == "llama":
        if window is not None:
            _log.warning("%s: sliding_window is %d; llama models do not use it", fields.file, window)
        return (None,) * layers
    if architecture == "mistral":
        return _by_layer_type(fields, layers, window) or (window,) * layers
    if not fields.flag("use_sliding_window", False):
        window = None
    first = fields.integer("max_window_layers", 0, LIMITS["num_layers"], 28)
    default = tuple(window if index >= first else None for index in range(layers))
    return _by_layer_type(fields, layers, window) or default


def _by_layer_type(fields: Fields, layers: int, window: int | None) -> tuple[int | None, ...] | None:
    """Windows as ``layer_types`` lists them, or None where the file has no such list."""
    types = fields.texts("layer_types")
    if not types:
        return None
    if len(types) != layers:
        raise fields.fault("layer_types", f"a list of {layers} entries (num_hidden_layers), found {len(types)}")
    unknown = next((name for name in types if name not in LAYER_TYPES), None)
    if unknown is not None:
        raise UnsupportedModelError(
            f"{fields.file}: layer_types has {unknown!r}, which is not supported; supported: {', '.join(LAYER_TYPES)}"
        )
    if window is None and "sliding_attention" in types:
        raise fields.fault("sliding_window", "a number of tokens, for layer_types has sliding_attention layers")
    return tuple(window if name == "sliding_attention" else None for name in types)


def _gemma3(fields: Fields, config: ModelConfig) -> ModelConfig:
    """What Gemma 3 adds: two rope bases, alternating windows, its own attention scale, scaled embeddings."""
    window = _window(fields, _DEFAULTS["gemma3"].window)
    windows = _by_layer_type(fields, config.num_layers, window)
    if windows is None:
        period = fields.integer(
            "sliding_window_pattern", 1, LIMITS["num_layers"], fields.integer("_sliding_window_pattern", 1, 1024, 6)
        )
        if window is None and period > 1:
            raise fields.fault("sliding_window", "a number of tokens: Gemma 3 has sliding attention layers")
        windows = tuple(window if (index + 1) % period else None for index in range(config.num_layers))
    ropes = read_layer_ropes(fields, head_dim=config.head_dim, max_position=config.max_position)
    return replace(
        config,
        attention_scale=fields.number("query_pre_attn_scalar", 1e-6, 1e9, 256.0) ** -0.5,
        ropes=ropes,
        layer_windows=windows,
        layer_ropes=tuple(0 if layer_window is None else 1 for layer_window in windows),
        post_norms=True,
        embedding_scale=math.sqrt(config.hidden_size),
    )
