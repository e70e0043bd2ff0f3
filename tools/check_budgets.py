"""Checks size budgets: lines per file and function, size of a wheel, size of an environment.

Usage: python tools/check_budgets.py lines [ROOT]
       python tools/check_budgets.py wheel FILE.whl...
       python tools/check_budgets.py environment FOLDER
Prints one line per offence and a summary; exit code 1 if any budget is exceeded.
"""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path

FILE_LINES = 400
FUNCTION_LINES = 60
# A kernel file holds all entries of one row family and a test file all cases of one subject: splitting those to meet
# the ordinary bound would scatter what is read together.
KERNEL_FILE_LINES = 800
TEST_FILE_LINES = 800
WHEEL_BYTES = 10_000_000
ENVIRONMENT_BYTES = 200_000_000

SOURCE_SUFFIXES = frozenset({".py", ".cpp", ".h"})
FOLDERS = ("python", "native", "tests", "tools", "bench")


def file_budget(path: Path) -> int:
    """Allowed lines of a file, given by its path relative to the root."""
    if path.parts[0] == "tests":
        return TEST_FILE_LINES
    return KERNEL_FILE_LINES if path.parts[:2] == ("native", "kernels") else FILE_LINES


def long_functions(path: Path, shown: Path) -> list[str]:
    """Offences of Python functions over the budget, counted from ``def`` to the last line, docstring excluded."""
    offences = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno is not None:
            lines = node.end_lineno - node.lineno + 1
            first = node.body[0]
            if ast.get_docstring(node) is not None and first.end_lineno is not None:
                lines -= first.end_lineno - first.lineno + 1
            if lines > FUNCTION_LINES:
                offences.append(f"{shown}:{node.lineno}: {node.name} has {lines} lines; the budget is {FUNCTION_LINES}")
    return offences


def check_lines(root: Path) -> tuple[list[str], int]:
    """Offences of all source files under ``root``, and the total of lines outside the tests."""
    offences: list[str] = []
    total = 0
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix not in SOURCE_SUFFIXES or not path.is_file():
                continue
            shown = path.relative_to(root)
            lines = len(path.read_text(encoding="utf-8").splitlines())
            budget = file_budget(shown)
            if lines > budget:
                offences.append(f"{shown}: {lines} lines; the budget is {budget}")
            if folder != "tests":
                total += lines
                if path.suffix == ".py":
                    offences += long_functions(path, shown)
    return offences, total


def tree_bytes(folder: Path) -> int:
    """Bytes of disk that a folder takes (blocks in use, hard links counted once, symbolic links not followed)."""
    seen: set[tuple[int, int]] = set()
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            status = os.lstat(os.path.join(parent, name))
            if (status.st_dev, status.st_ino) not in seen:
                seen.add((status.st_dev, status.st_ino))
                total += status.st_blocks * 512
    return total


def check_bytes(path: Path, size: int, budget: int) -> list[str]:
    """The offence, if any, of ``path`` having ``size`` bytes."""
    if size <= budget:
        return []
    return [f"{path}: {size / 1e6:.1f} MB; the budget is {budget / 1e6:.0f} MB"]


def run(kind: str, paths: list[Path]) -> list[str]:
    """Offences of one kind of check; prints what was measured."""
    if kind == "lines":
        offences, total = check_lines(paths[0] if paths else Path(__file__).resolve().parents[1])
        print(f"lines: {total} outside the tests")
        return offences
    if kind not in ("wheel", "environment") or not paths:
        return [__doc__ or ""]
    offences = []
    for path in paths:
        if not path.exists():
            offences.append(f"{path}: not found")
            continue
        size = path.stat().st_size if kind == "wheel" else tree_bytes(path)
        print(f"{kind}: {path.name} takes {size / 1e6:.1f} MB")
        offences += check_bytes(path, size, WHEEL_BYTES if kind == "wheel" else ENVIRONMENT_BYTES)
    return offences


def main() -> int:
    """Command-line entry; returns the exit code."""
    offences = run(sys.argv[1] if len(sys.argv) > 1 else "", [Path(argument) for argument in sys.argv[2:]])
    if offences:
        print("\n".join(offences))
    return 1 if offences else 0


if __name__ == "__main__":
    sys.exit(main())
