"""How much memory the KV cache takes, how many pages that gives, and the context length that fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from neoserve.program.ir import KvGroup
from neoserve.program.plan import round_up
from neoserve.types.errors import ConfigurationError

KV_ITEM_BYTES = {"f32": 4, "bf16": 2}
_CACHE_LINE = 64
_ALIASING_STRIDE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPlan:
    """The KV cache of an executor. Every group has ``num_pages`` pages of ``page_bytes[group]`` bytes each.

    ``context_length`` is the longest sequence in tokens; ``reason`` says in one line what was chosen and why.
    """

    context_length: int
    num_pages: int
    page_bytes: tuple[int, ...]
    reason: str

    @property
    def total_bytes(self) -> int:
        """Bytes of all pages of all groups."""
        return self.num_pages * sum(self.page_bytes)


def page_bytes(group: KvGroup, page_size: int, kv_dtype: str) -> int:
    """Bytes of one page of ``group``: K and V of all its layers for ``page_size`` tokens (docs/ops.md, "The page").

    Rounded up to a cache line, plus one line when pages would otherwise lie a multiple of 4096 apart, where the
    same token of all pages would compete for the same cache sets.
    """
    row = 2 * len(group.layers) * group.num_kv_heads * group.head_dim * KV_ITEM_BYTES[kv_dtype]
    stride = round_up(row * page_size, _CACHE_LINE)
    return stride + _CACHE_LINE if stride % _ALIASING_STRIDE == 0 else stride


def plan_kv(
    groups: Sequence[KvGroup],
    *,
    page_size: int,
    kv_dtype: str,
    max_context: int,
    context_length: int | None,
    max_sequences: int,
    kv_cache_bytes: int | None,
    available_bytes: int,
) -> KvPlan:
    """Pages and context length for ``max_sequences`` sequences of up to ``context_length`` (or ``max_context``) tokens.

    The memory is ``kv_cache_bytes``, or by default half of ``available_bytes``; never more than all sequences at full
    length need. When one sequence of ``max_context`` does not fit, the context length is cut to what fits; a
    ``context_length`` that the user asked for is never cut.

    Raises ConfigurationError naming the option when not even that much, or not a single page, fits.
    """
    sizes = tuple(page_bytes(group, page_size, kv_dtype) for group in groups)
    per_page = sum(sizes)
    budget = available_bytes // 2 if kv_cache_bytes is None else kv_cache_bytes
    origin = "half of the available memory" if kv_cache_bytes is None else "kv_cache_bytes"
    affordable = budget // per_page
    wanted_context = context_length or max_context
    wanted = -(-wanted_context // page_size)
    if affordable < 1 or (context_length is not None and affordable < wanted):
        needed = (wanted if context_length is not None else 1) * per_page
        raise ConfigurationError(
            f"{origin} is {_size(budget)}; a context_length of {context_length or page_size} tokens needs "
            f"{_size(needed)} of KV cache: raise kv_cache_bytes or lower context_length"
        )
    num_pages = min(affordable, wanted * max_sequences)
    context = min(wanted_context, num_pages * page_size)
    total = num_pages * per_page
    reason = f"context {context} tokens, KV cache {_size(total)} ({num_pages} pages of {page_size} tokens, {kv_dtype})"
    if context < wanted_context:
        reason += f": the model's {wanted_context} tokens need {_size(wanted * per_page)}, {origin} is {_size(budget)}"
    elif num_pages < wanted * max_sequences:
        reason += f": limited by {origin}; {max_sequences} full-length requests would need " + _size(
            wanted * max_sequences * per_page
        )
    else:
        reason += f": enough for {max_sequences} requests of full length"
    if max_sequences > 1 and num_pages < 2 * -(-context // page_size):
        reason += (
            "; a request without max_tokens reserves the whole context: set max_tokens or a smaller context_length "
            "for more at a time"
        )
    return KvPlan(context_length=context, num_pages=num_pages, page_bytes=sizes, reason=reason)


def _size(nbytes: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes} B"
