"""The extension loads in every order with the libraries that share its process, without LD_PRELOAD.

A library with thread-local storage of the initial-exec model needs room in a reserve that the loader keeps; on AArch64
others use it up, and the one loaded last fails ("cannot allocate memory in static TLS block"). Ours must not have any,
and each order is tried in a process of its own: natively, or under the emulated CPU that runs this test.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from itertools import permutations
from pathlib import Path

import pytest

from neoserve import _native

ROOT = Path(__file__).resolve().parents[2]
CPU = os.environ.get("NEOSERVE_EMULATED_CPU", "")
OURS = "neoserve._native"
OTHERS = ("numpy", "tokenizers", "ml_dtypes")
# Ours first, last and between; the others in either order. ml_dtypes loads numpy itself.
ORDERS = [
    (OURS, *OTHERS),
    (OURS, *reversed(OTHERS)),
    (*OTHERS, OURS),
    (*reversed(OTHERS), OURS),
    ("tokenizers", OURS, "ml_dtypes", "numpy"),
]

PROGRAM = """
import importlib, sys
order = sys.argv[1].split(",")
for position, name in enumerate(order):
    early = [later for later in order[position + 1:] if name == "neoserve._native" and later in sys.modules]
    importlib.import_module(name)
    assert not early, early
import neoserve._native as native, numpy
assert native.rows() and float(numpy.ones((64, 64)).dot(numpy.ones((64, 64))).sum()) == 64.0 ** 3
print("loaded", *order)
"""

DT_FLAGS, DF_STATIC_TLS, PT_DYNAMIC, SHT_RELA = 30, 16, 2, 4
# Relocations of the initial-exec model: R_X86_64_TPOFF64; R_AARCH64_TLS_TPREL.
INITIAL_EXEC = {62: 18, 183: 1030}


def interpreter() -> list[str]:
    """Command of a new Python like this one; an emulated one cannot start itself, the host starts it again."""
    if not CPU:
        return [sys.executable]
    return [str(ROOT / "tools" / "arm" / "python.sh"), CPU]


def thread_local_storage(content: bytes) -> list[str]:
    """What of a shared object (64-bit little-endian ELF) asks for room in the reserve for thread-local storage."""
    machine, _, _, program, section = struct.unpack_from("<HIQQQ", content, 18)
    program_size, programs, section_size, sections = struct.unpack_from("<HHHH", content, 54)
    found = []
    for index in range(programs):
        kind, _, offset, _, _, size = struct.unpack_from("<IIQQQQ", content, program + index * program_size)
        if kind == PT_DYNAMIC:
            entries = (struct.unpack_from("<qQ", content, place) for place in range(offset, offset + size, 16))
            found += ["DF_STATIC_TLS" for tag, value in entries if tag == DT_FLAGS and value & DF_STATIC_TLS]
    for index in range(sections):
        header = struct.unpack_from("<IIQQQQIIQQ", content, section + index * section_size)
        if header[1] == SHT_RELA:
            for place in range(header[4], header[4] + header[5], 24):
                if struct.unpack_from("<QQ", content, place)[1] & 0xFFFFFFFF == INITIAL_EXEC[machine]:
                    found.append(f"relocation at {struct.unpack_from('<Q', content, place)[0]:#x}")
    return found


def test_no_initial_exec_storage() -> None:
    assert thread_local_storage(Path(_native.__file__).read_bytes()) == []


def test_initial_exec_storage_would_be_seen(tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None or CPU:
        pytest.skip("needs g++ and no emulation; apt-get install g++")
    source = "extern thread_local int n; thread_local int n = 3; int f() { return ++n; }"
    (tmp_path / "a.cpp").write_text(source)
    for model, expected in (("global-dynamic", False), ("initial-exec", True)):
        library = tmp_path / f"{model}.so"
        command = [compiler, "-shared", "-fPIC", f"-ftls-model={model}", tmp_path / "a.cpp", "-o", library]
        subprocess.run(command, check=True)
        assert bool(thread_local_storage(library.read_bytes())) is expected


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: "-".join(name.split(".")[0] for name in order))
def test_order(order: tuple[str, ...]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    command = [*interpreter(), "-c", PROGRAM, ",".join(order)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"loaded {' '.join(order)}\n"


def test_orders_cover_every_pair() -> None:
    """Between ours and each other library, both orders are tried."""
    pairs = {(a, b) for order in ORDERS for i, a in enumerate(order) for b in order[i + 1 :]}
    assert {pair for pair in permutations((OURS, *OTHERS), 2) if OURS in pair} <= pairs
