"""Opens the tiny golden models and makes quantised variants of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt

from neoserve.formats.checkpoint import open_checkpoint
from neoserve.models.registry import build_program
from neoserve.program.executor import Checkpoint, build_executor, build_reference_executor
from neoserve.types.model import ModelConfig
from neoserve.types.options import EngineOptions
from neoserve.types.step import Executor
from neoserve.types.tensors import BF16, F32, CheckpointTensor, TensorRows, WeightFormat

GOLDEN = Path(__file__).parent / "golden"
CONTEXT = 320

FORMATS: dict[str, WeightFormat] = {
    str(fmt): fmt
    for fmt in (
        WeightFormat("int8_channel", scale_type="f32"),
        WeightFormat("int8_group", 16, "f32"),
        WeightFormat("int8_group", 32, "f16"),
        WeightFormat("int8_group", 32, "f16", "minimum"),
        WeightFormat("int4_group", 32, "f16", "minimum"),
        WeightFormat("int4_group", 32, "f32", "minimum"),
        WeightFormat("int4_group", 32, "f16", "zero"),
        WeightFormat("int4_group", 64, "f32", "zero"),
    )
}


def tiny_folder(name: str) -> Path:
    return GOLDEN / "tiny" / name


def expected(name: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Golden (input ids [L], logits [L, V]) of a tiny model."""
    with np.load(tiny_folder(name) / "expected.npz") as arrays:
        return arrays["input_ids"], arrays["logits"]


def tiny_options(**changes: object) -> EngineOptions:
    """Room for one chunk of CONTEXT tokens with logits of all of them, and a few more sequences beside it."""
    values: dict[str, object] = {
        "max_running_requests": CONTEXT,
        "max_tokens_per_step": CONTEXT,
        "kv_cache_bytes": 16 << 20,
        "num_threads": 1,
        "dtype": "float32",
    }
    return EngineOptions(**{**values, **changes})  # type: ignore[arg-type]


def native(checkpoint: Checkpoint, **changes: object) -> Executor:
    """The native executor of a tiny checkpoint under tiny_options."""
    return build_executor(checkpoint, tiny_options(**changes), build_program)


def reference(checkpoint: Checkpoint, **changes: object) -> Executor:
    """The numpy executor of the same program, accumulating in float64."""
    options = tiny_options(**{"num_threads": None, **changes})
    return build_reference_executor(checkpoint, options, build_program, precision="float64")


@dataclass(frozen=True)
class Quantised:
    """A checkpoint whose matrices are replaced by quantised ones; the rest is the original."""

    config: ModelConfig
    tensors: Mapping[str, CheckpointTensor]

    def release_pages(self) -> None:
        """Nothing is mapped: the quantised values are ordinary memory."""


def quantised(name: str, fmt: WeightFormat) -> Quantised:
    """The tiny model ``name`` with every matrix (embedding and lm_head too) in ``fmt`` whose K its groups divide."""
    checkpoint = open_checkpoint(tiny_folder(name))
    tensors = {
        key: QuantisedTensor(tensor, fmt) if _fits(tensor.shape, fmt) else tensor
        for key, tensor in checkpoint.tensors.items()
    }
    return Quantised(checkpoint.config, tensors)


def _fits(shape: tuple[int, ...], fmt: WeightFormat) -> bool:
    return len(shape) == 2 and (fmt.kind == "int8_channel" or shape[1] % fmt.group == 0)


class QuantisedTensor:
    """CheckpointTensor of a matrix [N, K] rounded to a canonical format, as a quantised checkpoint would hold it."""

    def __init__(self, base: CheckpointTensor, fmt: WeightFormat) -> None:
        self.name, self.shape, self.file = base.name, base.shape, base.file
        self.storage_type = str(fmt)
        self._rows = quantise(base.read_f32(), fmt)
        self.nbytes = self._rows.values.nbytes

    def native_format(self) -> WeightFormat:
        return self._rows.format

    def read_rows(self, start: int, stop: int, fmt: WeightFormat) -> TensorRows:
        rows = _slice(self._rows, start, stop)
        if fmt == rows.format:
            return rows
        values = dequantise(rows)
        if fmt == F32:
            return TensorRows(F32, values)
        assert fmt == BF16, f"asked for {fmt}, which the contract of read_rows does not allow"
        return TensorRows(BF16, values.astype(ml_dtypes.bfloat16))

    def read_f32(self) -> npt.NDArray[np.float32]:
        return dequantise(self._rows)


def _slice(rows: TensorRows, start: int, stop: int) -> TensorRows:
    parts = (rows.scales, rows.minimums, rows.zeros)
    scales, minimums, zeros = (None if part is None else part[start:stop] for part in parts)
    return TensorRows(rows.format, rows.values[start:stop], scales, minimums, zeros)


def quantise(matrix: npt.NDArray[np.float32], fmt: WeightFormat) -> TensorRows:
    """Rounds [N, K] float32 to ``fmt``: by largest magnitude without an offset, by range with one."""
    n, k = matrix.shape
    group = k if fmt.kind == "int8_channel" else fmt.group
    cells = matrix.reshape(n, k // group, group)
    scale_type = np.float16 if fmt.scale_type == "f16" else np.float32
    low, high = cells.min(axis=2), cells.max(axis=2)
    if fmt.offset == "none":
        scales = (np.abs(cells).max(axis=2) / 127).astype(scale_type)
        values = np.rint(cells / scales[..., None].astype(np.float32)).clip(-127, 127).astype(np.int8)
        packed = values.reshape(n, k)
        return TensorRows(fmt, packed, scales[:, 0].copy() if fmt.kind == "int8_channel" else scales)
    steps, first, kind = (255, -128, np.int8) if fmt.kind == "int8_group" else (15, 0, np.uint8)
    if fmt.offset == "zero":
        low, high = np.minimum(low, 0), np.maximum(high, 0)
    scales = ((high - low) / steps).astype(scale_type)
    wide = scales.astype(np.float32)
    if fmt.offset == "zero":
        zeros = np.rint(-low / wide).clip(0, steps).astype(np.uint8)
        values = (np.rint(cells / wide[..., None]) + zeros[..., None]).clip(0, steps).astype(kind)
        return TensorRows(fmt, values.reshape(n, k), scales, zeros=zeros)
    minimums = (low - first * wide).astype(scale_type)
    values = np.rint((cells - minimums.astype(np.float32)[..., None]) / wide[..., None])
    return TensorRows(fmt, values.clip(first, first + steps).astype(kind).reshape(n, k), scales, minimums=minimums)


def dequantise(rows: TensorRows) -> npt.NDArray[np.float32]:
    """Values [n, K] float32 that the rows stand for, rounded once at the end."""
    assert rows.scales is not None
    n, k = rows.values.shape
    scales = rows.scales.astype(np.float64).reshape(n, -1, 1)
    cells = rows.values.astype(np.float64).reshape(n, scales.shape[1], -1)
    if rows.zeros is not None:
        cells = cells - rows.zeros.astype(np.float64)[..., None]
    cells = cells * scales
    if rows.minimums is not None:
        cells = cells + rows.minimums.astype(np.float64)[..., None]
    return cells.reshape(n, k).astype(np.float32)
