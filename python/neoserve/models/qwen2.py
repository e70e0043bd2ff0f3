"""Qwen2 and Qwen2.5: the Llama form with biases on q, k and v; later layers may have a sliding window."""

from __future__ import annotations

from neoserve.blocks.decoder import decoder
from neoserve.models.checks import require
from neoserve.program.ir import Program
from neoserve.program.trace import Tracer
from neoserve.types.model import ModelConfig


def build(tracer: Tracer, config: ModelConfig, context_length: int) -> Program:
    """The program of a Qwen2 model."""
    require(config, activation="silu", qkv_bias=True, qk_norm=False, post_norms=False, embedding_scale=1.0)
    return decoder(tracer, config, context_length)
