"""The two ends of a decoder: token embedding and language-model head."""

from __future__ import annotations

from neoserve.program.ir import LOGITS, Program
from neoserve.program.trace import Tracer, Value
from neoserve.types.model import ModelConfig

EMBEDDING = "embedding"
LM_HEAD = "lm_head"
FINAL_NORM = "final_norm"


def token_embedding(tracer: Tracer, config: ModelConfig) -> Value:
    """The residual stream [T, hidden] at the start: rows of ``embedding`` times ``config.embedding_scale``."""
    return tracer.embed(EMBEDDING, config.vocab_size, config.hidden_size, config.embedding_scale)


def language_model_head(tracer: Tracer, hidden: Value, config: ModelConfig) -> Program:
    """Ends the model: gathers the asked rows first, so that norm and head run over R rows only, not over T.

    A tied head streams the embedding's own packed copy.
    """
    rows = tracer.gather_rows(hidden)
    normed = tracer.rms_norm(rows, FINAL_NORM, config.rms_norm_eps, in_place=True)
    head = EMBEDDING if config.tie_embeddings else LM_HEAD
    return tracer.finish(tracer.linear(normed, [head], [config.vocab_size], name=LOGITS))
