"""Checkpoints in memory for the tests of neoserve.program: seeded tensors in any canonical format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
import numpy.typing as npt

from neoserve.program.catalog import ParameterSpec
from neoserve.types.model import ModelConfig, RopeConfig
from neoserve.types.tensors import BF16, F32, CheckpointTensor, TensorRows, WeightFormat

INT8_CHANNEL = WeightFormat("int8_channel", scale_type="f32")
INT8_G32 = WeightFormat("int8_group", 32, "f16")
INT8_G16 = WeightFormat("int8_group", 16, "f32")
INT4_MINIMUM = WeightFormat("int4_group", 32, "f32", "minimum")
INT4_ZERO = WeightFormat("int4_group", 32, "f16", "zero")
FORMATS = (F32, BF16, INT8_CHANNEL, INT8_G32, INT8_G16, INT4_MINIMUM, INT4_ZERO)


@dataclass
class FakeTensor:
    """A CheckpointTensor over arrays in memory; ``fmt`` is its native format."""

    name: str
    shape: tuple[int, ...]
    fmt: WeightFormat
    rows: TensorRows
    file: str = "memory"
    storage_type: str = "fake"
    nbytes: int = 0
    reads: list[tuple[int, int]] = field(default_factory=list)

    def native_format(self) -> WeightFormat:
        return self.fmt

    def read_rows(self, start: int, stop: int, fmt: WeightFormat) -> TensorRows:
        self.reads.append((start, stop))
        if fmt == self.fmt:
            parts = (self.rows.values, self.rows.scales, self.rows.minimums, self.rows.zeros)
            return TensorRows(fmt, *(None if part is None else part[start:stop] for part in parts))  # type: ignore[arg-type]
        values = self.read_f32()[start:stop]
        return TensorRows(fmt, values if fmt == F32 else values.astype(ml_dtypes.bfloat16))

    def read_f32(self) -> npt.NDArray[np.float32]:
        return dequantised(self.rows).astype(np.float32)


def dequantised(rows: TensorRows) -> npt.NDArray[np.float64]:
    """The exact values of canonical rows."""
    values = rows.values.astype(np.float64)
    if rows.scales is None:
        return values
    scales = rows.scales.astype(np.float64).reshape(len(values), -1)
    group = values.shape[1] // scales.shape[1]

    def wide(array: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
        return np.repeat(array.astype(np.float64).reshape(scales.shape), group, axis=1)

    if rows.zeros is not None:
        values = values - wide(rows.zeros)
    values = values * wide(rows.scales)
    return values if rows.minimums is None else values + wide(rows.minimums)


def random_rows(fmt: WeightFormat, n: int, k: int, rng: np.random.Generator) -> TensorRows:
    """Random canonical rows whose values are about 1 / sqrt(k) in size."""
    size = 1 / np.sqrt(k)
    if fmt.kind in ("f32", "bf16"):
        plain = (rng.standard_normal((n, k)) * size).astype(np.float32)
        return TensorRows(fmt, plain if fmt.kind == "f32" else plain.astype(ml_dtypes.bfloat16))
    scale_type = np.float16 if fmt.scale_type == "f16" else np.float32
    shape = (n,) if fmt.kind == "int8_channel" else (n, k // fmt.group)
    if fmt.kind == "int4_group":
        values: npt.NDArray[np.generic] = rng.integers(0, 16, (n, k)).astype(np.uint8)
        scales = (rng.uniform(0.5, 1.5, shape) * size / 5).astype(scale_type)
    else:
        values = rng.integers(-127, 128, (n, k)).astype(np.int8)
        scales = (rng.uniform(0.5, 1.5, shape) * size / 70).astype(scale_type)
    minimums = (-7.5 * scales).astype(scale_type) if fmt.offset == "minimum" else None
    zeros = rng.integers(6, 10, shape).astype(np.uint8) if fmt.offset == "zero" else None
    return TensorRows(fmt, values, scales, minimums, zeros)


def fake_tensor(name: str, shape: tuple[int, ...], fmt: WeightFormat = F32, seed: int = 0) -> FakeTensor:
    """A seeded random tensor; vectors are f32 near 1 (fit for norms and biases alike)."""
    rng = np.random.default_rng([seed, *name.encode()])
    if len(shape) == 1:
        rows = TensorRows(F32, (1 + 0.1 * rng.standard_normal(shape)).astype(np.float32))
        return FakeTensor(name, shape, F32, rows, nbytes=4 * shape[0])
    return FakeTensor(name, shape, fmt, random_rows(fmt, *shape, rng), nbytes=shape[0] * shape[1])


def fake_tensors(shapes: Mapping[str, tuple[int, ...]], fmt: WeightFormat = F32) -> dict[str, CheckpointTensor]:
    """One fake tensor per name."""
    return {name: fake_tensor(name, shape, fmt) for name, shape in shapes.items()}


def catalog_of(tensors: Mapping[str, CheckpointTensor]) -> dict[str, ParameterSpec]:
    """Every tensor in its native format."""
    return {name: ParameterSpec(tensor.shape, tensor.native_format()) for name, tensor in tensors.items()}


def llama_config(**changes: object) -> ModelConfig:
    """A small Llama: hidden 64, 4 heads and 2 KV heads of 16, 2 layers, vocabulary 96."""
    layers = int(changes.get("num_layers", 2))  # type: ignore[call-overload]
    fields: dict[str, object] = {
        "architecture": "llama",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": layers,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "max_position": 128,
        "rms_norm_eps": 1e-5,
        "attention_scale": 0.25,
        "ropes": (RopeConfig(theta=10000.0, rotary_dim=16),),
        "layer_ropes": (0,) * layers,
        "layer_windows": (None,) * layers,
    }
    return ModelConfig(**{**fields, **changes})  # type: ignore[arg-type]


def decoder_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical parameter names and shapes of ``config``."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    query, key = config.num_heads * head, config.num_kv_heads * head
    shapes: dict[str, tuple[int, ...]] = {"embedding": (config.vocab_size, hidden), "final_norm": (hidden,)}
    if not config.tie_embeddings:
        shapes["lm_head"] = (config.vocab_size, hidden)
    layer: dict[str, tuple[int, ...]] = {
        "input_norm": (hidden,),
        "mlp_norm": (hidden,),
        "attention.q": (query, hidden),
        "attention.k": (key, hidden),
        "attention.v": (key, hidden),
        "attention.o": (hidden, query),
        "mlp.gate": (inner, hidden),
        "mlp.up": (inner, hidden),
        "mlp.down": (hidden, inner),
    }
    if config.qkv_bias:
        layer |= {"attention.q_bias": (query,), "attention.k_bias": (key,), "attention.v_bias": (key,)}
    if config.attention_output_bias:
        layer |= {"attention.o_bias": (hidden,)}
    if config.mlp_bias:
        layer |= {"mlp.gate_bias": (inner,), "mlp.up_bias": (inner,), "mlp.down_bias": (hidden,)}
    if config.qk_norm:
        layer |= {"attention.q_norm": (head,), "attention.k_norm": (head,)}
    if config.post_norms:
        layer |= {"post_attention_norm": (hidden,), "post_mlp_norm": (hidden,)}
    for index in range(config.num_layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


@dataclass(frozen=True)
class FakeCheckpoint:
    """What program.executor needs of a checkpoint; counts calls of ``release_pages``."""

    config: ModelConfig
    tensors: Mapping[str, CheckpointTensor]
    released: list[bool] = field(default_factory=list)

    def release_pages(self) -> None:
        self.released.append(True)


def fake_checkpoint(config: ModelConfig | None = None, fmt: WeightFormat = F32) -> FakeCheckpoint:
    """A whole random model with its matrices in ``fmt``."""
    config = config or llama_config()
    return FakeCheckpoint(config, fake_tensors(decoder_shapes(config), fmt))
