"""Which kernel rows this build has and this CPU can run; how rows are compared."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from neoserve import _native

REFERENCE = "reference"
# bf16 dot-product instructions round inside; docs/ops.md exempts them, and nothing else, from equal bits.
RELAXED_FOLDERS = frozenset({"bf16", "avx512_bf16"})


@dataclass(frozen=True)
class Row:
    """A kernel row as the registry lists it; ``missing`` names CPU features it lacks ("" when it can run)."""

    op: str
    name: str
    folder: str
    missing: str

    @property
    def relaxed(self) -> bool:
        return self.folder in RELAXED_FOLDERS


def _missing(reason: str) -> str:
    marker = "the CPU lacks "
    return reason[len(marker) :] if reason.startswith(marker) else ""


ALL_ROWS = [Row(op, name, folder, _missing(reason)) for op, name, folder, _, reason in _native.rows()]
USABLE_ROWS = [row for row in ALL_ROWS if not row.missing]
USABLE_FOLDERS = [
    folder for folder in _native.folders() if not any(row.missing for row in ALL_ROWS if row.folder == folder)
]


def candidates(*ops: str) -> list[str]:
    """Names of the runnable rows of ``ops`` other than the reference: what is held against it."""
    return [row.name for row in USABLE_ROWS if row.op in ops and row.folder != REFERENCE]


def row_named(name: str) -> Row:
    return next(row for row in ALL_ROWS if row.name == name)


def assert_same_bits(found: npt.NDArray[np.generic], wanted: npt.NDArray[np.generic], what: str) -> None:
    """Equal as bits: signed zeros and NaN payloads count. Names the first element that differs."""
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    bits = np.dtype(f"u{found.dtype.itemsize}")
    differing = np.argwhere(np.ascontiguousarray(found).view(bits) != np.ascontiguousarray(wanted).view(bits))
    if len(differing):
        at = tuple(differing[0])
        raise AssertionError(
            f"{what}: {len(differing)} of {found.size} differ, first at {at}: {found[at]!r}, not {wanted[at]!r}"
        )
