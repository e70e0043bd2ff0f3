"""Finds the text of special tokens inside other text."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import Any

# Maps a character to the trie below it; the empty string marks the end of a text.
_Trie = dict[str, Any]


class SpecialText:
    """A fixed set of token texts to look for; a set of thousands is searched in one pass.

    ``pattern`` matches the longest of the texts at a place and captures it.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = frozenset(texts)
        self.pattern: re.Pattern[str] = re.compile(f"({_trie_pattern(self.texts)})")
        # Overlapping occurrences count as well, so this one only looks ahead.
        self._starts = re.compile(f"(?={self.pattern.pattern})")

    def found_in(self, text: str) -> bool:
        """Whether any of the texts occurs in ``text``."""
        return self.pattern.search(text) is not None

    def broken_by(self, text: str, mark: str) -> str:
        """``text`` with ``mark`` put behind the first character of every occurrence, so that none is left."""
        cuts = [match.start() + 1 for match in self._starts.finditer(text)]
        edges = [0, *cuts, len(text)]
        return mark.join(text[start:end] for start, end in itertools.pairwise(edges))


def _trie_pattern(texts: Iterable[str]) -> str:
    """One expression that matches the longest of ``texts`` and tries each character once."""
    root: _Trie = {}
    for text in texts:
        node = root
        for character in text:
            node = node.setdefault(character, {})
        if text:
            node[""] = {}
    return _alternatives(root) if root else "(?!)"


def _alternatives(node: _Trie) -> str:
    branches = []
    for character, child in sorted(node.items()):
        if character == "":
            continue
        branch = re.escape(character)
        while len(child) == 1 and "" not in child:
            character, child = next(iter(child.items()))
            branch += re.escape(character)
        branches.append(branch + _alternatives(child))
    if not branches:
        return ""
    group = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
    return f"(?:{group})?" if "" in node else group
