"""Canonical weight and activation formats (design D5) and the tensors that formats hand over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

WeightKind = Literal["f32", "bf16", "int8_channel", "int8_group", "int4_group"]


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a [N, K] weight is stored canonically.

    ``int8_channel``: one f32 scale per output row. ``int8_group``/``int4_group``: one scale per row and
    ``group`` values of K. ``scale_type`` is the exact storage type of scales and minimums.
    ``offset`` says what is added before scaling: value = scale * q (none), scale * (q - zero) (zero),
    scale * q + minimum (minimum). int8 q is signed; int4 q is unsigned, 0 to 15.
    """

    kind: WeightKind
    group: int = 0
    scale_type: Literal["", "f16", "f32"] = ""
    offset: Literal["none", "zero", "minimum"] = "none"

    def __str__(self) -> str:
        if self.kind in ("f32", "bf16", "int8_channel"):
            return self.kind
        tail = "" if self.offset == "none" else f"_{self.offset}"
        return f"{self.kind.split('_')[0]}_g{self.group}_{self.scale_type}{tail}"

    @property
    def activation(self) -> str:
        """Format in which a linear op of this weight takes its input: f32, bf16, int8_token or int8_gN."""
        match self.kind:
            case "f32" | "bf16":
                return self.kind
            case "int8_channel":
                return "int8_token"
            case _:
                return f"int8_g{self.group}"


F32 = WeightFormat("f32")
BF16 = WeightFormat("bf16")
INT8_CHANNEL = WeightFormat("int8_channel", scale_type="f32")


@dataclass(frozen=True, slots=True)
class TensorRows:
    """Some consecutive rows of a canonical weight; arrays are C-contiguous and may be read-only views.

    ``values`` is [n, K]: float32, ml_dtypes.bfloat16, int8, or uint8 (int4: one value 0..15 a byte).
    ``scales`` is [n] (int8_channel) or [n, K / group]; ``minimums`` likewise or None; ``zeros`` is uint8 or None.
    """

    format: WeightFormat
    values: npt.NDArray[np.generic]
    scales: npt.NDArray[np.generic] | None = None
    minimums: npt.NDArray[np.generic] | None = None
    zeros: npt.NDArray[np.uint8] | None = None


class CheckpointTensor(Protocol):
    """A lazily read tensor of an opened checkpoint, already free of its file format's habits.

    ``shape`` is row-major as in Hugging Face: a linear weight is (N, K), a norm or bias (N,).
    """

    name: str
    shape: tuple[int, ...]
    file: str
    storage_type: str
    nbytes: int

    def native_format(self) -> WeightFormat:
        """The canonical format that holds this tensor without loss (f16 maps to f32)."""
        ...

    def read_rows(self, start: int, stop: int, fmt: WeightFormat) -> TensorRows:
        """Rows [start, stop) in ``fmt``, which is the native format, f32 or bf16. Never copies more than the rows."""
        ...

    def read_f32(self) -> npt.NDArray[np.float32]:
        """The whole tensor as float32 (norms, biases, small tensors)."""
        ...
