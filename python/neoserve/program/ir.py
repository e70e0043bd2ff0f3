"""The recorded form of a model: instructions over named buffers (design D2, docs/ops.md)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from neoserve.types.errors import NeoServeError
from neoserve.types.tensors import WeightFormat

Symbol = Literal["tokens", "rows"]
StepArray = Literal["token_ids", "positions", "logit_rows"]

LOGITS = "logits"
"""Name of the buffer [rows, vocabulary] that holds the result of a step."""


class ProgramError(NeoServeError):
    """A program breaks a rule of its form: a fault of a model's definition, never of a request."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """An activation of the step: [symbol, columns] in an activation format (f32, bf16, int8_token, int8_gN)."""

    name: str
    rows: Symbol
    columns: int
    format: str = "f32"


@dataclass(frozen=True, slots=True)
class View:
    """Columns [column, column + columns) of a buffer."""

    buffer: str
    column: int
    columns: int


@dataclass(frozen=True, slots=True)
class Weight:
    """A packed [n, k] matrix built at load from checkpoint parameters stacked along n."""

    name: str
    parts: tuple[str, ...]
    n: int
    k: int
    format: WeightFormat


@dataclass(frozen=True, slots=True)
class Vector:
    """A float32 vector kept beside the weights: norm weights, biases (parts concatenated) or inverse frequencies.

    ``parts`` are checkpoint parameters; ``values`` is set instead for constants that the model computes.
    """

    name: str
    parts: tuple[str, ...]
    size: int
    values: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class KvLayer:
    """K and V of one layer in the pages of a group; ``index`` counts layers inside the group."""

    group: int
    index: int


Operand = View | str | KvLayer


@dataclass(frozen=True, slots=True)
class Instruction:
    """One op. ``inputs`` hold views, KV layers, or names ("@token_ids" a step array, "%name" a weight or vector)."""

    op: str
    output: View | None
    inputs: tuple[Operand, ...]
    attributes: tuple[tuple[str, int | float], ...] = ()
    label: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Shape of the pages of one group of layers with the same attention span."""

    name: str
    layers: tuple[int, ...]
    window: int | None
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Program:
    """An immutable recorded model. The logits are buffer ``logits`` [rows, vocabulary]."""

    name: str
    instructions: tuple[Instruction, ...]
    buffers: dict[str, Buffer] = field(default_factory=dict)
    weights: dict[str, Weight] = field(default_factory=dict)
    vectors: dict[str, Vector] = field(default_factory=dict)
    kv_groups: tuple[KvGroup, ...] = ()
    vocab_size: int = 0
