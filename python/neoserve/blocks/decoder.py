"""Decoder layers: how norms, attention and MLP are joined by the residual stream."""

from __future__ import annotations

from neoserve.blocks.attention import AttentionSpec, attention
from neoserve.blocks.embedding import language_model_head, token_embedding
from neoserve.blocks.mlp import gated_mlp
from neoserve.blocks.rope import rope_table
from neoserve.program.ir import Program
from neoserve.program.trace import Tracer, Value
from neoserve.types.model import ModelConfig


def pre_norm_layer(tracer: Tracer, hidden: Value, rope: Value, layer: int, config: ModelConfig) -> None:
    """hidden += attention(norm(hidden)); hidden += mlp(norm(hidden)). ``hidden`` [T, hidden] is updated in place."""
    prefix, eps = f"layers.{layer}", config.rms_norm_eps
    normed = tracer.rms_norm(hidden, f"{prefix}.input_norm", eps)
    attention(tracer, normed, rope, layer, AttentionSpec.of_layer(config, layer), residual=hidden)
    normed = tracer.rms_norm(hidden, f"{prefix}.mlp_norm", eps)
    gated_mlp(tracer, normed, layer, config, residual=hidden)


def sandwich_norm_layer(tracer: Tracer, hidden: Value, rope: Value, layer: int, config: ModelConfig) -> None:
    """As pre_norm_layer, with each branch's output normed once more before it is added (Gemma)."""
    prefix, eps = f"layers.{layer}", config.rms_norm_eps
    normed = tracer.rms_norm(hidden, f"{prefix}.input_norm", eps)
    branch = attention(tracer, normed, rope, layer, AttentionSpec.of_layer(config, layer))
    tracer.add(hidden, tracer.rms_norm(branch, f"{prefix}.post_attention_norm", eps, in_place=True))
    normed = tracer.rms_norm(hidden, f"{prefix}.mlp_norm", eps)
    branch = gated_mlp(tracer, normed, layer, config)
    tracer.add(hidden, tracer.rms_norm(branch, f"{prefix}.post_mlp_norm", eps, in_place=True))


def decoder(tracer: Tracer, config: ModelConfig, context_length: int) -> Program:
    """A whole decoder-only model: embedding, ``config.num_layers`` layers, head.

    ``config.post_norms`` picks the kind of layer; ``context_length`` (tokens) matters to dynamic rope only.
    """
    hidden = token_embedding(tracer, config)
    tables = {
        index: rope_table(tracer, config.ropes[index], config.max_position, context_length)
        for index in sorted(set(config.layer_ropes))
    }
    make_layer = sandwich_norm_layer if config.post_norms else pre_norm_layer
    for layer in range(config.num_layers):
        with tracer.scope(f"layers.{layer}"):
            make_layer(tracer, hidden, tables[config.layer_ropes[layer]], layer, config)
    return language_model_head(tracer, hidden, config)
