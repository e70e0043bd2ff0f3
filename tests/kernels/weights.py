"""Random canonical weights and activations of every format, and what they stand for in binary64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from neoserve import _native

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Format:
    kind: str
    group: int = 0
    scale_type: str = ""
    offset: str = "none"

    def __str__(self) -> str:
        parts = [self.kind, f"g{self.group}" if self.group else "", self.scale_type, self.offset]
        return "_".join(part for part in parts if part and part != "none")

    @property
    def op(self) -> str:
        return f"linear_{self.kind}"

    @property
    def activation(self) -> str:
        if self.kind in ("f32", "bf16"):
            return self.kind
        return "int8_token" if self.kind == "int8_channel" else f"int8_g{self.group}"

    @property
    def offsets(self) -> bool:
        return self.offset != "none"


GROUPED = [
    Format(kind, group, scale, offset)
    for kind in ("int8_group", "int4_group")
    for group in (16, 32, 64, 128)
    for scale in ("f16", "f32")
    for offset in ("none", "zero", "minimum")
]
FORMATS = [Format("f32"), Format("bf16"), Format("int8_channel"), *GROUPED]


def to_bf16(x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Nearest even, on bits; NaN is not for this."""
    bits = np.ascontiguousarray(x).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(x: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    return (x.astype(np.uint32) << 16).view(np.float32)


@dataclass
class Weight:
    """A canonical [n, k] weight; arrays as PackedWeight.put_rows takes them."""

    format: Format
    values: npt.NDArray[Any]
    scales: npt.NDArray[Any] | None = None
    minimums: npt.NDArray[Any] | None = None
    zeros: npt.NDArray[np.uint8] | None = None
    _cache: dict[str, _native.PackedWeight] = field(default_factory=dict)

    @property
    def n(self) -> int:
        return int(self.values.shape[0])

    @property
    def k(self) -> int:
        return int(self.values.shape[1])

    def pack(self, force: str, *, pieces: int = 1) -> _native.PackedWeight:
        """Packed for the row that ``force`` leads to, put in ``pieces`` calls."""
        f = self.format
        packed = _native.pack_weight(f.kind, self.n, self.k, f.group, f.scale_type, f.offset, force)
        for rows in np.array_split(np.arange(self.n), pieces):
            if len(rows):
                part = slice(rows[0], rows[-1] + 1)
                optional = [None if a is None else a[part] for a in (self.scales, self.minimums, self.zeros)]
                packed.put_rows(int(rows[0]), self.values[part], *optional)
        return packed

    def _spread(self, array: npt.NDArray[Any]) -> Float64:
        groups = 1 if array.ndim == 1 else array.shape[1]
        return np.repeat(array.astype(np.float64).reshape(self.n, groups), self.k // groups, axis=1)

    def exact(self) -> Float64:
        """Dequantised values in binary64 (all products are exact there)."""
        if self.format.kind == "bf16":
            return from_bf16(self.values).astype(np.float64)
        values = self.values.astype(np.float64)
        if self.scales is None:
            return values
        if self.zeros is not None:
            values = values - self._spread(self.zeros)
        values = values * self._spread(self.scales)
        return values if self.minimums is None else values + self._spread(self.minimums)


def random_weight(numbers: np.random.Generator, fmt: Format, n: int, k: int, *, extreme: bool = False) -> Weight:
    """Uniform over the format's range; ``extreme``: only the ends of it, and scales of all magnitudes."""
    if fmt.kind in ("f32", "bf16"):
        values = numbers.standard_normal((n, k)).astype(np.float32)
        if extreme:
            values *= numbers.choice(np.float32([0, 1e-38, 1e-20, 1, 1e15]), (n, k))
        return Weight(fmt, values if fmt.kind == "f32" else to_bf16(values))
    low, high = (0, 15) if fmt.kind == "int4_group" else (-128, 127)
    values = numbers.choice([low, high], (n, k)) if extreme else numbers.integers(low, high, (n, k), endpoint=True)
    values = values.astype(np.uint8 if low == 0 else np.int8)
    groups = (n,) if fmt.kind == "int8_channel" else (n, k // fmt.group)
    kind = np.float16 if fmt.scale_type == "f16" else np.float32

    def scales(choice: list[float]) -> npt.NDArray[Any]:
        spread = numbers.choice(choice, groups) if extreme else numbers.uniform(0.001, 0.1, groups)
        return spread.astype(kind)

    # 6e-8 is the smallest subnormal of binary16, 3e-5 one in mid-range.
    weight = Weight(fmt, values, scales([0, 6e-8, 3e-5, 1, 1000]))
    if fmt.offset == "minimum":
        weight.minimums = -scales([0, 6e-8, 0.5, 100])
    if fmt.offset == "zero":
        weight.zeros = numbers.integers(0, 16 if low == 0 else 256, groups).astype(np.uint8)
    return weight


@dataclass
class Activation:
    """[rows, k] as a linear op reads it: raw values, and for int8 scales and sums [rows, groups]."""

    values: npt.NDArray[Any]
    scales: npt.NDArray[np.float32] | None = None
    sums: npt.NDArray[np.int32] | None = None

    def exact(self) -> Float64:
        if self.scales is None:
            raw = from_bf16(self.values) if self.values.dtype == np.uint16 else self.values
            return raw.astype(np.float64)
        group = self.values.shape[1] // self.scales.shape[1]
        return self.values.astype(np.float64) * np.repeat(self.scales.astype(np.float64), group, axis=1)


def random_activation(
    numbers: np.random.Generator, fmt: Format, rows: int, k: int, *, extreme: bool = False
) -> Activation:
    """Values within +-127 for int8, as the quantiser gives them; some rows are zero throughout when ``extreme``."""
    if fmt.kind in ("f32", "bf16"):
        x = numbers.standard_normal((rows, k)).astype(np.float32)
        if extreme:
            x *= numbers.choice(np.float32([0, 1e-38, 1e-10, 1, 1e15]), (rows, 1))
        return Activation(x if fmt.kind == "f32" else to_bf16(x))
    values = numbers.choice([-127, 127], (rows, k)) if extreme else numbers.integers(-127, 128, (rows, k))
    if extreme:
        values[numbers.random(rows) < 0.2] = 0
    groups = 1 if fmt.kind == "int8_channel" else k // fmt.group
    scales = numbers.uniform(0.0, 0.1, (rows, groups))
    if extreme:
        scales *= numbers.choice([0, 1e-42, 1, 1e30], (rows, groups))
    sums = values.reshape(rows, groups, -1).sum(axis=2)
    return Activation(values.astype(np.int8), scales.astype(np.float32), sums.astype(np.int32))
