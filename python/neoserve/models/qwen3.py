"""Qwen3 dense models: the Llama form with RMS norms on the heads of q and k before rotation."""

from __future__ import annotations

from neoserve.blocks.decoder import decoder
from neoserve.models.checks import require
from neoserve.program.ir import Program
from neoserve.program.trace import Tracer
from neoserve.types.model import ModelConfig


def build(tracer: Tracer, config: ModelConfig, context_length: int) -> Program:
    """The program of a Qwen3 model."""
    require(config, activation="silu", qk_norm=True, post_norms=False, embedding_scale=1.0)
    return decoder(tracer, config, context_length)
