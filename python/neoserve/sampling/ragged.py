"""Lists of different length per row, in one flat array that is reused."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_FIRST_CAPACITY = 256


class RaggedRows:
    """Rows of (token id, value): row r is [start[r], start[r + 1]) of ``tokens`` and of ``values``.

    ``value_type`` None: no values. The flat arrays grow by doubling and never shrink.
    """

    def __init__(self, max_rows: int, value_type: type[np.generic] | None) -> None:
        self._start = np.zeros(max_rows + 1, np.int32)
        self._tokens = np.zeros(_FIRST_CAPACITY, np.int32)
        self._values = np.zeros(0 if value_type is None else _FIRST_CAPACITY, value_type or np.int32)
        self._has_values = value_type is not None
        self._rows = 0
        self._used = 0

    def clear(self) -> None:
        """Forgets all rows."""
        self._rows = self._used = 0

    def append_row(self, tokens: npt.NDArray[np.int32], values: npt.NDArray[Any] | None) -> None:
        """Adds a row with these entries."""
        end = self._used + len(tokens)
        if end > len(self._tokens):
            self._grow(end)
        self._tokens[self._used : end] = tokens
        if self._has_values:
            self._values[self._used : end] = values
        self._used = end
        self.end_row()

    def end_row(self) -> None:
        """Ends a row without adding entries (an empty one)."""
        self._rows += 1
        self._start[self._rows] = self._used

    def views(self, rows: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[Any]]:
        """(start [rows + 1], tokens, values) of the rows added since clear()."""
        if rows != self._rows:
            raise ValueError(f"{rows} rows asked for, {self._rows} were added")
        return self._start[: rows + 1], self._tokens[: self._used], self._values[: self._used]

    def _grow(self, needed: int) -> None:
        capacity = max(needed, 2 * len(self._tokens))
        self._tokens = np.concatenate([self._tokens[: self._used], np.zeros(capacity - self._used, np.int32)])
        if self._has_values:
            tail = np.zeros(capacity - self._used, self._values.dtype)
            self._values = np.concatenate([self._values[: self._used], tail])
