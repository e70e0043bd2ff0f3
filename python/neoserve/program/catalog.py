"""The parameters of a checkpoint with the weight format that each is kept in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from neoserve.program.quantize import quantized_format
from neoserve.types.errors import ConfigurationError
from neoserve.types.options import DTYPES, DType, Quantization
from neoserve.types.tensors import BF16, F32, CheckpointTensor, WeightFormat


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """Shape of a parameter, (N, K) or (N,), and the canonical format in which it is kept in memory."""

    shape: tuple[int, ...]
    format: WeightFormat


Catalog = Mapping[str, ParameterSpec]


def choose_format(shape: tuple[int, ...], native: WeightFormat, dtype: DType) -> WeightFormat:
    """The format in which a parameter is kept.

    Vectors (norms, biases) are always f32. Matrices: ``auto`` keeps quantised and bf16 tensors as they are and rounds
    f32 (and f16, whose native format is f32) to bf16, which halves the bytes streamed per token; ``float32``
    dequantises all; ``bfloat16`` dequantises and rounds all. The embedding and lm_head follow the same rule.

    Raises ConfigurationError on an unknown dtype.
    """
    if dtype not in DTYPES:
        raise ConfigurationError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    if len(shape) == 1 or dtype == "float32":
        return F32
    if dtype == "bfloat16" or native.kind == "f32":
        return BF16
    return native


def build_catalog(
    tensors: Mapping[str, CheckpointTensor], dtype: DType, quantization: Quantization | None = None
) -> dict[str, ParameterSpec]:
    """Catalog of a checkpoint's tensors (canonical names): see choose_format, and quantized_format if that is asked."""
    catalog = {}
    for name, tensor in tensors.items():
        shape, native = tuple(tensor.shape), tensor.native_format()
        if quantization is None or len(shape) == 1:
            fmt = choose_format(shape, native, dtype)
        else:
            fmt = quantized_format(name, shape[1], native, quantization)
        catalog[name] = ParameterSpec(shape, fmt)
    return catalog
