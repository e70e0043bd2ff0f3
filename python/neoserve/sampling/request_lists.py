"""The lists that sampling needs of one request: token history, logit bias, forbidden ids."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from neoserve.types.request import GenerateRequest
from neoserve.types.sampling import SamplingParams

Int32Array = npt.NDArray[np.int32]

_EMPTY = np.zeros(0, np.int32)


class RequestLists:
    """Lists of one request. ``vocab_size`` bounds the logits, ``valid_vocabulary`` the ids that may be drawn."""

    def __init__(self, request: GenerateRequest, prompt_length: int, vocab_size: int, valid_vocabulary: int) -> None:
        params = request.sampling
        bias = sorted(params.logit_bias.items())
        self.bias_tokens = np.array([token for token, _ in bias], np.int32)
        self.bias_values = np.array([value for _, value in bias], np.float32)
        self._history = TokenHistory(prompt_length) if _needs_history(params) else None
        self._never = np.arange(valid_vocabulary, vocab_size, dtype=np.int32)
        eos = () if params.ignore_eos else request.eos_token_ids
        stops = np.array(sorted({*eos, *params.stop_token_ids}), np.int32)
        self._early = np.union1d(stops, self._never).astype(np.int32) if params.min_tokens else self._never
        self._min_length = prompt_length + params.min_tokens

    @property
    def in_use(self) -> bool:
        """Whether any list can be non-empty in any step."""
        return bool(len(self.bias_tokens) or self._history or len(self._early))

    def history(self, tokens: list[int]) -> tuple[Int32Array, Int32Array]:
        """(distinct ids, how often each was generated) after ``tokens``; empty if no penalty is on."""
        return (_EMPTY, _EMPTY) if self._history is None else self._history.after(tokens)

    def forbidden(self, length: int) -> Int32Array:
        """Ids that may not be drawn as the token at position ``length``: stop ids before min_tokens, too."""
        return self._early if length < self._min_length else self._never


class TokenHistory:
    """Distinct token ids of a growing sequence with their output counts, kept incrementally.

    The first ``prompt_length`` tokens are the prompt: present, but not counted.
    """

    def __init__(self, prompt_length: int) -> None:
        self._prompt_length = prompt_length
        self._seen = 0
        self._index: dict[int, int] = {}
        self._tokens = np.zeros(0, np.int32)
        self._counts = np.zeros(0, np.int32)

    def after(self, tokens: list[int]) -> tuple[Int32Array, Int32Array]:
        """(ids, output counts) of ``tokens``, which must extend the list of the call before."""
        for position in range(self._seen, len(tokens)):
            self._add(tokens[position], position >= self._prompt_length)
        self._seen = len(tokens)
        used = len(self._index)
        return self._tokens[:used], self._counts[:used]

    def _add(self, token: int, is_output: bool) -> None:
        place = self._index.setdefault(token, len(self._index))
        if place == len(self._tokens):
            room = np.zeros(max(64, len(self._tokens)), np.int32)
            self._tokens = np.concatenate([self._tokens, room])
            self._counts = np.concatenate([self._counts, np.zeros_like(room)])
        self._tokens[place] = token
        self._counts[place] += is_output


def _needs_history(params: SamplingParams) -> bool:
    penalties = (params.repetition_penalty - 1.0, params.presence_penalty, params.frequency_penalty)
    return any(penalty != 0.0 for penalty in penalties)
