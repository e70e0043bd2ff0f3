"""A scripted fake model: an executor without weights, for exact tests of everything around the model.

It emits given tokens at a given pace and fails on demand. It takes nothing on trust: "KV" is the token id itself,
stored in the pages that the block tables name and read back through them, so a wrong page, position or chunk changes
the answer or raises.
"""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from neoserve.sampling.reference import sample_reference
from neoserve.types.step import Float32Array, PageGroupSpec, SampleOutput, SamplingBatch, StepInput, StepLimits

Context = tuple[int, ...]
Script = Sequence[int] | Mapping[Context, Sequence[int]] | Callable[[Context], int]

_SCRIPTED_LOGIT = 40.0
_UNWRITTEN = -1


@dataclass(slots=True)
class FakeFaults:
    """Fault switches; tests change them while the executor runs.

    ``forward_errors`` and ``sample_errors`` are raised by the next calls, one each (MemoryError: an allocation
    failure). ``fail_after_tokens``: forward raises once that many tokens were drawn. ``poison_token``: forward raises
    when it is among the step's tokens. ``nan_token``: the logits after it are NaN.
    """

    forward_errors: list[Exception] = field(default_factory=list)
    sample_errors: list[Exception] = field(default_factory=list)
    fail_after_tokens: int | None = None
    poison_token: int | None = None
    nan_token: int | None = None


def fake_limits(
    *,
    max_tokens: int = 64,
    max_sequences: int = 8,
    max_logit_rows: int = 32,
    max_context: int = 256,
    page_size: int = 16,
    vocab_size: int = 128,
    num_pages: int = 128,
    window: int | None = None,
) -> StepLimits:
    """Small limits. With ``window`` there is a second, sliding-window KV group of as many pages."""
    groups = [PageGroupSpec(name="full", layers=(0,), window=None, page_bytes=64, num_pages=num_pages)]
    if window is not None:
        groups.append(PageGroupSpec(name="window", layers=(1,), window=window, page_bytes=64, num_pages=num_pages))
    return StepLimits(
        max_tokens=max_tokens,
        max_sequences=max_sequences,
        max_logit_rows=max_logit_rows,
        max_context=max_context,
        page_size=page_size,
        vocab_size=vocab_size,
        groups=tuple(groups),
    )


class FakeExecutor:
    """Implements the Executor protocol.

    ``script`` decides the next token after a context (prompt and output so far):

    - a sequence of ids: emitted after any prompt, then ``eos_token_id``. The place in it is the longest prefix of the
      script that the context ends with, so a prompt should not end with the script's first ids;
    - a mapping from prompts to their output, then ``eos_token_id``; unknown prompts raise;
    - a function of the context;
    - None: logits are pseudo-random numbers seeded by the whole context (for sampling and invariance tests).

    Scripted tokens have a logit 40 above the rest, so they are drawn at temperature 1, too, unless biases say
    otherwise. ``seconds_per_step`` and ``seconds_per_token`` set the pace. ``history`` lists (tokens, sequences,
    logits rows) of every forward.
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        limits: StepLimits | None = None,
        eos_token_id: int = 0,
        seconds_per_step: float = 0.0,
        seconds_per_token: float = 0.0,
        faults: FakeFaults | None = None,
    ) -> None:
        self.limits = limits or fake_limits()
        self.step = StepInput.allocate(self.limits)
        self.script = script
        self.eos_token_id = eos_token_id
        self.seconds_per_step = seconds_per_step
        self.seconds_per_token = seconds_per_token
        self.faults = faults or FakeFaults()
        self.history: list[tuple[int, int, int]] = []
        self.closed = False
        self.tokens_drawn = 0
        size = self.limits.page_size
        self._pages = [np.full((group.num_pages, size), _UNWRITTEN, np.int32) for group in self.limits.groups]
        self._logits = np.zeros((self.limits.max_logit_rows, self.limits.vocab_size), np.float32)

    def forward(self) -> None:
        """See Executor.forward. Raises ValueError for a malformed step and what the fault switches say."""
        self._check_open()
        step = self.step
        self._raise_forward_faults()
        self._check_step()
        time.sleep(self.seconds_per_step + self.seconds_per_token * step.num_tokens)
        for sequence in range(step.num_sequences):
            self._store(sequence)
        for row in range(step.num_logit_rows):
            self._logits[row] = self._logits_of_row(int(step.logit_rows[row]))
        self.history.append((step.num_tokens, step.num_sequences, step.num_logit_rows))

    def sample(self, batch: SamplingBatch) -> SampleOutput:
        """See Executor.sample; by the reference sampler."""
        self._check_open()
        if self.faults.sample_errors:
            raise self.faults.sample_errors.pop(0)
        if len(batch.temperature) != self.step.num_logit_rows:
            raise ValueError(f"a sampling batch of {len(batch.temperature)} rows for {self.step.num_logit_rows} rows")
        output = sample_reference(self.logits(), batch)
        self.tokens_drawn += len(output.token_ids)
        return output

    def logits(self) -> Float32Array:
        """See Executor.logits."""
        return self._logits[: self.step.num_logit_rows]

    def close(self) -> None:
        """See Executor.close."""
        self.closed = True

    def _check_open(self) -> None:
        if self.closed:
            raise RuntimeError("the executor is closed")

    def _raise_forward_faults(self) -> None:
        faults, step = self.faults, self.step
        if faults.forward_errors:
            raise faults.forward_errors.pop(0)
        if faults.fail_after_tokens is not None and self.tokens_drawn >= faults.fail_after_tokens:
            raise RuntimeError(f"fault switch: {self.tokens_drawn} tokens were drawn")
        if faults.poison_token is not None and faults.poison_token in step.token_ids[: step.num_tokens]:
            raise RuntimeError(f"fault switch: poison token {faults.poison_token}")

    def _check_step(self) -> None:
        """Raises ValueError unless the step keeps the contract of StepInput and StepLimits."""
        step, limits = self.step, self.limits
        _require(0 < step.num_tokens <= limits.max_tokens, f"num_tokens is {step.num_tokens}")
        _require(0 < step.num_sequences <= limits.max_sequences, f"num_sequences is {step.num_sequences}")
        _require(0 <= step.num_logit_rows <= limits.max_logit_rows, f"num_logit_rows is {step.num_logit_rows}")
        tokens = step.token_ids[: step.num_tokens]
        _require(bool(((tokens >= 0) & (tokens < limits.vocab_size)).all()), "a token id is out of range")
        starts = step.query_start[: step.num_sequences + 1]
        _require(starts[0] == 0 and starts[-1] == step.num_tokens, "query_start does not cover the tokens")
        _require(bool((np.diff(starts) > 0).all()), "a sequence has no tokens")
        rows = step.logit_rows[: step.num_logit_rows]
        _require(bool(((rows >= 0) & (rows < step.num_tokens)).all()), "a logits row is out of range")
        for sequence in range(step.num_sequences):
            length = int(step.context_len[sequence])
            _require(length <= limits.max_context, f"context_len is {length}")
            wanted = range(length - int(starts[sequence + 1] - starts[sequence]), length)
            found = step.positions[starts[sequence] : starts[sequence + 1]]
            _require(found.tolist() == list(wanted) and found[0] >= 0, "positions are not consecutive to the end")
        for group, spec in enumerate(limits.groups):
            used = [page for sequence in range(step.num_sequences) for page in self._table(group, sequence)]
            _require(all(0 <= page < spec.num_pages for page in used), f"a page of group {spec.name} is out of range")
            holders = Counter(used)
            written = [page for sequence in range(step.num_sequences) for page in self._written(group, sequence)]
            _require(all(holders[page] == 1 for page in written), f"a page of group {spec.name} is written and shared")

    def _table(self, group: int, sequence: int) -> list[int]:
        count = -(-int(self.step.context_len[sequence]) // self.limits.page_size)
        pages: list[int] = self.step.block_tables[group][sequence, :count].tolist()
        return pages

    def _written(self, group: int, sequence: int) -> list[int]:
        """The pages that the sequence's tokens of this step go to."""
        start = int(self.step.positions[self.step.query_start[sequence]])
        return self._table(group, sequence)[start // self.limits.page_size :]

    def _store(self, sequence: int) -> None:
        start, end = (int(value) for value in self.step.query_start[sequence : sequence + 2])
        positions = self.step.positions[start:end]
        for group, store in enumerate(self._pages):
            table = np.asarray(self._table(group, sequence))
            size = self.limits.page_size
            store[table[positions // size], positions % size] = self.step.token_ids[start:end]

    def _logits_of_row(self, token: int) -> Float32Array:
        step = self.step
        sequence = int(np.searchsorted(step.query_start[: step.num_sequences + 1], token, side="right")) - 1
        context = self._read_context(sequence, int(step.positions[token]) + 1)
        if self.faults.nan_token is not None and context[-1] == self.faults.nan_token:
            return np.full(self.limits.vocab_size, np.nan, np.float32)
        noise = np.random.default_rng(zlib.crc32(np.asarray(context, np.int32).tobytes()))
        logits = noise.standard_normal(self.limits.vocab_size, np.float32)
        scripted = None if self.script is None else next_token(self.script, context, self.eos_token_id)
        if scripted is not None:
            logits[scripted] += _SCRIPTED_LOGIT
        return logits

    def _read_context(self, sequence: int, length: int) -> Context:
        """The first ``length`` tokens of a sequence as every KV group holds them (a window group: its window)."""
        full: list[int] = []
        for group, (spec, store) in enumerate(zip(self.limits.groups, self._pages, strict=True)):
            first = 0 if spec.window is None else max(0, length - spec.window)
            held = store[self._table(group, sequence)].reshape(-1)[first:length].tolist()
            if _UNWRITTEN in held:
                raise ValueError(f"KV group {spec.name} is read where it was never written")
            if not full:
                full = held if first == 0 else [_UNWRITTEN] * first + held
            elif full[first:] != held:
                raise ValueError(f"KV group {spec.name} holds other tokens than the first group")
        return tuple(full)


def next_token(script: Script, context: Context, eos_token_id: int) -> int | None:
    """The token that ``script`` emits after ``context``; None in the middle of a scripted prompt. See FakeExecutor."""
    if callable(script):
        return script(context)
    if isinstance(script, Mapping):
        prompts = [prompt for prompt in script if context[: len(prompt)] == tuple(prompt)]
        if not prompts:
            if any(tuple(prompt[: len(context)]) == context for prompt in script):
                return None
            raise ValueError(f"the script has no prompt that the context {context} begins with")
        prompt = max(prompts, key=len)
        output, place = script[prompt], len(context) - len(prompt)
        return output[place] if place < len(output) else eos_token_id
    done = next(size for size in range(len(script), -1, -1) if size == 0 or context[-size:] == tuple(script[:size]))
    return script[done] if done < len(script) else eos_token_id


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(f"malformed step: {message}")
