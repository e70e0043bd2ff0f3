"""Block tables of the running sequences, one per KV group, over one page allocator each (design D3)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from neoserve.cache.allocator import PageAccountingError, PageAllocator
from neoserve.cache.keys import PrefixKey
from neoserve.cache.radix import Match, RadixNode, RadixTree
from neoserve.types.step import Int32Array, PageGroupSpec, StepLimits


@dataclass(slots=True)
class _Held:
    """The pages of a slot, group by group. The first ``num_shared`` of each belong to the prefix tree, which ``node``
    keeps locked up to there; the others are the slot's own."""

    pages: tuple[list[int], ...]
    node: RadixNode | None
    num_shared: int


class BlockTables:
    """Pages of ``max_sequences`` slots. A slot holds the pages of one sequence in every KV group.

    Every page in use has one owner: a slot, or the prefix tree. A slot begins with pages of the tree, which it reads
    and never writes, and goes on with its own. Pages that are full and computed move from the slot to the tree by
    ``share`` and ``release``. Pages of the tree that no slot reads count as available: ``try_reserve`` evicts as many
    as it needs.
    """

    def __init__(self, limits: StepLimits) -> None:
        self.page_size = limits.page_size
        self.groups: tuple[PageGroupSpec, ...] = limits.groups
        self.allocators = tuple(PageAllocator(group.num_pages) for group in limits.groups)
        self.tree = RadixTree(limits.page_size, len(limits.groups))
        self.evicted_pages = 0
        shape = (limits.max_sequences, limits.max_pages_per_sequence)
        self._tables = tuple(np.zeros(shape, np.int32) for _ in limits.groups)
        self._slots: list[_Held | None] = [None] * limits.max_sequences

    @property
    def capacity_tokens(self) -> int:
        """Longest sequence, in tokens, that an empty pool could hold."""
        return min((allocator.num_pages for allocator in self.allocators), default=0) * self.page_size

    @property
    def used_pages(self) -> int:
        """Pages that sequences hold or read, over all groups; 0 when nothing runs."""
        return sum(allocator.num_used for allocator in self.allocators) - self.evictable_pages

    @property
    def evictable_pages(self) -> int:
        """Pages of the prefix tree that no sequence reads, over all groups."""
        return self.tree.num_evictable_pages * len(self.groups)

    @property
    def total_pages(self) -> int:
        """Pages of the pools, over all groups: used + evictable + free."""
        return sum(allocator.num_pages for allocator in self.allocators)

    def pages_for(self, group: PageGroupSpec, tokens: int) -> int:
        """Pages that ``tokens`` tokens of one sequence take in a group.

        A window group keeps all its pages, too: pages that left the window are not given back yet, and this is the
        one place that would know.
        """
        del group
        return -(-tokens // self.page_size)

    def try_reserve(self, slot: int, tokens: int, prefix: PrefixKey | None = None, max_shared: int = 0) -> int | None:
        """Gives an empty slot the pages for ``tokens`` tokens in every group; all or nothing.

        The table begins with the longest part of ``prefix`` that the tree holds, at most ``max_shared`` tokens; the
        return value is its length in tokens. The rest comes from the allocators, after eviction where they are
        empty. None if there are too few pages. Without ``prefix`` the slot takes no part in sharing.

        Raises PageAccountingError if the slot is taken or the table too narrow.
        """
        if self._slots[slot] is not None:
            raise PageAccountingError(f"slot {slot} already holds a sequence")
        counts = [self.pages_for(group, tokens) for group in self.groups]
        if any(count > table.shape[1] for count, table in zip(counts, self._tables, strict=True)):
            raise PageAccountingError(f"{tokens} tokens are more than a block table holds (the context length)")
        match = self._match(prefix, max_shared)
        if not self._fits(tokens, match):
            self._unlock(match)
            return None
        shared = 0 if match is None else match.num_pages
        self._evict(max(count - shared - pool.num_free for count, pool in zip(counts, self.allocators, strict=True)))
        own = [pool.allocate(count - shared) for count, pool in zip(counts, self.allocators, strict=True)]
        found = match.pages if match is not None else tuple([] for _ in self.groups)
        pages = tuple([*first, *rest] for first, rest in zip(found, own, strict=True))
        for table, group in zip(self._tables, pages, strict=True):
            table[slot, : len(group)] = group
        self._slots[slot] = _Held(pages, None if match is None else match.node, shared)
        return shared * self.page_size

    def shared_tokens(self, slot: int) -> int:
        """Leading tokens of a slot whose pages belong to the tree: they are computed, and must not be written."""
        return self._held(slot).num_shared * self.page_size

    def place(self, slot: int) -> RadixNode | None:
        """Where the shared part of a slot ends in the tree; equal for sequences that share exactly so much."""
        return self._held(slot).node

    def adopt(self, slot: int, tokens: bytes) -> int:
        """Replaces own pages of a slot by pages that the tree has got since, and frees them.

        ``tokens`` are the token bytes that follow the shared part. Returns the shared tokens afterwards.
        """
        held = self._held(slot)
        if held.node is not None:
            match = self.tree.match_below(held.node, tokens)
            if match.num_pages:
                self.tree.lock(match.node, held.node)
                self._take_over(slot, held, match)
        return held.num_shared * self.page_size

    def share(self, slot: int, tokens: bytes) -> None:
        """Hands computed pages to the tree: those that ``tokens``, which follow the shared part, fill completely.

        A page that the tree has already is freed, and the table goes on with the tree's: equal tokens after equal
        prefixes have equal bits (design D6).
        """
        held = self._held(slot)
        count = len(tokens) // self.tree.page_bytes
        if held.node is None or count == 0:
            return
        first = held.num_shared
        own = tuple(group[first : first + count] for group in held.pages)
        self._take_over(slot, held, self.tree.extend(held.node, tokens[: count * self.tree.page_bytes], own))

    def release(self, slot: int, tokens: bytes = b"") -> None:
        """Empties a slot: what ``tokens`` fill goes to the tree as by ``share``, its other own pages are freed.

        Raises PageAccountingError if the slot is empty (released twice).
        """
        held = self._slots[slot]
        if held is None:
            raise PageAccountingError(f"slot {slot} is released but holds no sequence")
        self.share(slot, tokens)
        self._slots[slot] = None
        for allocator, pages in zip(self.allocators, held.pages, strict=True):
            allocator.free(pages[held.num_shared :])
        if held.node is not None:
            self.tree.unlock(held.node)

    def flush(self) -> int:
        """Frees every page of the tree that no slot reads; returns their number over all groups."""
        pages = self.evictable_pages
        for allocator, evicted in zip(self.allocators, self.tree.evict(self.tree.num_evictable_pages), strict=True):
            allocator.free(evicted)
        return pages

    def reset(self) -> None:
        """Frees everything, whoever holds it: the repair after a leak. No sequence may be running."""
        self.allocators = tuple(PageAllocator(group.num_pages) for group in self.groups)
        self.tree = RadixTree(self.page_size, len(self.groups))
        self._slots = [None] * len(self._slots)

    def write(self, slots: Sequence[int], width: int, out: Sequence[Int32Array]) -> None:
        """Copies the first ``width`` entries of each slot's tables to the first rows of ``out``, group by group."""
        if not slots:
            return
        index = np.asarray(slots, np.intp)
        for table, target in zip(self._tables, out, strict=True):
            target[: len(slots), :width] = table[index, :width]

    def pages_of(self, slot: int) -> tuple[list[int], ...]:
        """The pages of a slot, group by group; empty if the slot holds no sequence."""
        held = self._slots[slot]
        return tuple([] for _ in self.groups) if held is None else held.pages

    def check_idle(self) -> None:
        """Raises PageAccountingError unless every page in use is an unlocked page of the tree. No slot may be taken.

        The cheap part of ``check_integrity``, for every idle point: its time does not depend on the pool.
        """
        cached = self.tree.num_pages
        for group, allocator in zip(self.groups, self.allocators, strict=True):
            if allocator.num_used != cached or self.tree.num_locked_pages:
                raise PageAccountingError(
                    f"{allocator.num_used} pages of group {group.name} are in use while no request runs; the prefix "
                    f"tree holds {cached}, {self.tree.num_locked_pages} of them locked"
                )

    def check_integrity(self) -> None:
        """Raises PageAccountingError unless, in every group, free + held by slots + held by the tree = all, nothing
        counts twice, and exactly what slots read is locked."""
        self.tree.check_integrity()
        held = [(slot, held) for slot, held in enumerate(self._slots) if held is not None]
        for number, (allocator, table) in enumerate(zip(self.allocators, self._tables, strict=True)):
            owned = [page for _, one in held for page in one.pages[number][one.num_shared :]]
            owned += [page for node in self.tree.nodes() for page in node.pages[number]]
            allocator.check_integrity(owned)
            for slot, one in held:
                if table[slot, : len(one.pages[number])].tolist() != one.pages[number]:
                    raise PageAccountingError(f"the block table of slot {slot} disagrees with its pages")
        self._check_locks([(slot, one, one.node) for slot, one in held if one.node is not None])

    def _check_locks(self, readers: list[tuple[int, _Held, RadixNode]]) -> None:
        locks: Counter[RadixNode] = Counter()
        for slot, held, end in readers:
            path = end.path()
            locks.update(path)
            for number, pages in enumerate(held.pages):
                if pages[: held.num_shared] != [page for node in path for page in node.pages[number]]:
                    raise PageAccountingError(f"slot {slot} reads other pages than its place in the prefix tree has")
        if any(node.locks != locks[node] for node in self.tree.nodes()):
            raise PageAccountingError("a prefix is locked more or less often than it is read")

    def _held(self, slot: int) -> _Held:
        held = self._slots[slot]
        if held is None:
            raise PageAccountingError(f"slot {slot} holds no sequence")
        return held

    def _match(self, prefix: PrefixKey | None, max_shared: int) -> Match | None:
        """Finds and locks in one step: a match that is not locked could be evicted by the next allocation (B17)."""
        if prefix is None:
            return None
        match = self.tree.match(prefix.namespace, prefix.tokens, max_shared // self.page_size)
        self.tree.lock(match.node)
        return match

    def _unlock(self, match: Match | None) -> None:
        if match is not None:
            self.tree.unlock(match.node)

    def _fits(self, tokens: int, match: Match | None) -> bool:
        available = self.tree.num_evictable_pages + (0 if match is None else match.num_pages)
        return all(
            self.pages_for(group, tokens) <= allocator.num_free + available
            for group, allocator in zip(self.groups, self.allocators, strict=True)
        )

    def _evict(self, count: int) -> None:
        if count <= 0:
            return
        for allocator, pages in zip(self.allocators, self.tree.evict(count), strict=True):
            allocator.free(pages)
        self.evicted_pages += count * len(self.groups)

    def _take_over(self, slot: int, held: _Held, match: Match) -> None:
        """The pages of ``match`` become those after the shared part; own pages that they replace are freed."""
        first, last = held.num_shared, held.num_shared + match.num_pages
        for table, allocator, mine, found in zip(self._tables, self.allocators, held.pages, match.pages, strict=True):
            allocator.free(old for old, new in zip(mine[first:last], found, strict=True) if old != new)
            mine[first:last] = found
            table[slot, first:last] = found
        held.node, held.num_shared = match.node, last
