"""The prefix tree: which pages hold the KV of which token prefixes (design D3; the idea is SGLang's RadixAttention).

Page numbers only, as everywhere in this package. The tree owns the pages that it holds; a sequence that reads them
locks the node where its part of the tree ends. Nothing here recurses: a long conversation makes a deep tree.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from neoserve.cache.allocator import PageAccountingError
from neoserve.cache.keys import TOKEN_BYTES, page_keys

Pages = tuple[list[int], ...]
"""One list of page numbers per KV group, all of the same length: entry i of each holds the same tokens."""


class RadixNode:
    """A run of full pages after those of ``parent``. A root holds none and stands for a namespace.

    ``locks`` counts the sequences whose pages end in this node or below it. ``last_used`` is a count of the tree's
    locks and unlocks, no time. A node keeps its end when it is split, so that whoever locked it need not know.
    """

    __slots__ = ("_keys", "children", "last_used", "locks", "namespace", "pages", "parent", "serial", "tokens")

    def __init__(self, namespace: bytes, parent: RadixNode | None, tokens: bytes, pages: Pages, serial: int) -> None:
        self.namespace = namespace
        self.parent = parent
        self.tokens = tokens
        self.pages = pages
        self.serial = serial
        self.children: dict[bytes, RadixNode] = {}
        self.locks = 0
        self.last_used = 0
        self._keys: list[bytes] | None = None

    @property
    def num_pages(self) -> int:
        """Pages of one KV group."""
        return len(self.pages[0])

    def path(self) -> list[RadixNode]:
        """The nodes from the root to this one, both included."""
        nodes = [self]
        while (parent := nodes[-1].parent) is not None:
            nodes.append(parent)
        return nodes[::-1]

    def keys(self, page_size: int) -> list[bytes]:
        """The keys of the node's pages; computed when first asked for, and kept."""
        key = self.namespace
        for node in self.path()[1:]:
            if node._keys is None:
                node._keys = list(page_keys(key, node.tokens, page_size))
            key = node._keys[-1]
        return self._keys or []


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix that was found: its pages, and the node where they end."""

    node: RadixNode
    pages: Pages

    @property
    def num_pages(self) -> int:
        """Pages of one KV group."""
        return len(self.pages[0])


class RadixTree:
    """Cached prefixes of all namespaces, at the granularity of ``page_size`` tokens.

    Counts are of pages of one KV group: every cached page position holds one page in each of ``num_groups``.
    ``page_bytes`` are the token bytes of a page. Work is proportional to the tokens looked at. Everything is
    deterministic: what is used least recently by the count of locks and unlocks is evicted first, the end of a prefix
    before its beginning.
    """

    def __init__(self, page_size: int, num_groups: int) -> None:
        self.page_size = page_size
        self.num_groups = num_groups
        self.num_pages = 0
        self.num_locked_pages = 0
        self.page_bytes = page_size * TOKEN_BYTES
        self._roots: dict[bytes, RadixNode] = {}
        self._uses = 0
        self._serials = 0
        self._num_nodes = 0
        # (last use, serial, node) of what may be evicted; an entry whose node has changed since is skipped.
        self._evictable: list[tuple[int, int, RadixNode]] = []

    @property
    def num_evictable_pages(self) -> int:
        """Cached pages that no sequence reads."""
        return self.num_pages - self.num_locked_pages

    @property
    def num_runs(self) -> int:
        """Nodes that hold pages."""
        return self._num_nodes - len(self._roots)

    def match(self, namespace: bytes, tokens: bytes, max_pages: int) -> Match:
        """The longest cached prefix of ``tokens`` in a namespace, at most ``max_pages`` long.

        Lock its node before anything else is asked of the tree: until then nothing holds the pages (B17).
        """
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = self._node(namespace, None, b"", self._no_pages())
        return self.match_below(root, tokens[: max_pages * self.page_bytes])

    def match_below(self, node: RadixNode, tokens: bytes) -> Match:
        """How far ``tokens``, which follow the end of ``node``, are cached in full pages."""
        pages = self._no_pages()
        offset, width = 0, self.page_bytes
        while offset + width <= len(tokens):
            child = node.children.get(tokens[offset : offset + width])
            if child is None:
                break
            shared = self._common_pages(child.tokens, tokens, offset)
            if shared < child.num_pages:
                child = self._split(child, shared)
            for mine, found in zip(pages, child.pages, strict=True):
                mine.extend(found)
            offset += shared * width
            node = child
        return Match(node, pages)

    def lock(self, node: RadixNode, held: RadixNode | None = None) -> None:
        """Keeps a node and all above it from eviction. ``held``, an ancestor that the caller has locked already, is
        handed over: one unlock of ``node`` ends both."""
        self._uses += 1
        current: RadixNode | None = node
        while current is not held:
            if current is None:
                raise PageAccountingError("a lock is handed over to a node that is not below it")
            if current.locks == 0:
                self.num_locked_pages += current.num_pages
            current.locks += 1
            current.last_used = self._uses
            current = current.parent

    def unlock(self, node: RadixNode) -> None:
        """Ends one lock. Raises PageAccountingError if the node is not locked."""
        if node.locks < 1:
            raise PageAccountingError("a prefix is unlocked that is not locked")
        self._uses += 1
        current: RadixNode | None = node
        while current is not None:
            current.locks -= 1
            current.last_used = self._uses
            if current.locks == 0:
                self.num_locked_pages -= current.num_pages
            current = current.parent
        self._note_if_evictable(node)

    def extend(self, node: RadixNode, tokens: bytes, pages: Pages) -> Match:
        """Takes computed pages that follow the end of ``node``, which the caller has locked; the lock moves along.

        Returns the tree's pages for these tokens: where another sequence has brought the same tokens before, they are
        other pages than the caller's, and the caller's stay its own (to be freed).
        """
        if len(tokens) != len(pages[0]) * self.page_bytes or len({len(group) for group in pages}) != 1:
            raise PageAccountingError(f"{len(tokens) // TOKEN_BYTES} tokens do not fill {len(pages[0])} pages")
        if node.locks < 1:
            raise PageAccountingError("a prefix is extended that is not locked")
        found = self.match_below(node, tokens)
        last = found.node
        rest = tuple(group[found.num_pages :] for group in pages)
        if rest[0]:
            rest_tokens = tokens[found.num_pages * self.page_bytes :]
            last = self._node(node.namespace, found.node, rest_tokens, rest)
            found.node.children[rest_tokens[: self.page_bytes]] = last
            self.num_pages += len(rest[0])
        self.lock(last, node)
        return Match(last, tuple([*old, *new] for old, new in zip(found.pages, rest, strict=True)))

    def evict(self, count: int) -> Pages:
        """Drops the ``count`` unlocked pages that were used least recently and returns them; the tree forgets them.

        Raises PageAccountingError, and drops none, if fewer are unlocked.
        """
        if count > self.num_evictable_pages:
            raise PageAccountingError(f"{count} pages to evict, {self.num_evictable_pages} are unlocked")
        evicted = self._no_pages()
        while count:
            last_used, _, node = heapq.heappop(self._evictable)
            if not self._is_evictable(node) or node.last_used != last_used:
                continue
            dropped = min(count, node.num_pages)
            count -= dropped
            for target, group in zip(evicted, self._drop_end(node, dropped), strict=True):
                target.extend(group)
        return evicted

    def nodes(self) -> Iterator[RadixNode]:
        """All nodes, parents first, in the order in which they were made."""
        waiting = list(self._roots.values())[::-1]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(list(node.children.values())[::-1])

    def check_integrity(self) -> None:
        """Raises PageAccountingError unless links, keys, counts and the eviction order agree."""
        waiting = {id(node) for last_used, _, node in self._evictable if last_used == node.last_used}
        pages = locked = nodes = 0
        for node in self.nodes():
            nodes += 1
            pages += node.num_pages
            locked += node.num_pages if node.locks else 0
            self._check_node(node)
            if self._is_evictable(node) and id(node) not in waiting:
                raise PageAccountingError("an unlocked leaf of the prefix tree would never be evicted")
        if (pages, locked, nodes) != (self.num_pages, self.num_locked_pages, self._num_nodes):
            raise PageAccountingError(
                f"the prefix tree counts {self.num_pages} pages, {self.num_locked_pages} locked, in {self._num_nodes} "
                f"nodes; there are {pages}, {locked} and {nodes}"
            )

    def _check_node(self, node: RadixNode) -> None:
        if node.parent is None:
            if self._roots.get(node.namespace) is not node or node.tokens or not (node.children or node.locks):
                raise PageAccountingError("a namespace of the prefix tree is empty, or its root is not")
        elif not node.tokens or node.parent.children.get(node.tokens[: self.page_bytes]) is not node:
            raise PageAccountingError("a node of the prefix tree is not where its tokens are looked up")
        if {len(group) * self.page_bytes for group in node.pages} != {len(node.tokens)}:
            raise PageAccountingError("a node of the prefix tree has other pages than tokens")
        if node.locks < sum(child.locks for child in node.children.values()):
            raise PageAccountingError("a node of the prefix tree is locked less often than those below it")

    def _node(self, namespace: bytes, parent: RadixNode | None, tokens: bytes, pages: Pages) -> RadixNode:
        self._serials += 1
        self._num_nodes += 1
        return RadixNode(namespace, parent, tokens, pages, self._serials)

    def _no_pages(self) -> Pages:
        return tuple([] for _ in range(self.num_groups))

    def _common_pages(self, run: bytes, tokens: bytes, offset: int) -> int:
        """Full pages of ``run`` that equal ``tokens`` from ``offset`` on; the first is known to be equal."""
        width = self.page_bytes
        length = min(len(run), (len(tokens) - offset) // width * width)
        if run[:length] == tokens[offset : offset + length]:
            return length // width
        shared = width
        while run[shared : shared + width] == tokens[offset + shared : offset + shared + width]:
            shared += width
        return shared // width

    def _split(self, node: RadixNode, count: int) -> RadixNode:
        """Puts the first ``count`` pages of a node into a new one above it, and returns that."""
        assert node.parent is not None
        cut = count * self.page_bytes
        upper = self._node(node.namespace, node.parent, node.tokens[:cut], tuple(group[:count] for group in node.pages))
        upper.locks, upper.last_used = node.locks, node.last_used
        upper.children[node.tokens[cut : cut + self.page_bytes]] = node
        node.parent.children[node.tokens[: self.page_bytes]] = upper
        node.parent = upper
        node.tokens, node.pages = node.tokens[cut:], tuple(group[count:] for group in node.pages)
        if node._keys is not None:
            upper._keys, node._keys = node._keys[:count], node._keys[count:]
        return upper

    def _is_evictable(self, node: RadixNode) -> bool:
        """Whether nothing needs the end of the node: it is unlocked, has nothing below it, and was not dropped."""
        return not node.locks and not node.children and node.parent is not None and bool(node.tokens)

    def _note_if_evictable(self, node: RadixNode) -> None:
        if node.parent is None and not node.locks and not node.children:
            # Salts come from requests: a namespace that holds nothing must not stay for ever.
            del self._roots[node.namespace]
            self._num_nodes -= 1
        if not self._is_evictable(node):
            return
        heapq.heappush(self._evictable, (node.last_used, node.serial, node))
        if len(self._evictable) > 2 * self._num_nodes + 64:
            live = [entry for entry in self._evictable if self._is_evictable(entry[2])]
            self._evictable = [entry for entry in live if entry[0] == entry[2].last_used]
            heapq.heapify(self._evictable)

    def _drop_end(self, node: RadixNode, count: int) -> Pages:
        """Takes the last ``count`` pages from an evictable node, and the node with them if none is left."""
        kept = node.num_pages - count
        dropped = tuple(group[kept:] for group in node.pages)
        self.num_pages -= count
        first = node.tokens[: self.page_bytes]
        node.tokens, node.pages = node.tokens[: kept * self.page_bytes], tuple(group[:kept] for group in node.pages)
        node._keys = None if node._keys is None else node._keys[:kept]
        if kept:
            self._note_if_evictable(node)
            return dropped
        parent = node.parent
        assert parent is not None
        del parent.children[first]
        node.parent = None
        self._num_nodes -= 1
        self._note_if_evictable(parent)
        return dropped
