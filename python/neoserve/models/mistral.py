"""Mistral: the Llama form with a sliding window on all layers, or on none."""

from __future__ import annotations

from neoserve.blocks.decoder import decoder
from neoserve.models.checks import require
from neoserve.program.ir import Program
from neoserve.program.trace import Tracer
from neoserve.types.model import ModelConfig


def build(tracer: Tracer, config: ModelConfig, context_length: int) -> Program:
    """The program of a Mistral model: no biases, no QK norm."""
    require(config, activation="silu", qkv_bias=False, qk_norm=False, post_norms=False, embedding_scale=1.0)
    return decoder(tracer, config, context_length)
