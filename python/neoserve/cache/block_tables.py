"""Block tables of the running sequences, one per KV group, over one page allocator each (design D3)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from neoserve.cache.allocator import PageAccountingError, PageAllocator
from neoserve.types.step import Int32Array, PageGroupSpec, StepLimits


class BlockTables:
    """Pages of ``max_sequences`` slots. A slot holds the pages of one sequence in every KV group.

    Who owns a page: the allocator marks it used; the slot that lists it is its only owner. A prefix tree fits in
    here as a second owner: ``reserve`` would then start a table with the tree's pages and take only the rest from
    the allocator, and ``release`` would hand full pages to the tree instead of freeing them.
    """

    def __init__(self, limits: StepLimits) -> None:
        self.page_size = limits.page_size
        self.groups: tuple[PageGroupSpec, ...] = limits.groups
        self.allocators = tuple(PageAllocator(group.num_pages) for group in limits.groups)
        shape = (limits.max_sequences, limits.max_pages_per_sequence)
        self._tables = tuple(np.zeros(shape, np.int32) for _ in limits.groups)
        self._pages: list[tuple[list[int], ...] | None] = [None] * limits.max_sequences

    @property
    def capacity_tokens(self) -> int:
        """Longest sequence, in tokens, that an empty pool could hold."""
        return min((allocator.num_pages for allocator in self.allocators), default=0) * self.page_size

    @property
    def used_pages(self) -> int:
        """Pages in use, over all groups."""
        return sum(allocator.num_used for allocator in self.allocators)

    @property
    def total_pages(self) -> int:
        """Pages of the pools, over all groups."""
        return sum(allocator.num_pages for allocator in self.allocators)

    def pages_for(self, group: PageGroupSpec, tokens: int) -> int:
        """Pages that ``tokens`` tokens of one sequence take in a group.

        A window group keeps all its pages, too: pages that left the window are not given back yet, and this is the
        one place that would know.
        """
        del group
        return -(-tokens // self.page_size)

    def can_reserve(self, tokens: int) -> bool:
        """Whether every group has the pages for a sequence of ``tokens`` tokens now."""
        return all(
            self.pages_for(group, tokens) <= allocator.num_free
            for group, allocator in zip(self.groups, self.allocators, strict=True)
        )

    def reserve(self, slot: int, tokens: int) -> None:
        """Gives an empty slot the pages for ``tokens`` tokens in every group; all or nothing.

        Raises PageAccountingError if the slot is taken, the table too narrow or a pool too empty.
        """
        if self._pages[slot] is not None:
            raise PageAccountingError(f"slot {slot} already holds a sequence")
        if not self.can_reserve(tokens):
            raise PageAccountingError(f"no pages for {tokens} tokens; ask can_reserve first")
        counts = [self.pages_for(group, tokens) for group in self.groups]
        if any(count > table.shape[1] for count, table in zip(counts, self._tables, strict=True)):
            raise PageAccountingError(f"{tokens} tokens are more than a block table holds (the context length)")
        taken = tuple(allocator.allocate(count) for count, allocator in zip(counts, self.allocators, strict=True))
        for table, pages in zip(self._tables, taken, strict=True):
            table[slot, : len(pages)] = pages
        self._pages[slot] = taken

    def release(self, slot: int) -> None:
        """Frees all pages of a slot. Raises PageAccountingError if the slot is empty (released twice)."""
        held = self._pages[slot]
        if held is None:
            raise PageAccountingError(f"slot {slot} is released but holds no sequence")
        self._pages[slot] = None
        for allocator, pages in zip(self.allocators, held, strict=True):
            allocator.free(pages)

    def reset(self) -> None:
        """Frees everything, whoever holds it: the repair after a leak. No sequence may be running."""
        self.allocators = tuple(PageAllocator(group.num_pages) for group in self.groups)
        self._pages = [None] * len(self._pages)

    def write(self, slots: Sequence[int], width: int, out: Sequence[Int32Array]) -> None:
        """Copies the first ``width`` entries of each slot's tables to the first rows of ``out``, group by group."""
        if not slots:
            return
        index = np.asarray(slots, np.intp)
        for table, target in zip(self._tables, out, strict=True):
            target[: len(slots), :width] = table[index, :width]

    def pages_of(self, slot: int) -> tuple[list[int], ...]:
        """The pages of a slot, group by group; empty if the slot holds no sequence."""
        return self._pages[slot] or tuple([] for _ in self.groups)

    def check_integrity(self) -> None:
        """Raises PageAccountingError unless, in every group, free + held by slots = all and nothing counts twice."""
        for number, (allocator, table) in enumerate(zip(self.allocators, self._tables, strict=True)):
            held = [(slot, pages[number]) for slot, pages in enumerate(self._pages) if pages is not None]
            allocator.check_integrity(page for _, pages in held for page in pages)
            for slot, pages in held:
                if table[slot, : len(pages)].tolist() != pages:
                    raise PageAccountingError(f"the block table of slot {slot} disagrees with its pages")
