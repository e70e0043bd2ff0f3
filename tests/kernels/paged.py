"""Paged attention under test: a history of mixed steps over shuffled, poisoned pages."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .bench import Bench, Group, Span

Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Shape:
    """One attention op; ``window`` 0 means none."""

    dim: int
    heads: int = 2
    kv_heads: int = 1
    window: int = 0
    page_size: int = 16
    kv: str = "f32"

    @property
    def scale(self) -> float:
        return float(np.float32(self.dim**-0.5))


@dataclass
class Tokens:
    """q [T, heads * dim], k and v [T, kv heads * dim] of one sequence."""

    q: Float32
    k: Float32
    v: Float32

    def __len__(self) -> int:
        return len(self.q)


def random_tokens(numbers: np.random.Generator, shape: Shape, count: int) -> Tokens:
    def draw(heads: int) -> Float32:
        return numbers.standard_normal((count, heads * shape.dim)).astype(np.float32)

    tokens = Tokens(draw(shape.heads) * np.float32(2), draw(shape.kv_heads), draw(shape.kv_heads))
    tokens.k[numbers.random(count) < 0.1] *= 8  # some keys stand out, so that partitions differ in their maxima
    return tokens


@dataclass
class Paged:
    """Sequences over shuffled pages of the second layer of the second group, every page first filled with NaN.

    The program is kv_write of NaN to the other layer, kv_write, attention. ``steps`` lists (sequence, tokens) pairs
    of each step.
    """

    shape: Shape
    sequences: list[Tokens]
    force: str
    threads: int = 1
    max_tokens: int = 64
    seed: int = 0
    bench: Bench = field(init=False)
    tables: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        s = self.shape
        needed = [-(-len(tokens) // s.page_size) for tokens in self.sequences]
        pool = sum(needed) + 3
        order = np.random.default_rng(self.seed).permutation(pool).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in needed]
        q, kv = s.heads * s.dim, s.kv_heads * s.dim
        self.bench = Bench(
            {"qkv": (q + 2 * kv + 16, "f32"), "junk": (kv, "f32"), "out": (q + 16, "f32")},
            force=self.force,
            threads=self.threads,
            tokens=self.max_tokens,
            sequences=max(len(self.sequences), self.max_tokens // s.page_size, 1),
            table_width=max(needed),
            page_size=s.page_size,
            kv=s.kv,
            groups=[Group(1, 1, 16, pool), Group(2, s.kv_heads, s.dim, pool)],
        )
        view = self.bench.buffers["qkv"].view
        self.out = self.bench.buffers["out"].view(16, q)
        heads = {"heads": s.heads, "kv_heads": s.kv_heads, "head_dim": s.dim}
        self.bench.op("kv_write", ("none",), self.bench["junk"], self.bench["junk"], ("kv", 1, 0))
        self.bench.op("kv_write", ("none",), view(q, kv), view(q + kv, kv), ("kv", 1, 1))
        self.bench.op("attention", self.out, view(0, q), ("kv", 1, 1), scale=s.scale, window=s.window, **heads)
        self.bench.values("junk")[:] = np.nan
        self._poison(pool)

    def rows_ran(self) -> list[str]:
        return [row for _, _, row in self.bench.model.rows()]

    def _poison(self, pool: int) -> None:
        size = self.shape.page_size
        self.bench.values("qkv")[:] = np.nan
        per_step = self.max_tokens // size
        for first in range(0, pool, per_step):
            pages = range(first, min(first + per_step, pool))
            self.bench.set_step([Span(0, size, [page]) for page in pages])
            self.bench.run(self.out)

    def run(self, steps: list[list[tuple[int, int]]]) -> list[Float32]:
        """Attention outputs [T, heads * dim] of every sequence."""
        q, kv = self.shape.heads * self.shape.dim, self.shape.kv_heads * self.shape.dim
        done = [0] * len(self.sequences)
        outputs = [np.full_like(tokens.q, np.nan) for tokens in self.sequences]
        for step in steps:
            spans, at, rows = [], 0, self.bench.values("qkv")
            for index, count in step:
                tokens, part = self.sequences[index], slice(done[index], done[index] + count)
                rows[at : at + count, :q] = tokens.q[part]
                rows[at : at + count, q : q + kv] = tokens.k[part]
                rows[at : at + count, q + kv : q + 2 * kv] = tokens.v[part]
                pages = self.tables[index][: -(-part.stop // self.shape.page_size)]
                spans.append(Span(part.start, count, pages))
                at += count
            self.bench.set_step(spans)
            self.bench.run(self.out)
            at = 0
            for index, count in step:
                found = self.bench.values("out")[at : at + count, 16 : 16 + q]
                outputs[index][done[index] : done[index] + count] = found
                done[index] += count
                at += count
        assert done == [len(tokens) for tokens in self.sequences]
        return outputs


def plain_steps(lengths: list[int], max_tokens: int) -> list[list[tuple[int, int]]]:
    """One sequence after the other, in chunks as large as fit."""
    return [
        [(index, min(max_tokens, length - first))]
        for index, length in enumerate(lengths)
        for first in range(0, length, max_tokens)
    ]


def mixed_steps(numbers: np.random.Generator, lengths: list[int], max_tokens: int) -> list[list[tuple[int, int]]]:
    """Random steps: some sequences prefill a chunk while others decode one token, in random order."""
    left, steps = list(lengths), []
    while any(left):
        step, room = [], max_tokens
        for index in numbers.permutation(len(left)).tolist():
            count = min(left[index], room, int(numbers.choice([1, 1, 7, 16, 33, max_tokens])))
            if count:
                step.append((index, count))
                left[index] -= count
                room -= count
        steps.append(step)
    return steps
