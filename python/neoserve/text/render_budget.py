"""Bounds on what rendering one chat template may cost.

Templates come with models, so they are untrusted programs. The sandbox keeps them from the interpreter's insides;
the budget keeps them from eating the machine: it counts operations, processor time and characters, and it weighs
every string and container before and after each step that could blow it up.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain, islice
from string import Formatter

# Widths, precisions and counts above this have no place in a prompt.
_LARGEST_COUNT = 100_000
_LARGEST_POWER_BITS = 4096
_OPERATIONS_PER_CLOCK = 16
_ELEMENTS_PER_OPERATION = 16


class BudgetError(Exception):
    """The template asked for more than the limits allow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderLimits:
    """``operations``: loop turns, calls and filters. ``characters``: size of the largest value, the output included.

    ``total_characters``: all text made on the way. ``seconds`` of processor time, and four times as many by the clock.
    """

    operations: int = 1_000_000
    characters: int = 32 * 1024 * 1024
    total_characters: int = 128 * 1024 * 1024
    seconds: float = 5.0


class Budget:
    """What is left for one rendering. The objects of ``inputs`` are weighed once, so that passing them on is free."""

    def __init__(self, limits: RenderLimits, inputs: object = None) -> None:
        self.limits = limits
        self._operations = 0
        self._made = 0
        self._deadline = time.thread_time() + limits.seconds
        self._clock_deadline = time.monotonic() + 4 * limits.seconds
        # By id; the object is kept so that its id stays its own.
        self._weights: dict[int, tuple[object, int]] = {}
        self.weigh(inputs)

    def spend(self, operations: int = 1) -> None:
        """Count operations; every few of them look at the clock."""
        before = self._operations // _OPERATIONS_PER_CLOCK
        self._operations += operations
        if self._operations > self.limits.operations:
            raise BudgetError(f"it took more than {self.limits.operations} operations")
        if self._operations // _OPERATIONS_PER_CLOCK == before:
            return
        if time.thread_time() > self._deadline or time.monotonic() > self._clock_deadline:
            raise BudgetError(f"it took more than {self.limits.seconds:g} s of processor time")

    def make(self, characters: int) -> None:
        """Count characters of a new string, before or after it is made."""
        self.fit(characters)
        self._made += characters
        if self._made > self.limits.total_characters:
            raise BudgetError(f"it made more than {self.limits.total_characters} characters of text")

    def fit(self, size: int) -> None:
        """Refuse a value of ``size`` characters or elements."""
        if size > self.limits.characters:
            raise BudgetError(f"a value has more than {self.limits.characters} characters")

    def weigh(self, value: object) -> int:
        """Characters and elements in ``value`` when written out, shared parts counted each time."""
        if isinstance(value, str):
            return len(value) + 1
        if not isinstance(value, (list, tuple, Mapping)):
            return 1
        known = self._weights.get(id(value))
        if known is not None:
            return known[1]
        self.spend(len(value) // _ELEMENTS_PER_OPERATION)
        parts = chain.from_iterable(value.items()) if isinstance(value, Mapping) else value
        total = 1 + sum(map(self.weigh, parts))
        self.fit(total)
        self._weights[id(value)] = (value, total)
        return total

    def check(self, value: object) -> None:
        """Account for a value that a step has made."""
        if isinstance(value, str):
            self.make(len(value))
        elif isinstance(value, (list, tuple, Mapping)):
            self.make(len(value))
            self.weigh(value)


_CURRENT: ContextVar[Budget | None] = ContextVar("neoserve_render_budget", default=None)
# Outside a rendering (constants folded while a template is compiled) each step stands alone.
_ONE_STEP = RenderLimits(operations=1_000_000, characters=1_000_000, total_characters=1_000_000)


def current() -> Budget:
    """The budget of the rendering under way in this thread."""
    return _CURRENT.get() or Budget(_ONE_STEP)


class Spending:
    """Context manager: the body spends ``budget``."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    def __enter__(self) -> None:
        self._token = _CURRENT.set(self._budget)

    def __exit__(self, *_: object) -> None:
        _CURRENT.reset(self._token)


class CountedLoop:
    """An iterable that spends one operation per turn; as long as what it wraps."""

    def __init__(self, iterable: object) -> None:
        self._iterable = iterable

    def __iter__(self) -> Iterator[object]:
        budget = current()
        for item in self._iterable:  # type: ignore[attr-defined]  # a TypeError here is the template's
            budget.spend()
            yield item

    def __len__(self) -> int:
        return len(self._iterable)  # type: ignore[arg-type]


def check_counts(arguments: Sequence[object], keywords: Mapping[str, object]) -> None:
    """Refuse absurd widths and counts among the arguments of a step."""
    for value in (*arguments, *keywords.values()):
        if isinstance(value, (int, float)) and abs(value) > _LARGEST_COUNT:
            raise BudgetError(f"a width or count is {value}; at most {_LARGEST_COUNT} is allowed")


def check_operator(operator: str, left: object, right: object) -> None:
    """Refuse ``left operator right`` when the result would be too large."""
    budget = current()
    if operator == "*":
        for repeated, times in ((left, right), (right, left)):
            if isinstance(repeated, (str, list, tuple)) and isinstance(times, int):
                budget.fit(budget.weigh(repeated) * max(times, 0))
    if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        if bits > _LARGEST_POWER_BITS:
            raise BudgetError("a number has more than 1000 digits")
    if operator == "+" and isinstance(left, (str, list, tuple)):
        budget.fit(budget.weigh(left) + budget.weigh(right))
    if operator == "%" and isinstance(left, str):
        check_percent_format(left, right)


def check_percent_format(text: str, values: object) -> None:
    """Refuse ``text % values`` with absurd widths or a result that would be too large."""
    if re.search(r"%(?:\([^)]*\))?[-+ #0-9.]*(?:\*|\d{5})", text):
        raise BudgetError("a width in a format is too large or not fixed")
    budget = current()
    budget.make(len(text) + (text.count("%") or 1) * budget.weigh(values))


def check_brace_format(text: str, arguments: Sequence[object], keywords: Mapping[str, object]) -> None:
    """The same for ``text.format(...)``."""
    fields = 0
    for _, field, spec, _ in Formatter().parse(text):
        fields += field is not None
        if spec and ("{" in spec or re.search(r"\d{5}", spec)):
            raise BudgetError("a width in a format is too large or not fixed")
    budget = current()
    budget.make(len(text) + fields * (budget.weigh(list(arguments)) + budget.weigh(dict(keywords))))


def check_replace(text: object, old: object, new: object) -> None:
    """Refuse a replacement whose result would be too large."""
    if isinstance(text, str) and isinstance(old, str) and isinstance(new, str):
        current().make(len(text) + text.count(old) * len(new))


def bounded_list(iterable: object) -> list[object]:
    """``list(iterable)``, refused beyond the limit."""
    budget = current()
    items = list(islice(iterable, budget.limits.characters + 1))  # type: ignore[call-overload]
    budget.check(items)
    return items
