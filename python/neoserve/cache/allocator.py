"""Which pages of one KV group are in use. Page numbers only: the bytes belong to the executor."""

from __future__ import annotations

from collections.abc import Iterable


class PageAccountingError(RuntimeError):
    """The page accounting was used wrongly or does not add up: a fault of the engine, never of a request."""


class PageAllocator:
    """Hands out the pages [0, num_pages) of one KV group; every page is either free or has one owner.

    The order is deterministic: at first pages come in ascending order, later the page freed last comes first (its
    lines are the most likely to be cached).
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 0:
            raise PageAccountingError(f"num_pages is {num_pages}; it cannot be negative")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._in_use = bytearray(num_pages)

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages that have an owner."""
        return self.num_pages - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Takes exactly ``count`` pages, or raises PageAccountingError and takes none.

        Callers ask ``num_free`` first: running out is a decision of admission, not an event to handle here.
        """
        if not 0 <= count <= len(self._free):
            raise PageAccountingError(f"{count} pages asked for, {len(self._free)} of {self.num_pages} are free")
        if count == 0:
            return []
        pages = self._free[-count:]
        pages.reverse()
        del self._free[-count:]
        for page in pages:
            self._in_use[page] = 1
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Gives pages back. A page that is not in use (freed twice, never allocated) raises PageAccountingError."""
        returned = list(pages)
        for count, page in enumerate(returned):
            if not 0 <= page < self.num_pages or not self._in_use[page]:
                # All or nothing: the pages cleared before the bad one get their owner back.
                for undone in returned[:count]:
                    self._in_use[undone] = 1
                raise PageAccountingError(f"page {page} is freed but not in use (pool of {self.num_pages})")
            self._in_use[page] = 0
        self._free.extend(reversed(returned))

    def is_used(self, page: int) -> bool:
        """Whether the page has an owner."""
        return bool(self._in_use[page])

    def check_integrity(self, owned: Iterable[int]) -> None:
        """Raises PageAccountingError unless free + owned = all pages and no page is counted twice.

        ``owned`` are the pages that the callers hold; it is what makes a leak visible.
        """
        holders = list(owned)
        seen = set(holders)
        if len(seen) != len(holders):
            raise PageAccountingError("a page has two owners")
        free = set(self._free)
        if len(free) != len(self._free):
            raise PageAccountingError("a page is free twice")
        if seen & free:
            raise PageAccountingError(f"pages {sorted(seen & free)[:8]} are free and owned")
        missing = self.num_pages - len(seen) - len(free)
        if missing or not seen | free <= set(range(self.num_pages)):
            raise PageAccountingError(f"{missing} pages of {self.num_pages} are neither free nor owned (leaked)")
        wrong = [page for page in range(self.num_pages) if bool(self._in_use[page]) != (page in seen)]
        if wrong:
            raise PageAccountingError(f"the in-use marks of pages {wrong[:8]} disagree with their owners")
