"""The reference of sampling in numpy (docs/ops.md, "Sampling"): the oracle of the native sampler and the sampler of
executors without one. Logits are modified in binary32 in the contract's order; probabilities are binary64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from neoserve.sampling.logprobs import best_ids, log_normalizer
from neoserve.sampling.philox import uniform
from neoserve.types.step import SampleOutput, SamplingBatch

Float32Array = npt.NDArray[np.float32]

NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class RowDistribution:
    """What a row can draw: ids in the order of drawing (probability descending, id ascending) and their
    probabilities as [n] float64, not renormalised after min-p and top-p. Greedy rows have one id; a row without
    any finite logit has none.
    """

    ids: npt.NDArray[np.int64]
    probabilities: npt.NDArray[np.float64]

    def draw(self, u: float) -> int:
        """The first id whose running sum exceeds u times the total; NO_TOKEN if there is none."""
        if not len(self.ids):
            return NO_TOKEN
        running = np.cumsum(self.probabilities)
        place = int(np.searchsorted(running, u * running[-1], side="right"))
        return int(self.ids[min(place, len(self.ids) - 1)])

    def accepts(self, token: int, u: float, tolerance: float) -> bool:
        """Whether ``token`` is drawn for some u' within ``tolerance`` of u: how a sampler whose sums are rounded
        otherwise is compared with this one."""
        running = np.cumsum(self.probabilities)
        places = np.flatnonzero(self.ids == token)
        if not len(places):
            return False
        low = running[places[0] - 1] / running[-1] if places[0] else 0.0
        return bool(low - tolerance <= u <= running[places[0]] / running[-1] + tolerance)


def modified_logits(logits: Float32Array, batch: SamplingBatch, row: int) -> Float32Array:
    """Row ``row`` of ``logits`` [rows, vocab] with bias, penalties and forbidden ids applied; NaN becomes -inf."""
    x: Float32Array = logits[row].astype(np.float32)
    x[np.isnan(x)] = -np.inf
    bias = slice(batch.bias_start[row], batch.bias_start[row + 1])
    x[batch.bias_tokens[bias]] += batch.bias_values[bias]
    history = slice(batch.history_start[row], batch.history_start[row + 1])
    ids, counts = batch.history_tokens[history], batch.history_output_counts[history]
    penalty = batch.repetition_penalty[row]
    x[ids] = np.where(x[ids] > 0, x[ids] / penalty, x[ids] * penalty)
    generated, times = ids[counts > 0], counts[counts > 0].astype(np.float32)
    x[generated] -= batch.frequency_penalty[row] * times
    x[generated] -= batch.presence_penalty[row]
    x[batch.forbidden_tokens[batch.forbidden_start[row] : batch.forbidden_start[row + 1]]] = -np.inf
    return x


def row_distribution(logits: Float32Array, batch: SamplingBatch, row: int) -> RowDistribution:
    """The distribution that row ``row`` of ``logits`` [rows, vocab] is drawn from."""
    x = modified_logits(logits, batch, row)
    top = x.max()
    if top == -np.inf:
        return RowDistribution(np.zeros(0, np.int64), np.zeros(0))
    if batch.temperature[row] == 0 or top == np.inf:
        return RowDistribution(np.array([int(np.argmax(x))]), np.ones(1))
    # Stable: equal logits stay in order of id.
    ids = np.argsort(-x, kind="stable")
    if 0 < batch.top_k[row] < len(ids):
        ids = ids[: batch.top_k[row]]
    # In binary64 the quotient cannot overflow, however small the temperature.
    scaled = (x[ids].astype(np.float64) - float(top)) / float(batch.temperature[row])
    weights = np.exp(scaled)
    probabilities = weights / weights.sum()
    kept = probabilities >= float(batch.min_p[row]) * probabilities[0]
    kept &= probabilities > 0
    if batch.top_p[row] < 1:
        running = np.cumsum(np.where(kept, probabilities, 0.0))
        enough = np.flatnonzero(running >= float(batch.top_p[row]))
        if len(enough):
            kept[enough[0] + 1 :] = False
    return RowDistribution(ids[kept], probabilities[kept])


def sample_reference(logits: Float32Array, batch: SamplingBatch) -> SampleOutput:
    """Draws one token per row of ``logits`` [rows, vocab]; see SampleOutput. A row that can draw none gives -1."""
    rows, vocab = logits.shape
    valid = min(batch.valid_vocabulary, vocab)
    alternatives = max(0, min(int(batch.num_logprobs.max(initial=-1)), valid))
    output = SampleOutput(
        token_ids=np.zeros(rows, np.int32),
        logprobs=np.full(rows, np.nan, np.float32),
        top_ids=np.full((rows, alternatives), NO_TOKEN, np.int32),
        top_logprobs=np.full((rows, alternatives), -np.inf, np.float32),
    )
    for row in range(rows):
        distribution = row_distribution(logits, batch, row)
        token = distribution.draw(uniform(int(batch.seed[row]), int(batch.position[row])))
        output.token_ids[row] = token
        if batch.num_logprobs[row] >= 0 and token != NO_TOKEN:
            _write_logprobs(output, row, logits[row], token, int(batch.num_logprobs[row]), valid)
    return output


def _write_logprobs(output: SampleOutput, row: int, logits: Float32Array, token: int, count: int, valid: int) -> None:
    normalizer = log_normalizer(logits[:valid])
    ids = best_ids(logits[:valid], count)
    output.logprobs[row] = (float(logits[token]) if token < valid else -np.inf) - normalizer
    output.top_ids[row, : len(ids)] = ids
    output.top_logprobs[row, : len(ids)] = logits[ids].astype(np.float64) - normalizer
