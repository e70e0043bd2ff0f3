"""What the scheduler knows of one request."""

from __future__ import annotations

from dataclasses import dataclass, field

from neoserve.cache.keys import PrefixKey
from neoserve.types.request import FinishReason, GenerateRequest, TokenLogprob


@dataclass(slots=True, eq=False)
class SequenceState:
    """A request from its admission to the queue until its last token.

    Intervals of ``tokens`` (prompt, then output):

    - [0, num_computed): KV is stored in the pages of ``slot``;
    - [num_computed, len(tokens)): still to be computed. While prefilling these are prompt tokens; while decoding it
      is exactly the newest token.

    ``max_tokens`` is the request's, clamped to the context. ``slot`` is -1 while waiting. ``stop_ids`` end
    generation. ``prompt_logprobs`` collects one entry per computed prompt position (None for the first) when asked.
    ``prefix`` is how the prefix cache knows the prompt (None: it is off), ``cached_tokens`` how many prompt tokens it
    has saved so far.
    """

    request: GenerateRequest
    max_tokens: int
    tokens: list[int]
    prompt_length: int
    stop_ids: frozenset[int]
    slot: int = -1
    num_computed: int = 0
    finish_reason: FinishReason | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = field(default=None)
    prefix: PrefixKey | None = None
    cached_tokens: int = 0

    @classmethod
    def from_request(cls, request: GenerateRequest, max_tokens: int, prefix: PrefixKey | None = None) -> SequenceState:
        """The state of a request that has computed nothing yet."""
        eos = () if request.sampling.ignore_eos else request.eos_token_ids
        return cls(
            request=request,
            max_tokens=max_tokens,
            tokens=list(request.prompt_token_ids),
            prompt_length=len(request.prompt_token_ids),
            stop_ids=frozenset(eos) | frozenset(request.sampling.stop_token_ids),
            prompt_logprobs=None if request.prompt_logprobs is None else [None],
            prefix=prefix,
        )

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def num_remaining(self) -> int:
        """Tokens whose KV is still to be computed."""
        return len(self.tokens) - self.num_computed

    @property
    def max_cached_tokens(self) -> int:
        """Leading prompt tokens that may be taken from the prefix cache instead of being computed.

        All but the last: its logits draw the first token. None with ``prompt_logprobs``, which need the logits of
        every prompt position.
        """
        return 0 if self.prompt_logprobs is not None else self.prompt_length - 1

    @property
    def is_prefilling(self) -> bool:
        """Whether prompt tokens are still to be computed."""
        return self.num_computed < self.prompt_length

    @property
    def is_finished(self) -> bool:
        """Whether generation has ended, for whatever reason."""
        return self.finish_reason is not None

    def reason_to_stop(self, token: int) -> FinishReason | None:
        """Whether ``token``, just appended, ends generation: by a stop id, or by length.

        The first ``min_tokens`` tokens cannot be stop ids (the sampler forbids them); should one come all the same,
        it does not end generation.
        """
        if token in self.stop_ids and self.num_output > self.request.sampling.min_tokens:
            return "stop"
        return "length" if self.num_output >= self.max_tokens else None
