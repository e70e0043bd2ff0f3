"""Gemma 3 text models: window layers and global layers with their own rotary bases, QK norm, norms after each branch,
GELU-gated MLP, scaled embedding. Window and global layers have pages of their own (two KV groups)."""

from __future__ import annotations

from neoserve.blocks.decoder import decoder
from neoserve.models.checks import require
from neoserve.program.ir import Program
from neoserve.program.trace import Tracer
from neoserve.types.model import ModelConfig


def build(tracer: Tracer, config: ModelConfig, context_length: int) -> Program:
    """The program of a Gemma 3 model; norm weights are canonical (the +1 is already added)."""
    require(config, activation="gelu_tanh", qk_norm=True, post_norms=True)
    return decoder(tracer, config, context_length)
