"""Page accounting: exact, all or nothing, and loud about every misuse (B17, B18)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neoserve.cache.allocator import PageAccountingError, PageAllocator
from neoserve.cache.block_tables import BlockTables
from neoserve.engine.fake import fake_limits


def test_pages_come_in_order_then_last_freed_first():
    pool = PageAllocator(6)
    first = pool.allocate(2)
    second = pool.allocate(2)
    assert (first, second) == ([0, 1], [2, 3])
    pool.free(first)
    assert pool.allocate(3) == [0, 1, 4]
    assert pool.num_free == 1


def test_allocation_is_all_or_nothing():
    pool = PageAllocator(3)
    pool.allocate(1)
    with pytest.raises(PageAccountingError, match=r"3 pages asked for, 2 of 3 are free"):
        pool.allocate(3)
    assert pool.num_free == 2
    pool.check_integrity([0])


@pytest.mark.parametrize("pages", [[0, 0], [0, 7], [0, -1], [0, 2], [2]])
def test_freeing_a_page_that_is_not_in_use_is_refused_and_changes_nothing(pages):
    pool = PageAllocator(4)
    pool.allocate(2)
    with pytest.raises(PageAccountingError, match="freed but not in use"):
        pool.free(pages)
    pool.check_integrity([0, 1])
    assert [pool.is_used(page) for page in range(4)] == [True, True, False, False]


@pytest.mark.parametrize(
    ("owned", "message"),
    [([0], "neither free nor owned"), ([0, 1, 2], "free and owned"), ([0, 1, 1], "two owners")],
)
def test_integrity_check_sees_leaks_and_double_owners(owned, message):
    pool = PageAllocator(4)
    pool.allocate(2)
    with pytest.raises(PageAccountingError, match=message):
        pool.check_integrity(owned)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60),
)
def test_allocator_against_a_set_model(num_pages, operations):
    """Whatever the order of operations, pages are unique and free + used = all."""
    pool = PageAllocator(num_pages)
    held: list[list[int]] = []
    for take, number in operations:
        if take and number <= pool.num_free:
            held.append(pool.allocate(number))
        elif held:
            pool.free(held.pop(number % len(held)))
        owned = [page for pages in held for page in pages]
        assert pool.num_used == len(owned)
        pool.check_integrity(owned)
    for pages in held:
        pool.free(pages)
    assert pool.num_free == num_pages


def _tables(**changes: int) -> BlockTables:
    return BlockTables(fake_limits(max_sequences=4, max_context=64, num_pages=8, window=8, **changes))


def test_reserve_takes_the_rounded_up_pages_in_every_group():
    tables = _tables()
    assert tables.try_reserve(2, 17) == 0
    assert [len(pages) for pages in tables.pages_of(2)] == [2, 2]
    assert (tables.used_pages, tables.total_pages, tables.capacity_tokens) == (4, 16, 128)
    tables.check_integrity()
    tables.release(2)
    assert tables.used_pages == 0


def test_reserve_refuses_taken_slots_full_pools_and_sequences_beyond_the_table():
    tables = _tables()
    assert tables.try_reserve(0, 64) == 0
    with pytest.raises(PageAccountingError, match="slot 0 already holds"):
        tables.try_reserve(0, 1)
    with pytest.raises(PageAccountingError, match="more than a block table holds"):
        _tables().try_reserve(1, 65)
    assert tables.try_reserve(1, 64) == 0
    assert tables.try_reserve(2, 1) is None
    tables.check_integrity()


def test_releasing_twice_is_refused():
    tables = _tables()
    assert tables.try_reserve(0, 5) == 0
    tables.release(0)
    with pytest.raises(PageAccountingError, match="slot 0 is released but holds no sequence"):
        tables.release(0)


def test_write_copies_only_the_width_asked_for():
    tables = _tables()
    assert tables.try_reserve(1, 33) == 0
    assert tables.try_reserve(3, 1) == 0
    out = [np.full((4, 4), -7, np.int32) for _ in tables.groups]
    tables.write([3, 1], 3, out)
    for group, target in enumerate(out):
        assert target[0, 0] == tables.pages_of(3)[group][0]
        assert target[1, :3].tolist() == tables.pages_of(1)[group]
        assert (target[:, 3] == -7).all()
        assert (target[2:] == -7).all()


def test_reset_makes_every_page_free_again():
    tables = _tables()
    assert tables.try_reserve(0, 40) == 0
    tables.reset()
    assert tables.used_pages == 0
    assert tables.try_reserve(0, 64) == 0
    tables.check_integrity()
