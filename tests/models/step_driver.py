"""Drives an executor step by step, as an engine would, but with every choice in the test's hands."""

from __future__ import annotations

from collections.abc import Sequence as Series
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from neoserve.types.step import Executor, Float32Array


@dataclass(slots=True)
class Running:
    """One sequence: all its token ids, how many have run, its pages per group, and the logits rows asked for."""

    token_ids: list[int]
    tables: list[list[int]]
    done: int = 0
    rows: list[Float32Array] = field(default_factory=list)

    @property
    def logits(self) -> Float32Array:
        """Logits [rows, vocab] in the order of positions."""
        return np.stack(self.rows)


class StepDriver:
    """Gives pages to sequences in an order shuffled by ``seed`` and runs the steps that it is told to run."""

    def __init__(self, executor: Executor, seed: int = 0) -> None:
        self.executor = executor
        random = np.random.default_rng(seed)
        self._free = [random.permutation(group.num_pages).tolist() for group in executor.limits.groups]

    def add(self, token_ids: Series[int]) -> Running:
        """A sequence of these ids; nothing runs yet."""
        return Running(token_ids=[int(token) for token in token_ids], tables=[[] for _ in self._free])

    def finish(self, sequence: Running) -> None:
        """Gives the sequence's pages back; the next one to need pages gets them first."""
        for free, table in zip(self._free, sequence.tables, strict=True):
            free.extend(table)
            table.clear()

    def step(self, *parts: tuple[Running, int], rows: str = "all") -> None:
        """One step: the next ``count`` tokens of each sequence; ``rows``: logits of "all" of them or of the "last"."""
        step = self.executor.step
        token, row = 0, 0
        for index, (sequence, count) in enumerate(parts):
            stop = sequence.done + count
            assert count > 0
            assert stop <= len(sequence.token_ids)
            step.token_ids[token : token + count] = sequence.token_ids[sequence.done : stop]
            step.positions[token : token + count] = np.arange(sequence.done, stop)
            step.query_start[index : index + 2] = (token, token + count)
            step.context_len[index] = stop
            self._fill_tables(index, sequence, stop)
            wanted = count if rows == "all" else 1
            step.logit_rows[row : row + wanted] = np.arange(token + count - wanted, token + count)
            token, row, sequence.done = token + count, row + wanted, stop
        step.num_tokens, step.num_sequences, step.num_logit_rows = token, len(parts), row
        self.executor.forward()
        self._collect(parts, rows)

    def run(self, token_ids: Series[int], chunk: int | None = None, rows: str = "all") -> Running:
        """A sequence alone, in chunks of ``chunk`` tokens (default: all at once); its pages are given back."""
        sequence = self.add(token_ids)
        while (left := len(sequence.token_ids) - sequence.done) > 0:
            self.step((sequence, min(left, chunk or left)), rows=rows)
        self.finish(sequence)
        return sequence

    def generate(self, prompt: Series[int], new_tokens: int, chunk: int | None = None) -> list[int]:
        """Greedy ids (lowest id among the maxima), one step per token after the prompt."""
        sequence = self.add(prompt)
        while (left := len(prompt) - sequence.done) > 0:
            self.step((sequence, min(left, chunk or left)), rows="last")
        output = [int(sequence.rows[-1].argmax())]
        while len(output) < new_tokens:
            sequence.token_ids.append(output[-1])
            self.step((sequence, 1))
            output.append(int(sequence.rows[-1].argmax()))
        self.finish(sequence)
        return output

    def _fill_tables(self, index: int, sequence: Running, stop: int) -> None:
        for free, pages, table in zip(self._free, sequence.tables, self.executor.step.block_tables, strict=True):
            while len(pages) * self.executor.limits.page_size < stop:
                pages.append(free.pop())
            table[index, : len(pages)] = pages

    def _collect(self, parts: Series[tuple[Running, int]], rows: str) -> None:
        logits = self.executor.logits().copy()  # a view of the arena: the next step overwrites it
        row = 0
        for sequence, count in parts:
            wanted = count if rows == "all" else 1
            sequence.rows.extend(logits[row : row + wanted])
            row += wanted


def assert_same_bits(actual: npt.NDArray[np.float32], expected: npt.NDArray[np.float32], what: str) -> None:
    """Equality of every bit of finite float32 logits [rows, vocab]; the message names the first row that differs."""
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    assert np.isfinite(expected).all(), f"{what}: the expected logits are not finite"
    differs = (actual.view(np.uint32) != expected.view(np.uint32)).any(axis=-1)
    if differs.any():
        gap = float(np.abs(actual - expected).max())
        first = int(differs.argmax())
        raise AssertionError(
            f"{what}: {differs.sum()} of {len(differs)} rows differ, first {first}, by up to {gap:.2e}"
        )
