"""The repository's own checkers: each accepts what is right and is shown to fail on what is wrong."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def load(name: str) -> ModuleType:
    sys.path.insert(0, str(TOOLS))
    try:
        return __import__(name)
    finally:
        sys.path.remove(str(TOOLS))


check_imports = load("check_imports")
check_budgets = load("check_budgets")
check_native = load("check_native")


def make_tree(root: Path, files: dict[str, str], dependencies: str = "") -> Path:
    (root / "pyproject.toml").write_text(f'[project]\nname = "neoserve"\ndependencies = [{dependencies}]\n')
    for name, text in files.items():
        path = root / "python" / "neoserve" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


class TestImports:
    @pytest.mark.parametrize(
        ("file", "text"),
        [
            ("sched/a.py", "from neoserve.cache.pages import Pages\nfrom neoserve.types import step\n"),
            ("api/a.py", "from neoserve.engine.client import Client\nimport neoserve.text.chat\n"),
            ("api/a.py", "from neoserve.engine import client\n"),
            ("models/a.py", "from . import b\nfrom ..blocks import mlp\n"),
            ("llm.py", "import neoserve.engine.core\nimport neoserve.text.chat\n"),
            ("program/a.py", "import json\nimport neoserve._native\n"),
        ],
    )
    def test_allowed(self, tmp_path: Path, file: str, text: str) -> None:
        assert check_imports.check_tree(make_tree(tmp_path, {file: text})) == []

    @pytest.mark.parametrize(
        ("file", "text", "target"),
        [
            ("sched/a.py", "from neoserve.engine.core import EngineCore\n", "neoserve.engine.core"),
            ("api/a.py", "def f():\n    from neoserve.engine import core\n", "neoserve.engine.core"),
            ("types/a.py", "from ..cache import pages\n", "neoserve.cache.pages"),
            ("formats/a.py", "import importlib\nimportlib.import_module('neoserve.models.llama')\n", "neoserve.models"),
            ("text/a.py", "import neoserve._native\n", "neoserve._native"),
            ("cli/a.py", "from neoserve.models import llama\n", "neoserve.models.llama"),
            ("novel/a.py", "import neoserve.cache.pages\n", "no entry"),
        ],
    )
    def test_forbidden(self, tmp_path: Path, file: str, text: str, target: str) -> None:
        offences = check_imports.check_tree(make_tree(tmp_path, {file: text}))
        assert offences
        assert target in offences[0]
        assert f"{file}:" in offences[0]

    def test_undeclared_third_party(self, tmp_path: Path) -> None:
        offences = check_imports.check_tree(make_tree(tmp_path, {"text/a.py": "import yaml.nodes\n"}))
        assert len(offences) == 1
        assert "imports yaml" in offences[0]

    def test_unused_dependency(self, tmp_path: Path) -> None:
        tree = make_tree(tmp_path, {"text/a.py": "import ml_dtypes\n"}, '"ml-dtypes>=0.4", "rich"')
        assert check_imports.check_tree(tree) == ["pyproject.toml: dependency rich is imported nowhere"]

    def test_empty_tree_is_an_offence(self, tmp_path: Path) -> None:
        assert check_imports.check_tree(make_tree(tmp_path, {}))


class TestBudgets:
    def write(self, root: Path, name: str, lines: int, line: str = "x = 1") -> None:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{line}\n" * lines)

    def test_file_at_the_bound(self, tmp_path: Path) -> None:
        self.write(tmp_path, "python/a.py", 400)
        self.write(tmp_path, "native/core/a.cpp", 400, "int x;")
        self.write(tmp_path, "native/kernels/x86_64/avx2/a.cpp", 800, "int x;")
        assert check_budgets.check_lines(tmp_path) == ([], 1600)

    @pytest.mark.parametrize(
        ("name", "lines"),
        [("python/a.py", 401), ("native/core/a.h", 401), ("native/kernels/x/y/a.cpp", 801), ("tests/a.py", 801)],
    )
    def test_file_over_the_bound(self, tmp_path: Path, name: str, lines: int) -> None:
        self.write(tmp_path, name, lines, "x = 1" if name.endswith("py") else "int x;")
        offences, _ = check_budgets.check_lines(tmp_path)
        assert len(offences) == 1
        assert name in offences[0]

    @pytest.mark.parametrize(("body", "expected"), [(59, 0), (60, 1)])
    def test_function(self, tmp_path: Path, body: int, expected: int) -> None:
        docstring = '    """Text\n\n    more.\n    """\n'
        text = "class A:\n  async def f(self):\n" + docstring + "    x = 1\n" * body
        (tmp_path / "python").mkdir()
        (tmp_path / "python" / "a.py").write_text(text)
        offences, _ = check_budgets.check_lines(tmp_path)
        assert len(offences) == expected

    def test_wheel_and_environment(self, tmp_path: Path) -> None:
        small = tmp_path / "small" / "a.whl"
        small.parent.mkdir()
        small.write_bytes(b"x" * 1000)
        large = tmp_path / "large.whl"
        large.write_bytes(b"x" * 10_000_001)
        assert check_budgets.run("wheel", [small]) == []
        assert "large.whl: 10.0 MB" in check_budgets.run("wheel", [large])[0]
        assert check_budgets.run("environment", [small.parent]) == []
        assert check_budgets.run("wheel", [tmp_path / "none.whl"]) == [f"{tmp_path / 'none.whl'}: not found"]
        size = check_budgets.tree_bytes(small.parent)
        assert 1000 <= size < 100_000
        assert check_budgets.check_bytes(small, 200_000_001, check_budgets.ENVIRONMENT_BYTES)

    def test_hard_links_count_once(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_bytes(b"x" * 100_000)
        before = check_budgets.tree_bytes(tmp_path)
        (tmp_path / "b").hardlink_to(tmp_path / "a")
        assert check_budgets.tree_bytes(tmp_path) == before


class TestNative:
    def tree(self, root: Path, name: str, text: str) -> Path:
        path = root / "native" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
        return root

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("kernels/aarch64/neon/a.cpp", '#include <arm_neon.h>\n#include <cstdint>\n#include "ops/contract.h"\n'),
            ("exec/a.cpp", '#include <vector>\n#include "kernel_folders.inc"\n#include "core/memory.h"\n'),
            ("core/features.cpp", "#if defined(__x86_64__)\n#include <immintrin.h>\n#endif\n"),
            ("ops/a.h", "#ifdef NDEBUG\n#endif\n"),
        ],
    )
    def test_allowed(self, tmp_path: Path, name: str, text: str) -> None:
        assert check_native.check_tree(self.tree(tmp_path, name, text)) == []

    @pytest.mark.parametrize(
        ("name", "text", "words"),
        [
            ("core/a.cpp", '#include "exec/model.h"\n', "core includes exec/model.h"),
            ("kernels/x86_64/avx2/a.cpp", "#include <vector>\n", "leaf code"),
            ("kernels/x86_64/avx2/a.cpp", '#include "core/thread_pool.h"\n', "core/thread_pool.h"),
            ("exec/a.cpp", "#include <immintrin.h>\n", "intrinsics belong"),
            ("ops/a.cpp", "int a;\n#ifdef __AVX2__\n#endif\n", "a.cpp:2: condition on __AVX2__"),
            ("kernels/aarch64/neon/a.h", "#if __ARM_FEATURE_DOTPROD\n#endif\n", "__ARM_FEATURE_DOTPROD"),
            ("gpu/a.cpp", "int a;\n", "no entry"),
        ],
    )
    def test_forbidden(self, tmp_path: Path, name: str, text: str, words: str) -> None:
        offences = check_native.check_tree(self.tree(tmp_path, name, text))
        assert len(offences) == 1
        assert words in offences[0]

    def test_empty_tree_is_an_offence(self, tmp_path: Path) -> None:
        assert check_native.check_tree(tmp_path)
