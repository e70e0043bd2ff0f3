"""The gated MLP: down(activation(gate(x)) * up(x))."""

from __future__ import annotations

from neoserve.program.trace import Tracer, Value
from neoserve.types.model import ModelConfig


def gated_mlp(tracer: Tracer, x: Value, layer: int, config: ModelConfig, *, residual: Value | None = None) -> Value:
    """Gated MLP of the normed ``x`` [T, hidden] with parameters ``layers.{layer}.mlp.{gate,up,down}`` (``_bias``).

    With ``residual`` the down projection is added to it in place and it is returned; otherwise a new [T, hidden].
    """
    prefix = f"layers.{layer}.mlp"
    inner = config.intermediate_size
    biases = [f"{prefix}.gate_bias", f"{prefix}.up_bias"] if config.mlp_bias else []
    both = tracer.linear(x, [f"{prefix}.gate", f"{prefix}.up"], [inner, inner], biases=biases, name="gate_up")
    gated = tracer.gated_mul(both, config.activation)
    down_bias = [f"{prefix}.down_bias"] if config.mlp_bias else []
    return tracer.linear(
        gated, [f"{prefix}.down"], [x.columns], biases=down_bias, accumulate_into=residual, name="mlp_output"
    )
