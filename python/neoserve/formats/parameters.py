"""The parameters that a model must have: canonical name -> shape, from its configuration alone."""

from __future__ import annotations

from neoserve.types.errors import CheckpointError
from neoserve.types.model import ModelConfig

EMBEDDING = "embedding"
LM_HEAD = "lm_head"
FINAL_NORM = "final_norm"

Shape = tuple[int, ...]


def model_parameters(config: ModelConfig) -> dict[str, Shape]:
    """Every parameter of the model outside and inside its layers; ``lm_head`` only when it is not tied."""
    shapes: dict[str, Shape] = {
        EMBEDDING: (config.vocab_size, config.hidden_size),
        FINAL_NORM: (config.hidden_size,),
    }
    if not config.tie_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, config.hidden_size)
    layer = layer_parameters(config)
    for index in range(config.num_layers):
        shapes.update({f"layers.{index}.{name}": shape for name, shape in layer.items()})
    return shapes


def layer_parameters(config: ModelConfig) -> dict[str, Shape]:
    """Parameters of one layer, without the ``layers.{i}.`` prefix."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, Shape] = {
        "input_norm": (hidden,),
        "attention.q": (query, hidden),
        "attention.k": (key_value, hidden),
        "attention.v": (key_value, hidden),
        "attention.o": (hidden, query),
        "mlp_norm": (hidden,),
        "mlp.gate": (inner, hidden),
        "mlp.up": (inner, hidden),
        "mlp.down": (hidden, inner),
    }
    if config.qkv_bias:
        shapes |= {f"attention.{part}_bias": shapes[f"attention.{part}"][:1] for part in "qkv"}
    if config.attention_output_bias:
        shapes["attention.o_bias"] = (hidden,)
    if config.qk_norm:
        shapes |= {"attention.q_norm": (config.head_dim,), "attention.k_norm": (config.head_dim,)}
    if config.post_norms:
        shapes |= {"post_attention_norm": (hidden,), "post_mlp_norm": (hidden,)}
    if config.mlp_bias:
        shapes |= {f"mlp.{part}_bias": shapes[f"mlp.{part}"][:1] for part in ("gate", "up", "down")}
    return shapes


def check_config(config: ModelConfig, file: str) -> ModelConfig:
    """The same configuration, once its numbers fit together. Raises CheckpointError naming what does not."""

    def fault(text: str) -> CheckpointError:
        return CheckpointError(f"{file}: {text}")

    if config.num_heads % config.num_kv_heads:
        raise fault(
            f"{config.num_heads} attention heads over {config.num_kv_heads} key/value heads; "
            "the first must be a multiple of the second"
        )
    if config.head_dim % 2:
        raise fault(f"head_dim is {config.head_dim}; rotary embedding needs an even number")
    for rope in config.ropes:
        if rope.rotary_dim > config.head_dim or rope.rotary_dim % 2:
            raise fault(f"{rope.rotary_dim} rotated columns in heads of {config.head_dim}; it must be even and no more")
        factors = rope.frequency_factors
        if factors is not None and len(factors) != rope.rotary_dim // 2:
            raise fault(f"{len(factors)} rotary frequency factors; expected {rope.rotary_dim // 2} (half the head)")
    if len(config.layer_ropes) != config.num_layers or len(config.layer_windows) != config.num_layers:
        raise fault(
            f"{len(config.layer_ropes)} layer ropes and {len(config.layer_windows)} layer windows; "
            f"expected {config.num_layers} of each"
        )
    return config
