"""The prefix tree on its own: what is found, kept, split and evicted, and in which order."""

from __future__ import annotations

import hashlib

import pytest

from neoserve.cache.allocator import PageAccountingError
from neoserve.cache.block_tables import BlockTables
from neoserve.cache.keys import PrefixKey, namespace_digest, page_keys, token_bytes, token_ids
from neoserve.cache.radix import Match, RadixNode, RadixTree
from neoserve.engine.fake import fake_limits

SPACE = namespace_digest(b"model", None, None)
PAGE = 4


def run(*pages: int) -> bytes:
    """Token bytes of pages that are named by one number each."""
    return token_bytes([page * 100 + index for page in pages for index in range(PAGE)])


class Bench:
    """A tree with two KV groups that gets page numbers 0, 1, ... (group 1: 1000 more) as they are brought."""

    def __init__(self) -> None:
        self.tree = RadixTree(PAGE, 2)
        self.next_page = 0

    def bring(self, *pages: int, space: bytes = SPACE, locked: bool = False) -> RadixNode:
        """Inserts a prefix as a sequence does that found what there was and computed the rest."""
        found = self.tree.match(space, run(*pages), len(pages))
        self.tree.lock(found.node)
        count = len(pages) - found.num_pages
        fresh = list(range(self.next_page, self.next_page + count))
        self.next_page += count
        last = self.tree.extend(
            found.node, run(*pages[found.num_pages :]), (fresh, [1000 + page for page in fresh])
        ).node
        if not locked:
            self.tree.unlock(last)
        self.tree.check_integrity()
        return last

    def found(self, *pages: int, most: int = 99, space: bytes = SPACE) -> Match:
        match = self.tree.match(space, run(*pages), most)
        self.tree.lock(match.node)
        self.tree.check_integrity()
        self.tree.unlock(match.node)
        self.tree.check_integrity()
        return match


def test_the_longest_prefix_in_full_pages_is_found():
    bench = Bench()
    bench.bring(1, 2, 3)
    assert bench.found(1, 2, 3, 4).pages == ([0, 1, 2], [1000, 1001, 1002])
    assert bench.found(1, 2, 9).pages == ([0, 1], [1000, 1001])
    assert bench.found(2, 3).num_pages == 0
    assert bench.tree.match(SPACE, run(1, 2)[:-1], 99).num_pages == 1
    assert bench.found(1, 2, 3, most=2).num_pages == 2
    assert bench.found(1, 2, 3, most=0).num_pages == 0


def test_a_node_is_split_where_prefixes_part_and_locks_stay_right():
    bench = Bench()
    locked = bench.bring(1, 2, 3, 4, locked=True)
    other = bench.bring(1, 2, 7)
    assert [token_ids(node.tokens)[::PAGE] for node in bench.tree.nodes()] == [[], [100, 200], [300, 400], [700]]
    assert locked.path()[1] is other.path()[1]
    assert (bench.tree.num_pages, bench.tree.num_evictable_pages) == (5, 1)
    assert bench.tree.evict(1) == ([4], [1004])
    with pytest.raises(PageAccountingError, match=r"1 pages to evict, 0 are unlocked"):
        bench.tree.evict(1)
    bench.tree.unlock(locked)
    assert bench.tree.evict(4) == ([2, 3, 0, 1], [1002, 1003, 1000, 1001])
    bench.tree.check_integrity()
    assert list(bench.tree.nodes()) == []


def test_pages_that_come_twice_stay_the_callers():
    bench = Bench()
    bench.bring(1, 2)
    root = bench.tree.match(SPACE, b"", 0).node
    bench.tree.lock(root)
    extended = bench.tree.extend(root, run(1, 2, 3), ([10, 11, 12], [20, 21, 22]))
    assert extended.pages == ([0, 1, 12], [1000, 1001, 22])
    bench.tree.unlock(extended.node)
    assert bench.tree.num_pages == 3
    bench.tree.check_integrity()


def test_the_least_recently_used_goes_first_and_the_end_before_the_beginning():
    bench = Bench()
    bench.bring(1, 2, 3)
    bench.bring(1, 8)
    bench.bring(5)
    bench.found(1, 2)
    assert bench.tree.evict(1)[0] == [2]
    assert bench.tree.evict(1)[0] == [3]
    assert bench.tree.evict(2)[0] == [4, 1]
    assert bench.found(1, 2, 3).pages == ([0], [1000])
    assert bench.tree.evict(1)[0] == [0]
    assert bench.tree.num_pages == 0
    bench.tree.check_integrity()


def test_eviction_takes_no_more_than_asked_for():
    bench = Bench()
    bench.bring(*range(1, 11))
    assert bench.tree.evict(3)[0] == [7, 8, 9]
    bench.tree.check_integrity()
    assert bench.found(*range(1, 11)).num_pages == 7


def test_namespaces_never_meet_and_empty_ones_go_away():
    bench = Bench()
    spaces = [namespace_digest(b"model", salt, extra) for salt, extra in ((None, None), ("x", None), (None, "x"))]
    spaces.append(namespace_digest(b"other", None, None))
    assert len(set(spaces)) == 4
    for space in spaces:
        assert bench.found(1, 2, space=space).num_pages == 0
        bench.bring(1, 2, space=space)
    assert bench.tree.num_pages == 8
    assert len(bench.tree.evict(8)[1]) == 8
    assert list(bench.tree.nodes()) == []


def test_salts_cannot_be_spelled_as_something_else():
    """B21: length before every field; the adapter's name or another field can never look like a salt."""
    pairs = [(None, None), ("", None), (None, ""), ("a", "b"), ("ab", ""), ("", "ab"), ("a", None), ("\udc80", None)]
    assert len({namespace_digest(b"m", salt, extra) for salt, extra in pairs}) == len(pairs)


def test_page_keys_are_chained_from_the_namespace():
    bench = Bench()
    node = bench.bring(1, 2, 3)
    first = hashlib.sha256(SPACE + run(1)).digest()
    second = hashlib.sha256(first + run(2)).digest()
    third = hashlib.sha256(second + run(3)).digest()
    assert node.keys(PAGE) == [first, second, third] == list(page_keys(SPACE, run(1, 2, 3), PAGE))
    other = bench.bring(1, 2, 7)
    assert node.keys(PAGE) == [third]
    assert node.parent is not None
    assert node.parent.keys(PAGE) == [first, second]
    assert other.keys(PAGE) == [hashlib.sha256(second + run(7)).digest()]
    bench.tree.evict(1)
    assert other.parent is not None
    assert other.parent.keys(PAGE) == [first, second]
    bench.tree.evict(2)
    assert list(bench.tree.nodes())[-1].keys(PAGE) == [first]


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda tree, free, locked: tree.unlock(free), "is unlocked that is not locked"),
        (lambda tree, free, locked: tree.extend(free, run(3), ([9], [9])), "is extended that is not locked"),
        (lambda tree, free, locked: tree.extend(locked, run(3, 4), ([9], [9])), "8 tokens do not fill 1 pages"),
        (lambda tree, free, locked: tree.extend(locked, run(3), ([9], [])), "4 tokens do not fill 1 pages"),
        (lambda tree, free, locked: tree.lock(free, locked), "not below it"),
    ],
)
def test_wrong_use_is_refused(misuse, message):
    bench = Bench()
    free, locked = bench.bring(1), bench.bring(2, locked=True)
    with pytest.raises(PageAccountingError, match=message):
        misuse(bench.tree, free, locked)


@pytest.mark.parametrize(
    "damage",
    [
        lambda tree, node: node.pages[0].append(77),
        lambda tree, node: setattr(node, "locks", 3),
        lambda tree, node: setattr(tree, "num_pages", 7),
        lambda tree, node: tree._evictable.clear(),
        lambda tree, node: node.parent.children.clear(),
        lambda tree, node: node.parent.children.update({b"else": node}),
    ],
)
def test_the_integrity_check_sees_damage(damage):
    bench = Bench()
    node = bench.bring(1, 2)
    damage(bench.tree, node)
    with pytest.raises(PageAccountingError):
        bench.tree.check_integrity()


def test_deep_trees_need_no_stack():
    bench = Bench()
    depth = 3000
    found = bench.tree.match(SPACE, b"", 0)
    bench.tree.lock(found.node)
    node = found.node
    for page in range(depth):
        node = bench.tree.extend(node, token_bytes([page] * PAGE), ([page], [page])).node
    assert len(node.path()) == depth + 1
    assert len(node.keys(PAGE)) == 1
    bench.tree.check_integrity()
    bench.tree.unlock(node)
    bench.tree.check_integrity()
    assert bench.tree.evict(depth)[0] == list(range(depth))[::-1]
    bench.tree.check_integrity()


def test_many_uses_leave_no_trace_in_the_eviction_order():
    bench = Bench()
    bench.bring(1, 2)
    bench.bring(3)
    for _ in range(1000):
        bench.found(1, 2)
    assert len(bench.tree._evictable) < 100
    assert bench.tree.evict(1)[0] == [2]


# Slots over the tree.


def tables(**changes: int) -> BlockTables:
    return BlockTables(fake_limits(max_sequences=4, max_context=128, num_pages=8, window=8, **changes))


def key(*ids: int) -> PrefixKey:
    return PrefixKey(SPACE, token_bytes(ids))


def test_full_computed_pages_move_to_the_tree_and_are_read_from_there():
    pool = tables()
    prompt = range(40)
    assert pool.try_reserve(0, 50, key(*prompt), 39) == 0
    pool.share(0, token_bytes(prompt[:35]))
    assert pool.shared_tokens(0) == 32
    mine = pool.pages_of(0)
    assert pool.try_reserve(1, 50, key(*prompt), 39) == 32
    assert [pages[:2] for pages in pool.pages_of(1)] == [pages[:2] for pages in mine]
    assert not {pages[2] for pages in pool.pages_of(1)} & {pages[2] for pages in mine}
    pool.check_integrity()
    pool.release(0, token_bytes(range(32, 49)))
    pool.release(1)
    assert (pool.used_pages, pool.evictable_pages) == (0, 6)
    pool.check_integrity()
    pool.check_idle()
    assert pool.flush() == 6
    assert (pool.evictable_pages, pool.evicted_pages) == (0, 0)
    pool.check_integrity()


def test_a_page_that_was_computed_twice_is_freed_and_the_trees_copy_is_read():
    pool = tables()
    for slot in (0, 1):
        pool.try_reserve(slot, 40, key(*range(32)), 0)
    pool.share(0, token_bytes(range(32)))
    kept = [list(pages[:2]) for pages in pool.pages_of(0)]
    pool.share(1, token_bytes(range(32)))
    assert [list(pages[:2]) for pages in pool.pages_of(1)] == kept
    assert pool.used_pages == 2 * (2 + 1 + 1)
    pool.check_integrity()


def test_what_is_read_is_never_evicted_and_what_is_not_counts_as_room():
    def pool_with_a_cached_prefix() -> BlockTables:
        made = tables()
        made.try_reserve(0, 64, key(*range(64)), 63)
        made.release(0, token_bytes(range(64)))
        assert made.evictable_pages == 8
        return made

    assert pool_with_a_cached_prefix().try_reserve(1, 128) == 0
    assert pool_with_a_cached_prefix().try_reserve(1, 128, key(*range(64)), 63) == 48
    pool = pool_with_a_cached_prefix()
    assert pool.try_reserve(1, 80, key(*range(33)), 32) == 32
    # 2 pages of 8 are read, 3 more owned: 3 are left, 2 of them in the tree.
    assert pool.try_reserve(2, 49) is None
    assert pool.try_reserve(2, 48) == 0
    assert pool.evicted_pages == 4
    assert pool.tree.num_pages == 2
    pool.check_integrity()


def test_a_failed_reservation_leaves_nothing_locked():
    pool = tables()
    pool.try_reserve(0, 32, key(*range(32)), 31)
    pool.release(0, token_bytes(range(32)))
    pool.try_reserve(1, 80)
    assert pool.try_reserve(2, 128, key(*range(32)), 31) is None
    assert pool.evictable_pages == 4
    assert pool.evicted_pages == 0
    pool.check_integrity()


def test_own_pages_are_replaced_when_the_tree_gets_them():
    pool = tables()
    pool.try_reserve(0, 40, key(*range(40)), 39)
    pool.try_reserve(1, 50, key(*range(50)), 49)
    pool.share(0, token_bytes(range(40)))
    assert pool.adopt(1, token_bytes(range(49))) == 32
    assert [pages[:2] for pages in pool.pages_of(1)] == [pages[:2] for pages in pool.pages_of(0)]
    assert pool.adopt(1, token_bytes(range(32, 49))) == 32
    pool.check_integrity()


def test_idle_check_sees_a_slot_that_was_forgotten():
    pool = tables()
    pool.try_reserve(0, 40, key(*range(40)), 39)
    with pytest.raises(PageAccountingError, match="in use while no request runs"):
        pool.check_idle()
    pool.share(0, token_bytes(range(32)))
    with pytest.raises(PageAccountingError, match="2 of them locked"):
        pool.check_idle()
    pool.reset()
    pool.check_idle()
    pool.check_integrity()
