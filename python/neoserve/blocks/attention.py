"""Self-attention over the paged KV cache: projections, optional QK norm, rotary embedding, residual."""

from __future__ import annotations

from dataclasses import dataclass

from neoserve.program.trace import Tracer, Value
from neoserve.types.model import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Shape of one layer's attention. ``scale`` multiplies q.k; ``window`` is in tokens, None for full attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    norm_eps: float

    @classmethod
    def of_layer(cls, config: ModelConfig, layer: int) -> AttentionSpec:
        """The attention of layer ``layer`` of ``config``."""
        return cls(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.attention_scale,
            window=config.layer_windows[layer],
            qkv_bias=config.qkv_bias,
            output_bias=config.attention_output_bias,
            qk_norm=config.qk_norm,
            norm_eps=config.rms_norm_eps,
        )


def attention(
    tracer: Tracer,
    x: Value,
    rope: Value,
    layer: int,
    spec: AttentionSpec,
    *,
    residual: Value | None = None,
) -> Value:
    """Attention of the normed ``x`` [T, hidden] of model layer ``layer``, rotated by table ``rope`` [T, D].

    Parameters ``layers.{layer}.attention.{q,k,v,o}`` with optional ``_bias``, and ``{q,k}_norm`` [head_dim].
    With ``residual`` the output projection is added to it in place and it is returned; otherwise a new [T, hidden].
    """
    prefix = f"layers.{layer}.attention"
    query, key_value = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    biases = [f"{prefix}.{part}_bias" for part in "qkv"] if spec.qkv_bias else []
    widths = [query, key_value, key_value]
    qkv = tracer.linear(x, [f"{prefix}.{part}" for part in "qkv"], widths, biases=biases, name="qkv")
    q, k, v = qkv.slice(0, query), qkv.slice(query, key_value), qkv.slice(query + key_value, key_value)
    if spec.qk_norm:
        tracer.rms_norm(q, f"{prefix}.q_norm", spec.norm_eps, width=spec.head_dim, in_place=True)
        tracer.rms_norm(k, f"{prefix}.k_norm", spec.norm_eps, width=spec.head_dim, in_place=True)
    tracer.rope(q, rope, spec.head_dim)
    tracer.rope(k, rope, spec.head_dim)
    kv = tracer.kv_layer(layer, spec.window, spec.num_kv_heads, spec.head_dim)
    tracer.kv_write(k, v, kv)
    attended = tracer.attention(q, kv, spec.num_heads, spec.scale)
    hidden = x.columns
    output_bias = [f"{prefix}.o_bias"] if spec.output_bias else []
    return tracer.linear(
        attended, [f"{prefix}.o"], [hidden], biases=output_bias, accumulate_into=residual, name="attention_output"
    )
