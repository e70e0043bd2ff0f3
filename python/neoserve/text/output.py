"""From the engine's token deltas to the text deltas that a client sees."""

from __future__ import annotations

from dataclasses import dataclass

from neoserve.text.detokenize import IncrementalDetokenizer
from neoserve.text.stop import StopMatcher
from neoserve.text.tokenizer import Tokenizer
from neoserve.types.request import FinishReason, GenerateRequest, TokenDelta, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """New text of one request.

    ``text`` may be empty while a character or a possible stop string is incomplete. ``token_ids`` are the tokens
    generated since the last delta, the one that ended generation included; ``logprobs`` has one entry for each when
    they were asked for (``Tokenizer.token_bytes`` gives a token's own bytes). The counts are totals so far.

    ``finish_reason`` is set in the last delta only; ``stop_reason`` is then the stop string that matched, or the
    stop token's id if it was not an EOS. ``stopped_by_text``: the engine does not know that the request ended, so
    it must be aborted there.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    stopped_by_text: bool = False
    error: str | None = None


class OutputProcessor:
    """Text of one request: detokenises, matches stop strings, counts tokens.

    ``continues_text`` as in IncrementalDetokenizer: True for completions, False for chat. A stop string that is
    complete within the first ``min_tokens`` tokens does not count; one that begins there and ends later does.
    """

    def __init__(self, tokenizer: Tokenizer, request: GenerateRequest, *, continues_text: bool = False) -> None:
        self._request = request
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, request.sampling.skip_special_tokens, continues_text=continues_text
        )
        self._stops = StopMatcher(request.sampling.stop)
        self._completion_tokens = 0
        self._cached_tokens = 0
        self._finished = False

    @property
    def finished(self) -> bool:
        """Whether the last delta was given; what the engine still sends is to be dropped."""
        return self._finished

    def process(self, delta: TokenDelta) -> TextDelta:
        """The text delta for ``delta``. Raises ValueError once finished."""
        if self._finished:
            raise ValueError(f"request {delta.request_id} is finished; drop its further deltas")
        self._cached_tokens = max(self._cached_tokens, delta.cached_tokens)
        parts: list[str] = []
        for used, token_id in enumerate(delta.token_ids, start=1):
            self._completion_tokens += 1
            if token_id == delta.stop_token_id and used == len(delta.token_ids):
                break  # the token that ended generation is counted but is no text
            if self._take(self._detokenizer.push((token_id,)), parts):
                return self._stopped(delta, parts, used)
        if delta.finish_reason is None:
            return self._delta(delta, parts, len(delta.token_ids))
        if self._take(self._detokenizer.finish(), parts):
            return self._stopped(delta, parts, len(delta.token_ids))
        parts.append(self._stops.finish())
        self._finished = True
        stop_token = None if delta.stop_token_id in self._request.eos_token_ids else delta.stop_token_id
        return self._delta(
            delta, parts, len(delta.token_ids), finish_reason=delta.finish_reason, stop_reason=stop_token
        )

    def _take(self, text: str, parts: list[str]) -> bool:
        """Append to ``parts`` what of ``text`` may go out; whether a stop string ended it."""
        text, stopped = self._stops.push(text, counts=self._completion_tokens > self._request.sampling.min_tokens)
        parts.append(text)
        return stopped

    def _stopped(self, delta: TokenDelta, parts: list[str], used: int) -> TextDelta:
        self._finished = True
        return self._delta(
            delta,
            parts,
            used,
            finish_reason="stop",
            stop_reason=self._stops.matched,
            stopped_by_text=delta.finish_reason is None,
        )

    def _delta(
        self,
        delta: TokenDelta,
        parts: list[str],
        used: int,
        *,
        finish_reason: FinishReason | None = None,
        stop_reason: str | int | None = None,
        stopped_by_text: bool = False,
    ) -> TextDelta:
        return TextDelta(
            request_id=delta.request_id,
            text="".join(parts),
            token_ids=delta.token_ids[:used],
            prompt_tokens=len(self._request.prompt_token_ids),
            completion_tokens=self._completion_tokens,
            cached_tokens=self._cached_tokens,
            logprobs=delta.logprobs[:used],
            prompt_logprobs=delta.prompt_logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            stopped_by_text=stopped_by_text,
            error=delta.error,
        )
