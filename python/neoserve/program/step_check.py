"""Checks a step against the bounds of its executor: once per step, before any instruction runs (design D2)."""

from __future__ import annotations

import numpy as np

from neoserve.types.step import StepInput, StepLimits


def check_step(step: StepInput, limits: StepLimits) -> None:
    """Raises ValueError naming the field when ``step`` exceeds ``limits`` or is inconsistent in itself."""
    _within("num_tokens", step.num_tokens, 1, limits.max_tokens)
    _within("num_sequences", step.num_sequences, 1, limits.max_sequences)
    _within("num_logit_rows", step.num_logit_rows, 0, limits.max_logit_rows)
    starts = step.query_start[: step.num_sequences + 1]
    if starts[0] != 0 or starts[-1] != step.num_tokens or (np.diff(starts) < 1).any():
        raise ValueError(f"query_start {starts.tolist()} must rise strictly from 0 to num_tokens {step.num_tokens}")
    _all_below("token_ids", step.token_ids[: step.num_tokens], limits.vocab_size)
    _all_below("logit_rows", step.logit_rows[: step.num_logit_rows], step.num_tokens)
    for sequence in range(step.num_sequences):
        _check_sequence(step, limits, sequence)


def _check_sequence(step: StepInput, limits: StepLimits, sequence: int) -> None:
    start, stop = int(step.query_start[sequence]), int(step.query_start[sequence + 1])
    length = int(step.context_len[sequence])
    _within(f"context_len[{sequence}]", length, stop - start, limits.max_context)
    if not np.array_equal(step.positions[start:stop], np.arange(length - (stop - start), length)):
        raise ValueError(
            f"positions of sequence {sequence} must be consecutive and end at context_len - 1 = {length - 1}, "
            f"found {step.positions[start]} to {step.positions[stop - 1]}"
        )
    used = -(-length // limits.page_size)
    for group, table in zip(limits.groups, step.block_tables, strict=True):
        _all_below(f"block_tables[{group.name}][{sequence}]", table[sequence, :used], group.num_pages)


def _within(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"step {name} is {value}; it must be in [{low}, {high}]")


def _all_below(name: str, values: np.ndarray[tuple[int, ...], np.dtype[np.int32]], bound: int) -> None:
    bad = (values < 0) | (values >= bound)
    if bad.any():
        raise ValueError(f"step {name} holds {values[bad][0]}; each must be in [0, {bound})")
