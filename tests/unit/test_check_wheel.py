"""tools/wheels/check.py: a wheel that breaks one of its promises is told by name; a sound one passes."""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "wheels" / "check.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_wheel", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_wheel"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


check_wheel = load()

NAME = "neoserve-0.1.0-cp312-abi3-manylinux_2_28_x86_64.whl"
SOURCE = '#include <cstdlib>\nextern "C" void* PyInit__native() { return std::malloc(1); }\n'


def offences(
    folder: Path, source: str = SOURCE, *flags: str, name: str = NAME, library: str = "_native.abi3.so"
) -> str:
    """What the check says of an unpacked wheel of this name with an extension compiled from ``source``."""
    if platform.machine() != "x86_64" or shutil.which("g++") is None or shutil.which("readelf") is None:
        pytest.skip("needs an x86-64 machine with g++ and readelf; apt-get install g++")
    (folder / "neoserve").mkdir()
    (folder / "neoserve-0.1.0.dist-info").mkdir()
    (folder / "neoserve-0.1.0.dist-info" / "WHEEL").write_text("Tag: cp312-abi3-manylinux_2_28_x86_64\n")
    (folder / "a.cpp").write_text(source)
    command = ["g++", "-shared", "-fPIC", "-fvisibility-inlines-hidden", "a.cpp", "-o", f"neoserve/{library}", *flags]
    subprocess.run(command, check=True, cwd=folder)
    report = check_wheel.Report(folder / name)
    match = check_wheel.NAME.match(name)
    assert match is not None
    check_wheel.check_contents(report, match, folder)
    return "\n".join(report.offences)


def test_sound(tmp_path: Path) -> None:
    assert offences(tmp_path) == ""


@pytest.mark.parametrize(
    ("source", "flags", "words"),
    [
        (SOURCE + "int more() { return 1; }", (), "exports"),
        (SOURCE, ("-Wl,-z,execstack",), "executable stack"),
        (SOURCE, ("-Wl,-rpath,/somewhere",), "search path"),
        (SOURCE, ("-Wl,--no-as-needed", "-lcrypt"), "needs libcrypt"),
        (
            "#include <cmath>\n"
            + SOURCE
            + "static volatile double x = 2; static double f() { return std::pow(x, x); }\n"
            "__attribute__((constructor)) static void g() { x = f(); }",
            ("-lm",),
            "needs GLIBC_2.29; manylinux_2_28 ends at 2.28",
        ),
        (
            SOURCE + "static thread_local int n = 3; __attribute__((constructor)) static void g() { ++n; }",
            ("-ftls-model=initial-exec",),
            "initial-exec",
        ),
    ],
    ids=["export", "stack", "rpath", "library", "glibc", "tls"],
)
def test_broken_promise(tmp_path: Path, source: str, flags: tuple[str, ...], words: str) -> None:
    if "-lcrypt" in flags and not list(Path("/usr/lib").rglob("libcrypt.so")):
        pytest.skip("needs libcrypt; apt-get install libcrypt-dev")
    found = offences(tmp_path, source, *flags)
    assert words in found
    assert words == "initial-exec" or len(found.splitlines()) == 1


def test_tag_of_another_machine(tmp_path: Path) -> None:
    name = NAME.replace("x86_64", "aarch64")
    assert "is for ELF machine 62; the tag says aarch64 (183)" in offences(tmp_path, name=name)


def test_tag_of_another_edition(tmp_path: Path) -> None:
    found = offences(tmp_path, library="_native.cpython-312-x86_64-linux-gnu.so")
    assert "expected is _native.abi3.so alone" in found


def test_metadata_of_another_tag(tmp_path: Path) -> None:
    assert "its WHEEL file has the tags" in offences(tmp_path, name=NAME.replace("2_28", "2_27"))


def test_path_of_the_build_machine(tmp_path: Path) -> None:
    source = SOURCE.replace("std::malloc(1)", f'(void*)"{check_wheel.ROOT}"')
    assert "of the build machine" in offences(tmp_path, source)


def test_newest_version_of_each_family() -> None:
    listing = "  0x0010:   Name: GLIBC_2.4  Flags: none  Version: 3\n  0x0020:   Name: GLIBC_2.14  Flags: none\n"
    assert check_wheel.symbol_versions(listing + "  Name: CXXABI_1.3.11  Flags") == {
        "GLIBC": (2, 14),
        "CXXABI": (1, 3, 11),
    }


def test_name_of_no_release_wheel(tmp_path: Path) -> None:
    wheel = tmp_path / "neoserve-0.1.0-py3-none-any.whl"
    wheel.write_bytes(b"")
    assert re.search("not that of a release wheel", check_wheel.check_wheel(wheel).offences[0])
