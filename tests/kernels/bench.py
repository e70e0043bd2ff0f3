"""Runs single ops through the native executor on buffers whose surroundings are watched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from neoserve import _native

ALIGNMENT = 64
FENCE = 256  # bytes before and after every buffer
# Everything that a test does not fill: NaN as f32 and bf16, so that a stray read shows in the result.
BACKGROUND = 0xFF

Operand = tuple[Any, ...]


def _up(value: int, multiple: int = ALIGNMENT) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Buffer:
    """[rows, columns] in activation format ``format``, laid out as neoserve/program/plan.py does."""

    format: str
    columns: int
    rows: int
    symbol: str
    offset: int = 0

    @property
    def group(self) -> int:
        return self.columns if self.format == "int8_token" else int(self.format.removeprefix("int8_g"))

    @property
    def groups(self) -> int:
        return self.columns // self.group

    @property
    def row_bytes(self) -> int:
        if self.format in ("f32", "bf16"):
            return self.columns * (4 if self.format == "f32" else 2)
        return _up(self.columns)

    @property
    def part_bytes(self) -> tuple[int, int, int]:
        """Bytes of the values, the scales and the sums."""
        values = self.rows * self.row_bytes
        if self.format in ("f32", "bf16"):
            return _up(values), 0, 0
        scales = _up(self.rows * self.groups * 4)
        return values, scales, scales

    def view(self, column: int = 0, columns: int | None = None) -> Operand:
        width = self.columns - column if columns is None else columns
        return ("view", self.offset, self.columns, column, width, self.format, self.symbol)


@dataclass(frozen=True)
class Span:
    """Tokens of one sequence in a step: positions [first, first + count), on ``pages`` (ids in order)."""

    first: int
    count: int
    pages: Sequence[int] = (0,)


@dataclass(frozen=True)
class Group:
    """A KV group of the model under test."""

    layers: int = 1
    heads: int = 1
    dim: int = 16
    pages: int = 1


class Bench:
    """A model over fenced buffers. ``buffers`` maps names to (columns, format) or (columns, format, "rows")."""

    def __init__(
        self,
        buffers: Mapping[str, tuple[int, str] | tuple[int, str, str]],
        *,
        force: str = "reference",
        threads: int = 1,
        tokens: int = 8,
        rows: int = 4,
        sequences: int = 1,
        table_width: int = 0,
        page_size: int = 16,
        kv: str = "f32",
        groups: Sequence[Group] = (),
    ) -> None:
        self.buffers: dict[str, Buffer] = {}
        end = FENCE
        for name, (columns, fmt, *symbol) in buffers.items():
            of_rows = symbol == ["rows"]
            buffer = Buffer(fmt, columns, rows if of_rows else tokens, "rows" if of_rows else "tokens", _up(end))
            self.buffers[name] = buffer
            end = buffer.offset + sum(buffer.part_bytes) + FENCE
        self.model = _native.Model(
            threads=threads,
            arena_bytes=end,
            max_tokens=tokens,
            max_sequences=sequences,
            max_rows=rows,
            max_pages_per_sequence=table_width or -(-tokens // page_size),
            page_size=page_size,
            kv_dtype=kv,
            force=force,
        )
        self.page_bytes = [self.model.add_group(g.layers, g.heads, g.dim, g.pages) for g in groups]
        self.arena = self.model.arena()
        self.arena[:] = BACKGROUND
        self.step = self.model.step_arrays()
        self.counts = (0, 0, 0)
        self.set_step([Span(0, tokens, [0] * (table_width or -(-tokens // page_size)))])

    def __getitem__(self, name: str) -> Operand:
        return self.buffers[name].view()

    def weight(self, packed: _native.PackedWeight) -> Operand:
        return ("weight", self.model.add_weight(packed))

    def vector(self, values: npt.ArrayLike) -> Operand:
        return ("vector", self.model.add_vector(np.ascontiguousarray(values, np.float32)))

    def op(self, name: str, output: Operand, *inputs: Operand, **attributes: float) -> None:
        self.model.add_op(name, [output, *inputs], attributes, f"{name} under test")

    def set_step(self, spans: Sequence[Span], logit_rows: Sequence[int] = ()) -> None:
        """Fills the step's arrays; tokens of the spans follow each other."""
        token = 0
        for index, span in enumerate(spans):
            self.step["query_start"][index] = token
            self.step["positions"][token : token + span.count] = range(span.first, span.first + span.count)
            self.step["context_len"][index] = span.first + span.count
            for table in self.step["block_tables"]:
                table[index] = -1
                table[index, : len(span.pages)] = span.pages
            token += span.count
        self.step["query_start"][len(spans)] = token
        self.step["logit_rows"][: len(logit_rows)] = logit_rows
        self.counts = (token, len(spans), len(logit_rows))

    def set_step_counts(self, tokens: int, rows: int = 0) -> None:
        """A step of one sequence of ``tokens`` tokens from position 0, for ops that look at counts alone."""
        width = self.step["block_tables"][0].shape[1] if self.step["block_tables"] else 0
        self.set_step([Span(0, tokens, [0] * width)], [0] * rows)

    def _bytes(self, name: str, part: int, row_bytes: int) -> npt.NDArray[np.uint8]:
        buffer = self.buffers[name]
        start = buffer.offset + sum(buffer.part_bytes[:part])
        return self.arena[start : start + buffer.rows * row_bytes].reshape(buffer.rows, row_bytes)

    def values(self, name: str) -> npt.NDArray[Any]:
        """All rows of a buffer as a writable view: float32, uint16 (bf16 bits) or int8 (with the row's padding)."""
        buffer = self.buffers[name]
        kind: Any = {"f32": np.float32, "bf16": np.uint16}.get(buffer.format, np.int8)
        return self._bytes(name, 0, buffer.row_bytes).view(kind)

    def scales(self, name: str) -> npt.NDArray[np.float32]:
        return self._bytes(name, 1, 4 * self.buffers[name].groups).view(np.float32)

    def sums(self, name: str) -> npt.NDArray[np.int32]:
        return self._bytes(name, 2, 4 * self.buffers[name].groups).view(np.int32)

    def run(self, *written: Operand) -> None:
        """One forward, which may change nothing of the arena but the ``written`` views' rows of this step."""
        before = self.arena.copy()
        self.model.forward(*self.counts)
        changed = before != self.arena
        for view in written:
            self._allow(changed, view)
        stray = np.flatnonzero(changed)
        assert not len(stray), f"{len(stray)} bytes outside the output changed, first at arena offset {stray[0]}"

    def _allow(self, changed: npt.NDArray[np.bool_], view: Operand) -> None:
        _, offset, _, column, columns, fmt, symbol = view
        name = next(n for n, b in self.buffers.items() if b.offset == offset)
        buffer = self.buffers[name]
        count = self.counts[0] if symbol == "tokens" else self.counts[2]
        size = {"f32": 4, "bf16": 2}.get(fmt, 1)
        width = columns * size if size > 1 else buffer.row_bytes
        start = offset
        for part, (row_bytes, first, used) in enumerate(
            [(buffer.row_bytes, column * size, width)]
            if size > 1
            else [(buffer.row_bytes, 0, width), *[(4 * buffer.groups, 0, 4 * buffer.groups)] * 2]
        ):
            rows = changed[start : start + buffer.rows * row_bytes].reshape(buffer.rows, row_bytes)
            rows[:count, first : first + used] = False
            start += buffer.part_bytes[part]
