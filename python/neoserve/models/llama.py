"""Llama 2 and 3, SmolLM2 and others of that form: grouped-query attention, SiLU-gated MLP, one rotary embedding."""

from __future__ import annotations

from neoserve.blocks.decoder import decoder
from neoserve.models.checks import require
from neoserve.program.ir import Program
from neoserve.program.trace import Tracer
from neoserve.types.model import ModelConfig


def build(tracer: Tracer, config: ModelConfig, context_length: int) -> Program:
    """The program of a Llama model; biases on q/k/v, o and the MLP are allowed, windows and QK norm are not."""
    require(config, activation="silu", qk_norm=False, post_norms=False, embedding_scale=1.0, windows=False)
    return decoder(tracer, config, context_length)
