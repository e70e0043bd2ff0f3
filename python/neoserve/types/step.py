"""What the engine hands to the executor for one step, and what comes back (design D2).

All arrays are views of a fixed arena that the executor owns: the engine fills them in place, so a step
allocates nothing. Nothing that changes from step to step reaches the program by another way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]

ALL_IDS = 2**31 - 1
"""``SamplingBatch.valid_vocabulary`` of a tokenizer that has a token for every logit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageGroupSpec:
    """Layers with one attention span share pages. ``window`` None means full attention.

    ``page_bytes`` covers K and V of all layers of the group for ``page_size`` tokens.
    """

    name: str
    layers: tuple[int, ...]
    window: int | None
    page_bytes: int
    num_pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Bounds of one step; the executor checks each StepInput against them once."""

    max_tokens: int
    max_sequences: int
    max_logit_rows: int
    max_context: int
    page_size: int
    vocab_size: int
    groups: tuple[PageGroupSpec, ...]

    @property
    def max_pages_per_sequence(self) -> int:
        """Width of a block table."""
        return -(-self.max_context // self.page_size)


@dataclass(slots=True)
class StepInput:
    """One forward step over ``num_tokens`` tokens of ``num_sequences`` sequences, decode and prefill mixed.

    Sequence s owns tokens [query_start[s], query_start[s + 1]) whose positions are consecutive and end at
    ``context_len[s] - 1``. ``block_tables[g][s, p]`` is the page of group g that holds tokens
    [p * page_size, (p + 1) * page_size) of sequence s. ``logit_rows[r]`` is the token whose logits fill row r.
    Capacities come from StepLimits; entries beyond the counts are never read.
    """

    token_ids: Int32Array
    positions: Int32Array
    query_start: Int32Array
    context_len: Int32Array
    block_tables: tuple[Int32Array, ...]
    logit_rows: Int32Array
    num_tokens: int = 0
    num_sequences: int = 0
    num_logit_rows: int = 0

    @classmethod
    def allocate(cls, limits: StepLimits) -> StepInput:
        """A StepInput on ordinary memory, for executors without a native arena (tests, numpy reference)."""
        tables = (limits.max_sequences, limits.max_pages_per_sequence)
        return cls(
            token_ids=np.zeros(limits.max_tokens, np.int32),
            positions=np.zeros(limits.max_tokens, np.int32),
            query_start=np.zeros(limits.max_sequences + 1, np.int32),
            context_len=np.zeros(limits.max_sequences, np.int32),
            block_tables=tuple(np.zeros(tables, np.int32) for _ in limits.groups),
            logit_rows=np.zeros(limits.max_logit_rows, np.int32),
        )

    def fill_single(self, ids: Sequence[int], start: int, stop: int, page_size: int) -> None:
        """Makes this a step of tokens [start, stop) of ``ids``, the only sequence, which lives in the first pages of
        every group; each token gets a row of logits."""
        count = stop - start
        self.token_ids[:count] = ids[start:stop]
        self.positions[:count] = np.arange(start, stop, dtype=np.int32)
        self.query_start[:2] = (0, count)
        self.context_len[0] = stop
        pages = -(-stop // page_size)
        for table in self.block_tables:
            table[0, :pages] = np.arange(pages, dtype=np.int32)
        self.logit_rows[:count] = np.arange(count, dtype=np.int32)
        self.num_tokens, self.num_sequences, self.num_logit_rows = count, 1, count


@dataclass(slots=True)
class SamplingBatch:
    """Sampling inputs of the rows of a step; row r belongs to logits row r.

    ``position`` is the absolute position of the token being drawn; with ``seed`` it keys the random number.
    Histories are in compressed rows: tokens of row r are [start[r], start[r + 1]). ``history_tokens`` holds
    distinct ids with ``history_output_counts`` (0: prompt only); ``bias_*`` holds logit_bias.
    ``num_logprobs`` is -1 (off) or the number of alternatives. ``forbidden`` lists ids masked out
    (EOS before min_tokens, ids beyond the tokenizer) in the same layout. Log probabilities are those of the softmax
    over the ids below ``valid_vocabulary`` (at least 1): rows beyond the tokenizer are padding of the matrix.
    """

    temperature: Float32Array
    top_k: Int32Array
    top_p: Float32Array
    min_p: Float32Array
    repetition_penalty: Float32Array
    presence_penalty: Float32Array
    frequency_penalty: Float32Array
    seed: npt.NDArray[np.uint64]
    position: Int32Array
    num_logprobs: Int32Array
    history_start: Int32Array
    history_tokens: Int32Array
    history_output_counts: Int32Array
    bias_start: Int32Array
    bias_tokens: Int32Array
    bias_values: Float32Array
    forbidden_start: Int32Array
    forbidden_tokens: Int32Array
    valid_vocabulary: int = ALL_IDS


@dataclass(slots=True)
class SampleOutput:
    """Per row: the drawn id, its log probability (natural, of the unmodified softmax at temperature 1; NaN if
    ``num_logprobs`` is -1), and the alternatives as [rows, max alternatives] arrays, best first."""

    token_ids: Int32Array
    logprobs: Float32Array
    top_ids: Int32Array
    top_logprobs: Float32Array


class Executor(Protocol):
    """Runs the model: two calls a step. Implementations: native program, numpy reference, scripted fake."""

    limits: StepLimits
    step: StepInput

    def forward(self) -> None:
        """Runs ``step``: writes KV of its tokens and the logits of its logit rows. Raises ValueError on a bound."""
        ...

    def sample(self, batch: SamplingBatch) -> SampleOutput:
        """Draws one token per logits row of the last forward."""
        ...

    def logits(self) -> Float32Array:
        """Logits [num_logit_rows, vocab] of the last forward (tests, prompt logprobs)."""
        ...

    def close(self) -> None:
        """Ends threads and frees memory; later calls raise."""
        ...
