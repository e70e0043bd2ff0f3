"""The admission policy: how long a request may become and what is set aside for it before it runs."""

from __future__ import annotations

from neoserve.types.errors import ContextLengthError


def clamp_max_tokens(prompt_length: int, max_tokens: int | None, context_length: int) -> int:
    """Tokens that a request may generate: prompt and output together never exceed ``context_length``.

    ``max_tokens`` None means all that is left of the context; a larger number is reduced to that, and generation
    ends with finish_reason "length" there. Raises ContextLengthError if not even one token is left.
    """
    room = context_length - prompt_length
    if room < 1:
        raise ContextLengthError(
            f"The prompt has {prompt_length} tokens, but the context holds {context_length} including at least one "
            "generated token; shorten the prompt or start the server with a longer context and more KV memory."
        )
    return room if max_tokens is None else min(max_tokens, room)


def reserved_tokens(prompt_length: int, max_tokens: int) -> int:
    """Tokens whose KV pages are reserved when a request is admitted: the worst case, so that it always finishes.

    The last generated token is never fed back, so its KV is never stored. Nothing can be preempted yet: a request
    that ran out of pages half-way could only fail, so admission promises the whole length. Preemption would reserve
    less here and grow the tables later; this function is the policy.
    """
    return prompt_length + max_tokens - 1
