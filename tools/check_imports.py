"""Checks that imports go one way between the packages of neoserve, and that third-party imports are declared.

Usage: python tools/check_imports.py [ROOT]. Prints one line per offence (file:line: text); exit code 1 if any.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# What each package may import of ours besides itself and neoserve.types. An entry with a dot allows that module only.
ALLOWED: dict[str, frozenset[str]] = {
    "types": frozenset(),
    "text": frozenset(),
    "cache": frozenset(),
    "sampling": frozenset(),
    "formats": frozenset(),
    "sched": frozenset({"cache"}),
    "program": frozenset({"_native"}),
    "blocks": frozenset({"program"}),
    "models": frozenset({"blocks", "program"}),
    "engine": frozenset({"sched", "cache", "sampling", "program", "models", "formats"}),
    "api": frozenset({"text", "engine.client"}),
    # The bench drives the engine without HTTP and relates its speed to the ceilings that the native library measures.
    "bench": frozenset({"llm", "engine", "program.machine", "program.dump", "_native"}),
    "eval": frozenset({"llm"}),
    "cli": frozenset({"api", "engine", "bench", "eval", "llm"}),
}
# These join the packages into the public Python interface and may import any of them.
UNRESTRICTED = frozenset({"llm", "__init__", "__main__"})

# Modules that are installed by a declared dependency under another name, or that it re-exports.
PROVIDED_BY = {"tqdm": "huggingface_hub"}


@dataclass(frozen=True)
class Import:
    """One imported module, absolute, with the place of the statement."""

    path: Path
    line: int
    module: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


def imports_of(path: Path, package: str) -> Iterator[Import]:
    """Every module that a file imports, also inside functions and by ``import_module("constant")``.

    ``package`` is the dotted package the file lives in; it resolves relative imports.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(path, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                kept = parts[: len(parts) - node.level + 1]
                base = ".".join([*kept, base] if base else kept)
            for alias in node.names:
                yield Import(path, node.lineno, f"{base}.{alias.name}" if base.startswith("neoserve") else base)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield Import(path, node.lineno, node.args[0].value)


def check_own(found: Import, source: str) -> str | None:
    """The offence of an import of neoserve by package ``source``, or None."""
    parts = found.module.split(".")[1:]
    target = parts[0] if parts else ""
    if target in (source, "types", "__version__", "") or source in UNRESTRICTED:
        return None
    if source not in ALLOWED:
        return f"{found}: package neoserve.{source} has no entry in tools/check_imports.py; add what it may import"
    allowed = ALLOWED[source]
    if target in allowed or ".".join(parts[:2]) in allowed:
        return None
    names = ", ".join(sorted(f"neoserve.{name}" for name in allowed | {"types"}))
    return f"{found}: neoserve.{source} imports {found.module}; it may import {names}"


def normalise(name: str) -> str:
    """Spelling of a distribution or module name that compares equal for both."""
    return re.sub(r"[-_.]+", "_", name).lower()


def declared_dependencies(pyproject: Path) -> set[str]:
    """Normalised names of the base dependencies."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    return {normalise(re.split(r"[^A-Za-z0-9_.-]", entry, maxsplit=1)[0]) for entry in project["dependencies"]}


def check_tree(root: Path) -> list[str]:
    """All offences under ``root`` (which holds pyproject.toml and python/neoserve)."""
    package_root = root / "python" / "neoserve"
    files = sorted(package_root.rglob("*.py"))
    if not files:
        return [f"{package_root}: no Python files found; run this from a checkout"]
    declared = declared_dependencies(root / "pyproject.toml")
    offences: list[str] = []
    used: set[str] = set()
    for path in files:
        relative = path.relative_to(package_root)
        source = relative.parts[0] if len(relative.parts) > 1 else relative.stem
        package = ".".join(("neoserve", *relative.parts[:-1]))
        for found in imports_of(path, package):
            top = found.module.split(".")[0]
            if top == "neoserve":
                offence = check_own(found, source)
                if offence:
                    offences.append(offence)
            elif top not in sys.stdlib_module_names:
                provider = normalise(PROVIDED_BY.get(top, top))
                used.add(provider)
                if provider not in declared:
                    offences.append(f"{found}: imports {top}, which is not among the dependencies of pyproject.toml")
    offences += [f"pyproject.toml: dependency {name} is imported nowhere" for name in sorted(declared - used)]
    return sorted(set(offences))


def main() -> int:
    """Command-line entry; returns the exit code."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1]
    offences = check_tree(root)
    print("\n".join(offences) if offences else "imports: all go one way")
    return 1 if offences else 0


if __name__ == "__main__":
    sys.exit(main())
