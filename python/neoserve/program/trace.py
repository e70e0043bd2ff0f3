"""Records a model: blocks call the Tracer's methods, which append instructions to a flat program (design D2)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from neoserve.program.catalog import Catalog, ParameterSpec
from neoserve.program.ir import (
    LOGITS,
    Buffer,
    Instruction,
    KvGroup,
    KvLayer,
    Operand,
    Program,
    ProgramError,
    Symbol,
    Vector,
    View,
    Weight,
)
from neoserve.types.errors import CheckpointError
from neoserve.types.model import Activation

STACK_MULTIPLE = 16
"""Packed layouts hold 16 outputs a block, so a part may only be followed by another at a multiple of 16."""

_PACKAGE_ROOT = Path(__file__).resolve().parents[1]
_GATED_OPS: dict[str, str] = {"silu": "silu_mul", "gelu_tanh": "gelu_tanh_mul"}


@dataclass(frozen=True, slots=True)
class TraceBounds:
    """Upper bounds of the symbols of a step: tokens T and logits rows R.

    They exist at trace time so that a block may refuse what it cannot hold. A program must not depend on them
    otherwise: ``verify.check_symbolic`` traces with two different bounds and compares the text.
    """

    max_tokens: int
    max_rows: int


DEFAULT_BOUNDS = TraceBounds(512, 64)


@dataclass(frozen=True, slots=True)
class Value:
    """Handle of an activation during tracing: columns [column, column + columns) of a buffer [rows, ...]."""

    buffer: str
    column: int
    columns: int
    rows: Symbol
    format: str = "f32"

    @property
    def view(self) -> View:
        """The operand that stands for this value in an instruction."""
        return View(self.buffer, self.column, self.columns)

    def slice(self, start: int, columns: int) -> Value:
        """Columns [start, start + columns) of this value. Raises ProgramError outside of it."""
        if start < 0 or columns <= 0 or start + columns > self.columns:
            raise ProgramError(
                f"columns [{start}, {start + columns}) of {self.buffer} lie outside its {self.columns} columns"
            )
        return Value(self.buffer, self.column + start, columns, self.rows, self.format)


class Tracer:
    """Builds one Program. Methods are the ops of docs/ops.md; each returns the Value that it wrote.

    ``catalog`` maps canonical parameter names to shape and weight format; every method that takes a parameter
    checks its shape and raises CheckpointError naming it, expected and found.
    """

    def __init__(self, name: str, catalog: Catalog, bounds: TraceBounds = DEFAULT_BOUNDS) -> None:
        self.catalog = catalog
        self.bounds = bounds
        self._name = name
        self._instructions: list[Instruction] = []
        self._buffers: dict[str, Buffer] = {}
        self._weights: dict[str, Weight] = {}
        self._vectors: dict[str, Vector] = {}
        self._groups: list[KvGroup] = []
        self._scopes: list[str] = []
        self._versions: dict[str, int] = {}
        self._quantized: dict[tuple[View, int, str], Value] = {}
        self._rope_tables: dict[str, Value] = {}

    @contextmanager
    def scope(self, name: str) -> Iterator[str]:
        """Prefixes the labels of instructions recorded inside, e.g. ``layers.3``; yields the full prefix."""
        self._scopes.append(name)
        try:
            yield ".".join(self._scopes)
        finally:
            self._scopes.pop()

    # Ops that start and end a program.

    def embed(self, weight: str, vocab_size: int, hidden_size: int, scale: float = 1.0) -> Value:
        """Rows of the table ``weight`` [vocab_size, hidden_size] for the step's token ids, times ``scale``."""
        self._parameter(weight, (vocab_size, hidden_size))
        out = self._new("hidden", "tokens", hidden_size)
        self._record("embed", out, ["@token_ids", self._weight([weight])], {"scale": float(scale)}, weight)
        return out

    def gather_rows(self, x: Value) -> Value:
        """The rows of ``x`` [T, H] whose logits the step asks for: [R, H]."""
        out = self._new("gathered", "rows", x.columns)
        self._record("gather_rows", out, [x.view, "@logit_rows"], {}, "gather_rows")
        return out

    def finish(self, logits: Value) -> Program:
        """Ends the trace; ``logits`` must be the whole buffer written by ``linear(..., name=LOGITS)``."""
        if logits.buffer != LOGITS:
            raise ProgramError(f"the result of program {self._name} is buffer {logits.buffer}, not {LOGITS}")
        return Program(
            name=self._name,
            instructions=tuple(self._instructions),
            buffers=dict(self._buffers),
            weights=dict(self._weights),
            vectors=dict(self._vectors),
            kv_groups=tuple(self._groups),
            vocab_size=logits.columns,
        )

    # Dense ops.

    def linear(
        self,
        x: Value,
        weights: Sequence[str],
        columns: Sequence[int],
        *,
        biases: Sequence[str] = (),
        accumulate_into: Value | None = None,
        name: str = "linear",
    ) -> Value:
        """x @ [weights stacked along their outputs].T + biases -> [x.rows, sum(columns)].

        ``columns[i]`` is the expected N of ``weights[i]``, each (columns[i], x.columns). Neighbours with one format
        become one stacked weight when every part's N is a multiple of 16; otherwise several instructions
        write their column ranges of the same output. ``accumulate_into`` adds to that value instead of writing
        a new buffer. ``biases`` is empty or names one vector per weight.
        """
        if len(columns) != len(weights) or (biases and len(biases) != len(weights)):
            raise ProgramError(f"linear {name}: {len(weights)} weights, {len(columns)} widths, {len(biases)} biases")
        for part, size in zip(weights, columns, strict=True):
            self._parameter(part, (size, x.columns))
        out = accumulate_into or self._new(name, x.rows, sum(columns))
        if out.columns != sum(columns):
            raise ProgramError(f"linear {name}: output has {out.columns} columns, weights give {sum(columns)}")
        start = 0
        attributes = {"accumulate": int(accumulate_into is not None)}
        for first, last in self._runs(weights, columns):
            parts, width = weights[first:last], sum(columns[first:last])
            source = self._quantize(x, self.catalog[parts[0]].format.activation)
            operands: list[Operand] = [source.view, self._weight(parts)]
            if biases:
                operands.append(self._vector(biases[first:last], columns[first:last]))
            self._record("linear", out.slice(start, width), operands, attributes, _joined(parts))
            start += width
        return out

    def rms_norm(self, x: Value, weight: str, eps: float, *, width: int | None = None, in_place: bool = False) -> Value:
        """RMS norm of every ``width`` columns of ``x`` (default: all of them) with ``weight`` [width]."""
        width = x.columns if width is None else width
        out = x if in_place else self._new("normed", x.rows, x.columns)
        operands: list[Operand] = [x.view, self._vector([weight], [width])]
        self._record("rms_norm", out, operands, {"width": width, "eps": float(eps)}, weight)
        return out

    def gated_mul(self, x: Value, activation: Activation) -> Value:
        """activation(gate) * up for ``x`` [T, 2 I] = gate then up -> [T, I]."""
        if activation not in _GATED_OPS:
            raise ProgramError(f"activation {activation!r} has no gated op; known: {', '.join(_GATED_OPS)}")
        out = self._new("gated", x.rows, x.columns // 2)
        self._record(_GATED_OPS[activation], out, [x.view], {}, _GATED_OPS[activation])
        return out

    def add(self, x: Value, y: Value) -> Value:
        """x = x + y in place; returns ``x``."""
        self._record("add", x, [x.view, y.view], {}, "add")
        return x

    # Attention.

    def rope_table(self, frequencies: Sequence[float], attention_factor: float) -> Value:
        """cos and sin of the step's positions for inverse ``frequencies`` [D/2]: [T, D]; equal ones share a table."""
        values = tuple(float(value) for value in frequencies)
        key = repr((values, attention_factor))
        if key not in self._rope_tables:
            name = f"rope_frequencies.{len(self._rope_tables)}"
            self._vectors[name] = Vector(name, (), len(values), values)
            out = self._new("rope_table", "tokens", 2 * len(values))
            attributes = {"attention_factor": float(attention_factor)}
            self._record("rope_table", out, ["@positions", f"%{name}"], attributes, name)
            self._rope_tables[key] = out
        return self._rope_tables[key]

    def rope(self, x: Value, table: Value, head_dim: int) -> Value:
        """Rotates every head of ``head_dim`` columns of ``x`` in place by ``table``; returns ``x``."""
        self._record("rope", x, [x.view, table.view], {"head_dim": head_dim}, "rope")
        return x

    def kv_layer(self, layer: int, window: int | None, num_kv_heads: int, head_dim: int) -> KvLayer:
        """K and V of model layer ``layer``; layers of equal window and shape share a page group (design D3)."""
        for index, group in enumerate(self._groups):
            if (group.window, group.num_kv_heads, group.head_dim) == (window, num_kv_heads, head_dim):
                slot = KvLayer(index, len(group.layers))
                layers = (*group.layers, layer)
                self._groups[index] = KvGroup(group.name, layers, window, num_kv_heads, head_dim)
                return slot
        name = "full" if window is None else f"window_{window}"
        if any(group.name == name for group in self._groups):
            name = f"{name}_{num_kv_heads}x{head_dim}"
        self._groups.append(KvGroup(name, (layer,), window, num_kv_heads, head_dim))
        return KvLayer(len(self._groups) - 1, 0)

    def kv_write(self, k: Value, v: Value, layer: KvLayer) -> None:
        """Stores the step's k and v [T, kv heads * head_dim] in the pages, rounded to the KV dtype."""
        self._record("kv_write", None, [k.view, v.view, layer], {}, "kv_write")

    def attention(self, q: Value, layer: KvLayer, num_heads: int, scale: float) -> Value:
        """Causal attention of ``q`` [T, heads * head_dim] over the KV of ``layer``, with its group's window."""
        group = self._groups[layer.group]
        out = self._new("attended", q.rows, q.columns)
        attributes = {
            "scale": float(scale),
            "window": group.window or 0,
            "heads": num_heads,
            "kv_heads": group.num_kv_heads,
            "head_dim": group.head_dim,
        }
        self._record("attention", out, [q.view, layer], attributes, "attention")
        return out

    # Internals.

    def _runs(self, weights: Sequence[str], columns: Sequence[int]) -> list[tuple[int, int]]:
        """Ranges of neighbouring parts that can be one stacked weight."""
        runs: list[tuple[int, int]] = []
        for index, part in enumerate(weights):
            joins = (
                index > 0
                and self.catalog[part].format == self.catalog[weights[index - 1]].format
                and columns[index] % STACK_MULTIPLE == 0
                and columns[index - 1] % STACK_MULTIPLE == 0
            )
            if joins:
                runs[-1] = (runs[-1][0], index + 1)
            else:
                runs.append((index, index + 1))
        return runs

    def _quantize(self, x: Value, activation: str) -> Value:
        """``x`` in ``activation`` format; an equal earlier result is reused unless x was written since."""
        if activation == "f32":
            return x
        key = (x.view, self._versions[x.buffer], activation)
        if key not in self._quantized:
            out = self._new("quantized", x.rows, x.columns, activation)
            self._record("quantize", out, [x.view], {}, f"quantize_{activation}")
            self._quantized[key] = out
        return self._quantized[key]

    def _parameter(self, name: str, shape: tuple[int, ...]) -> ParameterSpec:
        spec = self.catalog.get(name)
        if spec is None:
            raise CheckpointError(
                f"tensor {name} {shape} is missing; the checkpoint is incomplete, or its config names another model"
            )
        if spec.shape != shape:
            raise CheckpointError(f"tensor {name} has shape {spec.shape}; the model's config needs {shape}")
        return spec

    def _weight(self, parts: Sequence[str]) -> str:
        name = _joined(parts)
        specs = [self.catalog[part] for part in parts]
        rows, k = sum(spec.shape[0] for spec in specs), specs[0].shape[1]
        self._weights.setdefault(name, Weight(name, tuple(parts), rows, k, specs[0].format))
        return f"%{name}"

    def _vector(self, parts: Sequence[str], sizes: Sequence[int]) -> str:
        for part, size in zip(parts, sizes, strict=True):
            self._parameter(part, (size,))
        name = _joined(parts)
        self._vectors.setdefault(name, Vector(name, tuple(parts), sum(sizes)))
        return f"%{name}"

    def _new(self, hint: str, rows: Symbol, columns: int, fmt: str = "f32") -> Value:
        name = hint if hint == LOGITS else f"{hint}.{len(self._buffers)}"
        if name in self._buffers:
            raise ProgramError(f"buffer {name} is defined twice")
        self._buffers[name] = Buffer(name, rows, columns, fmt)
        self._versions[name] = 0
        return Value(name, 0, columns, rows, fmt)

    def _record(
        self,
        op: str,
        output: Value | None,
        inputs: Sequence[Operand],
        attributes: Mapping[str, int | float],
        label: str,
    ) -> None:
        prefix = ".".join(self._scopes)
        full = label if not prefix or label.startswith(prefix) else f"{prefix}.{label}"
        view = None if output is None else output.view
        self._instructions.append(
            Instruction(op, view, tuple(inputs), tuple(attributes.items()), full, _caller_source())
        )
        if output is not None:
            self._versions[output.buffer] += 1


def _joined(parts: Sequence[str]) -> str:
    """``layers.0.attention.{q,k,v}`` for parts that share a prefix; the name itself for one part."""
    if len(parts) == 1:
        return parts[0]
    prefix = parts[0].rpartition(".")[0]
    if all(part.rpartition(".")[0] == prefix for part in parts):
        return f"{prefix}.{{{','.join(part.rpartition('.')[2] for part in parts)}}}"
    return "+".join(parts)


def _caller_source() -> str:
    """``blocks/attention.py:40``: the innermost frame outside this file, relative to the package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return f"{_shown_path(frame.f_code.co_filename)}:{frame.f_lineno}"


@cache
def _shown_path(filename: str) -> str:
    path = Path(filename)
    return (path.relative_to(_PACKAGE_ROOT) if path.is_relative_to(_PACKAGE_ROOT) else Path(path.name)).as_posix()
