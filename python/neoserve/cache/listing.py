"""The prefix tree as a listing for people."""

from __future__ import annotations

from itertools import islice

from neoserve.cache.block_tables import BlockTables
from neoserve.cache.keys import TOKEN_BYTES, token_ids
from neoserve.cache.radix import RadixNode
from neoserve.types.cache import CachedRun, CacheListing

_DIGEST_CHARACTERS = 12


def list_cache(tables: BlockTables, max_runs: int, ids_per_run: int, enabled: bool) -> CacheListing:
    """At most ``max_runs`` nodes, each with its first ``ids_per_run`` token ids. Changes nothing."""
    tree = tables.tree
    numbers: dict[RadixNode, int] = {}
    runs: list[CachedRun] = []
    for node in islice((node for node in tree.nodes() if node.parent is not None), max_runs):
        numbers[node] = len(runs)
        assert node.parent is not None
        runs.append(
            CachedRun(
                parent=numbers.get(node.parent),
                namespace=node.namespace.hex()[:_DIGEST_CHARACTERS],
                key=node.keys(tree.page_size)[-1].hex()[:_DIGEST_CHARACTERS],
                tokens=node.num_pages * tree.page_size,
                pages=node.num_pages,
                readers=node.locks,
                last_used=node.last_used,
                token_ids=tuple(token_ids(node.tokens[: ids_per_run * TOKEN_BYTES])),
            )
        )
    return CacheListing(
        enabled=enabled,
        page_size=tree.page_size,
        used_pages=tables.used_pages,
        evictable_pages=tables.evictable_pages,
        total_pages=tables.total_pages,
        num_runs=tree.num_runs,
        runs=tuple(runs),
    )
