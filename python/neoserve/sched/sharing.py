"""How sequences take computed pages from the prefix tree and give theirs to it."""

from __future__ import annotations

from neoserve.cache.block_tables import BlockTables
from neoserve.cache.keys import TOKEN_BYTES, PrefixKey, namespace_digest, token_bytes
from neoserve.cache.radix import RadixNode
from neoserve.sched.sequence import SequenceState
from neoserve.types.request import GenerateRequest

WORTH_WAITING_TOKENS = 32
"""A prompt waits for an older one that computes at least so many of its next tokens (SGLang's in-batch bound)."""

Claim = tuple[RadixNode, bytes]
"""Token bytes that are being computed after a place in the tree."""


class PrefixSharing:
    """The prefix cache as the scheduler uses it. ``model`` identifies what the bits of a page depend on beside its
    tokens; None turns sharing off: then no request has a prefix key, and nothing reaches the tree.

    ``cached_tokens`` counts the prompt tokens that requests took from the tree instead of computing them.
    """

    def __init__(self, tables: BlockTables, model: bytes | None) -> None:
        self.cached_tokens = 0
        self._tables = tables
        self._model = model

    def prefix_of(self, request: GenerateRequest) -> PrefixKey | None:
        """How the tree knows a request's prompt."""
        if self._model is None:
            return None
        namespace = namespace_digest(self._model, request.cache_salt, request.extra_key)
        return PrefixKey(namespace, token_bytes(request.prompt_token_ids))

    def start(self, state: SequenceState, cached: int) -> None:
        """An admitted sequence begins after the ``cached`` tokens that its table shares."""
        state.num_computed = state.cached_tokens = cached
        self.cached_tokens += cached

    def must_wait(self, state: SequenceState, claims: set[Claim]) -> bool:
        """Whether an older prompt of this step is computing the next pages of a prefilling sequence.

        Before that the sequence takes what the tree has got since its last chunk. ``claims`` are what the older
        prompts compute next; the sequence's own claim is added. Only a younger sequence waits for an older one, and
        the oldest for nobody, so every wait ends: at the latest when the older one has left the shared part.
        """
        if state.prefix is None:
            return False
        if state.prompt_logprobs is None:
            self._adopt(state, state.prefix)
        claim = self._claim(state, state.prefix)
        if claim is None:
            return False
        usable = state.max_cached_tokens - self._tables.shared_tokens(state.slot)
        if claim in claims and len(claim[1]) <= usable * TOKEN_BYTES:
            return True
        claims.add(claim)
        return False

    def share(self, state: SequenceState) -> None:
        """Gives the full pages that a sequence has computed to the tree."""
        if state.prefix is not None:
            self._tables.share(state.slot, self._unshared(state))

    def release(self, state: SequenceState, keep: bool) -> None:
        """Empties the sequence's slot; with ``keep`` its full computed pages, prompt and output, go to the tree."""
        tokens = self._unshared(state) if keep and state.prefix is not None else b""
        self._tables.release(state.slot, tokens)

    def _unshared(self, state: SequenceState) -> bytes:
        """The tokens after the shared part whose KV is stored. The newest token is never among them."""
        return token_bytes(state.tokens[self._tables.shared_tokens(state.slot) : state.num_computed])

    def _adopt(self, state: SequenceState, prefix: PrefixKey) -> None:
        shared = self._tables.shared_tokens(state.slot)
        tokens = prefix.tokens[shared * TOKEN_BYTES : state.max_cached_tokens * TOKEN_BYTES]
        saved = self._tables.adopt(state.slot, tokens) - state.num_computed
        if saved > 0:
            state.num_computed += saved
            state.cached_tokens += saved
            self.cached_tokens += saved

    def _claim(self, state: SequenceState, prefix: PrefixKey) -> Claim | None:
        """The next full pages of a prompt, as many as are worth waiting for; None if it has fewer left."""
        node = self._tables.place(state.slot)
        size = self._tables.page_size
        width = -(-WORTH_WAITING_TOKENS // size) * size * TOKEN_BYTES
        first = self._tables.shared_tokens(state.slot) * TOKEN_BYTES
        tokens = prefix.tokens[first : first + width]
        return None if node is None or len(tokens) < width else (node, tokens)
