"""Builds the SamplingBatch of a step from the requests that draw in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from neoserve.sampling.ragged import RaggedRows
from neoserve.sampling.request_lists import RequestLists
from neoserve.types.request import GenerateRequest
from neoserve.types.sampling import SamplingParams
from neoserve.types.step import SamplingBatch, StepLimits

_SEED_MASK = 2**64 - 1


class DrawingRow(Protocol):
    """A sequence that draws a token: ``tokens`` is the prompt and what was generated, ``slot`` is below
    ``StepLimits.max_sequences`` and its own while it runs."""

    slot: int
    request: GenerateRequest
    tokens: list[int]
    prompt_length: int


class SamplingBatchBuilder:
    """Fills the same arrays every step and returns views of the rows in use.

    What stays the same over a request's life is written once, to its slot of a table, when the slot is first seen
    with that request; a step gathers the slots with one numpy call per field. Lists (histories, biases, forbidden
    ids) are copied only for the rows that have some.
    """

    def __init__(self, limits: StepLimits) -> None:
        self._vocab_size = limits.vocab_size
        self._valid_vocabulary = limits.vocab_size
        # One slot more: the neutral one, of rows that only score the prompt.
        self._neutral = limits.max_sequences
        self._table = _Columns(limits.max_sequences + 1)
        self._table.write(self._neutral, SamplingParams(temperature=0.0, seed=0))
        self._rows = _Columns(limits.max_logit_rows)
        self._position = np.zeros(limits.max_logit_rows, np.int32)
        self._owners: list[DrawingRow | None] = [None] * limits.max_sequences
        self._lists: list[RequestLists | None] = [None] * limits.max_sequences
        self._history = RaggedRows(limits.max_logit_rows, np.int32)
        self._bias = RaggedRows(limits.max_logit_rows, np.float32)
        self._forbidden = RaggedRows(limits.max_logit_rows, None)

    @property
    def valid_vocabulary(self) -> int:
        """How many ids, from 0, have a token: what is drawn and what log probabilities are normalised over."""
        return self._valid_vocabulary

    def restrict_vocabulary(self, size: int) -> None:
        """Forbids ids of ``size`` and above in every row: logits that the tokenizer has no token for.

        A tokenizer larger than the model forbids nothing. Raises ValueError for a size below 1.
        """
        if size < 1:
            raise ValueError(f"vocabulary size is {size}; it must be at least 1")
        self._valid_vocabulary = min(size, self._vocab_size)

    def build(self, rows: Sequence[DrawingRow | None]) -> SamplingBatch:
        """The batch of the given logits rows in order; None is a row that draws nothing (it is greedy, unmodified).

        The arrays are views that the next call overwrites.
        """
        count = len(rows)
        slots = [self._neutral if row is None else row.slot for row in rows]
        for row in rows:
            if row is not None and self._owners[row.slot] is not row:
                self._attach(row)
        fields = self._rows.gather(self._table, slots)
        self._position[:count] = [0 if row is None else len(row.tokens) for row in rows]
        self._fill_lists(rows)
        history_start, history_tokens, history_counts = self._history.views(count)
        bias_start, bias_tokens, bias_values = self._bias.views(count)
        forbidden_start, forbidden_tokens, _ = self._forbidden.views(count)
        return SamplingBatch(
            temperature=fields.temperature,
            top_k=fields.top_k,
            top_p=fields.top_p,
            min_p=fields.min_p,
            repetition_penalty=fields.repetition_penalty,
            presence_penalty=fields.presence_penalty,
            frequency_penalty=fields.frequency_penalty,
            seed=fields.seed,
            position=self._position[:count],
            num_logprobs=fields.num_logprobs,
            history_start=history_start,
            history_tokens=history_tokens,
            history_output_counts=history_counts,
            bias_start=bias_start,
            bias_tokens=bias_tokens,
            bias_values=bias_values,
            forbidden_start=forbidden_start,
            forbidden_tokens=forbidden_tokens,
            valid_vocabulary=self._valid_vocabulary,
        )

    def _attach(self, row: DrawingRow) -> None:
        """Takes note of a request that is new in its slot."""
        self._owners[row.slot] = row
        self._table.write(row.slot, row.request.sampling)
        lists = RequestLists(row.request, row.prompt_length, self._vocab_size, self._valid_vocabulary)
        self._lists[row.slot] = lists if lists.in_use else None

    def _fill_lists(self, rows: Sequence[DrawingRow | None]) -> None:
        for ragged in (self._history, self._bias, self._forbidden):
            ragged.clear()
        for row in rows:
            lists = None if row is None else self._lists[row.slot]
            if row is None or lists is None:
                for ragged in (self._history, self._bias, self._forbidden):
                    ragged.end_row()
                continue
            self._history.append_row(*lists.history(row.tokens))
            self._bias.append_row(lists.bias_tokens, lists.bias_values)
            self._forbidden.append_row(lists.forbidden(len(row.tokens)), None)


class _Columns:
    """The per-row numbers of a SamplingBatch as equally long arrays."""

    FLOATS = (
        "temperature",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    )
    INTS = ("top_k", "num_logprobs")

    temperature: npt.NDArray[np.float32]
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    repetition_penalty: npt.NDArray[np.float32]
    presence_penalty: npt.NDArray[np.float32]
    frequency_penalty: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int32]
    num_logprobs: npt.NDArray[np.int32]
    seed: npt.NDArray[np.uint64]

    def __init__(self, length: int) -> None:
        for name in self.FLOATS:
            setattr(self, name, np.zeros(length, np.float32))
        for name in self.INTS:
            setattr(self, name, np.zeros(length, np.int32))
        self.seed = np.zeros(length, np.uint64)

    def write(self, index: int, params: SamplingParams) -> None:
        """Writes one request's parameters; "off" has one form each (top_k 0, num_logprobs -1)."""
        if params.seed is None:
            raise ValueError("seed is None; the engine's client draws one before it submits a request")
        for name in self.FLOATS:
            getattr(self, name)[index] = getattr(params, name)
        self.top_k[index] = max(params.top_k, 0)
        self.num_logprobs[index] = -1 if params.logprobs is None else params.logprobs
        self.seed[index] = params.seed & _SEED_MASK

    def gather(self, table: _Columns, slots: list[int]) -> _Columns:
        """Copies the slots of ``table`` to the first rows and returns views of them."""
        views = _Columns.__new__(_Columns)
        index = np.asarray(slots, np.intp)
        for name in (*self.FLOATS, *self.INTS, "seed"):
            target = getattr(self, name)[: len(slots)]
            np.take(getattr(table, name), index, out=target, mode="clip")
            setattr(views, name, target)
        return views
