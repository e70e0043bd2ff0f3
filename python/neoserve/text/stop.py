"""Finds stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class StopMatcher:
    """Passes text on until a stop string is complete.

    What is held back is exactly the longest end of the text so far that could still begin a stop string. The match
    that is complete first wins, and of those that end at the same character the longest: the result does not depend
    on how the text is cut into pieces. One pass over the text, whatever the number of stops (Aho-Corasick).
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        if "" in self._stops:
            raise ValueError("a stop string must not be empty")
        # Per state: successor states by character, depth (characters matched), longest stop ending here.
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match: list[str | None] = [None]
        for stop in self._stops:
            self._add(stop)
        self._fallback = self._link()
        self._state = 0
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._matched

    def push(self, text: str, *, counts: bool = True) -> tuple[str, bool]:
        """What may be passed on now, and whether a stop string was completed (the text ends right before it).

        Without ``counts`` a stop string that this text completes is ordinary text; one that only begins in it, or
        that overlaps the ordinary one, still counts when a later text completes it.
        """
        if self._matched is not None:
            return "", True
        if not self._stops:
            return text, False
        text, scanned = self._held + text, len(self._held)
        for index in range(scanned, len(text)):
            self._state = self._step(self._state, text[index])
            stop = self._match[self._state]
            if stop is None:
                continue
            if counts:
                self._matched, self._held = stop, ""
                return text[: index + 1 - len(stop)], True
            while self._state and not self._next[self._state]:  # a whole stop string begins no longer one
                self._state = self._fallback[self._state]
        cut = len(text) - self._depth[self._state]
        self._held = text[cut:]
        return text[:cut], False

    def finish(self) -> str:
        """The text still held back, when nothing more comes."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _step(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(character, 0)

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._match.append(None)
            state = self._next[state][character]
        self._match[state] = stop

    def _link(self) -> list[int]:
        """For each state, the state of its longest proper end that also begins a stop string."""
        fallback = [0] * len(self._next)
        self._fallback = fallback
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, child in self._next[state].items():
                fallback[child] = self._step(fallback[state], character)
                if self._match[child] is None:
                    self._match[child] = self._match[fallback[child]]
                queue.append(child)
        return fallback
