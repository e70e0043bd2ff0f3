"""One step as the scheduler planned it, and how it becomes a StepInput."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from neoserve.cache.block_tables import BlockTables
from neoserve.sched.sequence import SequenceState
from neoserve.types.step import StepInput


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """Tokens [start, start + count) of one sequence and the logits rows [first_row, first_row + num_rows) they get.

    ``samples``: the last row draws the sequence's next token. The other rows score prompt tokens: row i of the entry
    is at position ``start + i`` and scores the token after it.
    """

    sequence: SequenceState
    start: int
    count: int
    first_row: int
    num_rows: int
    samples: bool

    @property
    def sample_row(self) -> int:
        """The logits row that draws; meaningful only if ``samples``."""
        return self.first_row + self.num_rows - 1

    @property
    def num_scored(self) -> int:
        """Leading rows that score prompt tokens."""
        return self.num_rows - self.samples


@dataclass(frozen=True, slots=True)
class Plan:
    """The entries of one step, decodes first, in the order of the executor's sequences."""

    entries: tuple[PlanEntry, ...]
    num_tokens: int
    num_rows: int

    def sampled_rows(self) -> list[SequenceState | None]:
        """Per logits row the sequence that draws there; None for rows that only score the prompt."""
        rows: list[SequenceState | None] = [None] * self.num_rows
        for entry in self.entries:
            if entry.samples:
                rows[entry.sample_row] = entry.sequence
        return rows


def fill_step(entries: list[PlanEntry], tables: BlockTables, step: StepInput) -> None:
    """Writes the entries into the step's arrays in place."""
    tokens: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    for entry in entries:
        end = entry.start + entry.count
        tokens.extend(entry.sequence.tokens[entry.start : end])
        positions.extend(range(entry.start, end))
        # The rows of an entry are always its last tokens.
        rows.extend(range(len(tokens) - entry.num_rows, len(tokens)))
    lengths = [entry.start + entry.count for entry in entries]
    starts = [0, *accumulate(entry.count for entry in entries)]
    step.token_ids[: len(tokens)] = tokens
    step.positions[: len(tokens)] = positions
    step.query_start[: len(starts)] = starts
    step.context_len[: len(lengths)] = lengths
    step.logit_rows[: len(rows)] = rows
    width = -(-max(lengths) // tables.page_size)
    tables.write([entry.sequence.slot for entry in entries], width, step.block_tables)
    step.num_tokens, step.num_sequences, step.num_logit_rows = len(tokens), len(entries), len(rows)
