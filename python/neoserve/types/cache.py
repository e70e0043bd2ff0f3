"""What the prefix cache holds, for people who look at it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedRun:
    """One node of the prefix tree: ``tokens`` tokens in ``pages`` pages of every KV group after those of ``parent``.

    ``parent`` is the index of another run in the listing; None begins a prompt. ``namespace`` and ``key`` (of the
    last page) are hexadecimal beginnings of digests. ``readers`` are running requests; a larger ``last_used`` was used
    later. ``token_ids`` are the first ids; empty unless they were asked for.
    """

    parent: int | None
    namespace: str
    key: str
    tokens: int
    pages: int
    readers: int
    last_used: int
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheListing:
    """The prefix tree, parents before children; the first ``runs`` of ``num_runs``.

    Pages are counted over all KV groups: used by running requests, evictable, and of the whole pool.
    """

    enabled: bool
    page_size: int
    used_pages: int
    evictable_pages: int
    total_pages: int
    num_runs: int
    runs: tuple[CachedRun, ...]
