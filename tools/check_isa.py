"""Checks that only the kernel folders of a build use instructions above the baseline, and that kernels are leaf code.

Usage: python tools/check_isa.py BUILD_FOLDER [--objdump OBJDUMP]

Baseline objects (everything outside the kernel folders) are disassembled: on x86-64 an instruction of AVX or later
(VEX or EVEX encoded, ymm or zmm registers), on AArch64 one of armv8.1-a or later (dot product, matrix multiply, bf16,
fp16 arithmetic, SVE, LSE atomics outside the outline-atomics helpers) is an offence: on a CPU without it the program
would die with SIGILL. Kernel objects must define no weak symbol (the linker could choose that copy, compiled with the
folder's flags, for baseline code too) and hold no static initialiser (it would run on every CPU at load time).
Exit code 1 if there is an offence.
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

# x86-64: every mnemonic with a leading v is VEX or EVEX encoded except these; BMI and the rest of x86-64-v3 by name.
# tzcnt is missing on purpose: compilers emit its encoding (rep bsf) for every x86-64, where older CPUs run it as bsf.
X86_BASELINE_V = frozenset({"verr", "verw"})
X86_FOREIGN = re.compile(
    r"%[yz]mm|%k[1-7]\b|%tmm|^(?:andn|bextr|bls(?:i|r|msk)|lzcnt|bzhi|mulx|movbe|ad[co]x|pdep|pext|rorx|sarx|shlx|shrx|"
    r"k(?:mov|or|and|xor|not|test|ortest|shift)[a-z]*)\b"
)
A64_FOREIGN = re.compile(
    r"^(?:[us]dot|su?mmla|ummla|usmmla|usdot|sudot|bfdot|bfmmla|bfmlal[bt]|bfcvtn?2?|sqrdml[as]h|fcmla|fcadd|fmlal2?|"
    r"fmlsl2?|fjcvtzs|rdvl|cnt[bhwd]|ptrue|while[a-z]+|ld1r?q?[bhwd]|st1[bhwd]|"
    r"(?:ld|st)(?:add|clr|eor|set|smax|smin|umax|umin)(?:a?l?)[bh]?|swp(?:a?l?)[bh]?|casp?(?:a?l?)[bh]?)\b"
    r"|\b[zp]\d+\.[bhsdq]\b"
)
# Half-precision arithmetic: floating-point instructions on h registers or 4h/8h lanes other than conversions and moves.
A64_FP16 = re.compile(r"^f(?!cvt|mov)[a-z0-9]+\b.*(?:\bh\d+\b|\bv\d+\.[48]h\b)")
OUTLINE_ATOMICS = re.compile(r"^__aarch64_(?:cas|swp|ldadd|ldset|ldclr|ldeor)")

SYMBOL_LINE = re.compile(r"^[0-9a-f]+ <(.+)>:$")
CODE_LINE = re.compile(r"^\s*[0-9a-f]+:\t([^#;]*)")
MACHINES = {62: "x86_64", 183: "aarch64"}
PREFIXES = frozenset({"lock", "rep", "repz", "repnz", "bnd", "notrack", "data16", "cs", "addr32"})


def machine_of(path: Path) -> str:
    """Architecture of an ELF file: x86_64 or aarch64.

    Raises ValueError when it is no ELF file or of another machine.
    """
    header = path.read_bytes()[:20]
    if len(header) < 20 or header[:4] != b"\x7fELF":
        raise ValueError(f"{path}: not an ELF object")
    machine = struct.unpack_from("<H", header, 18)[0]
    if machine not in MACHINES:
        raise ValueError(f"{path}: ELF machine {machine}; known are x86-64 (62) and AArch64 (183)")
    return MACHINES[machine]


def is_foreign(machine: str, instruction: str) -> bool:
    """Whether one disassembled instruction (mnemonic and operands) is above the machine's baseline."""
    words = instruction.split()
    while words and words[0] in PREFIXES:
        words = words[1:]
    if not words:
        return False
    text = " ".join(words)
    if machine == "aarch64":
        return bool(A64_FOREIGN.search(text) or A64_FP16.search(text))
    mnemonic = words[0]
    if mnemonic.startswith("v") and mnemonic not in X86_BASELINE_V:
        return True
    return bool(X86_FOREIGN.search(text))


def foreign_instructions(machine: str, listing: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(symbol, instruction) of every instruction above the baseline in the output of ``objdump -d``."""
    symbol = ""
    for line in listing:
        heading = SYMBOL_LINE.match(line)
        if heading:
            symbol = heading.group(1)
            continue
        code = CODE_LINE.match(line)
        if code and not OUTLINE_ATOMICS.match(symbol) and is_foreign(machine, code.group(1).strip()):
            yield symbol, code.group(1).strip()


def output_of(command: list[str]) -> list[str]:
    """Lines that a tool prints; its failure raises CalledProcessError."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def check_baseline(path: Path, objdump: str) -> list[str]:
    """Offences of one baseline object: at most the first three, with the count."""
    lines = output_of([objdump, "-d", "--no-show-raw-insn", str(path)])
    found = list(foreign_instructions(machine_of(path), lines))
    offences = [f"{path.name}: {symbol}: {text}: above the baseline" for symbol, text in found[:3]]
    if len(found) > 3:
        offences.append(f"{path.name}: and {len(found) - 3} more instructions above the baseline")
    return offences


def check_kernel(path: Path, objdump: str) -> list[str]:
    """Offences of one kernel object: weak definitions and static initialisers."""
    offences = []
    for line in output_of([objdump, "-t", str(path)]):
        fields = line.split()
        # address, flags, section, size, name; flag w marks a weak symbol, u a unique one
        if len(fields) >= 4 and "*UND*" not in line and re.match(r"^[0-9a-f]+ (?:.w|u)", line):
            offences.append(f"{path.name}: weak symbol {fields[-1]}; make it static or put it in an unnamed namespace")
    for line in output_of([objdump, "-h", str(path)]):
        if re.search(r"\.(?:init_array|ctors)\b", line):
            offences.append(f"{path.name}: has a static initialiser; kernels hold constant-initialised data only")
    return offences


def objdump_for(machine: str) -> str:
    """The disassembler for a machine: the native objdump, its cross edition, or LLVM's.

    Raises FileNotFoundError naming the package to install.
    """
    own = ["objdump"] if platform.machine() in (machine, {"aarch64": "arm64"}.get(machine, "amd64")) else []
    for name in (*own, f"{machine.replace('_', '-')}-linux-gnu-objdump", "llvm-objdump", "llvm-objdump-22"):
        if shutil.which(name):
            return name
    raise FileNotFoundError(f"no disassembler for {machine}; install binutils or binutils-aarch64-linux-gnu")


def check_build(build: Path, objdump: str | None) -> tuple[list[str], int]:
    """Offences in a CMake build folder, and the number of objects checked."""
    targets = build / "CMakeFiles"
    offences: list[str] = []
    checked = 0
    for path in sorted(targets.rglob("*.o")):
        target = path.relative_to(targets).parts[0]
        if not target.startswith(("neoserve_", "_native", "nanobind")):
            continue
        tool = objdump or objdump_for(machine_of(path))
        checked += 1
        offences += check_kernel(path, tool) if target.startswith("neoserve_kernels_") else check_baseline(path, tool)
    if checked == 0:
        offences.append(f"{build}: no objects of neoserve found; build first (tools/build_native.sh)")
    return offences, checked


def main() -> int:
    """Command-line entry; returns the exit code."""
    parser = argparse.ArgumentParser(description="Check a build for instructions above the baseline.")
    parser.add_argument("build", type=Path)
    parser.add_argument("--objdump")
    arguments = parser.parse_args()
    offences, checked = check_build(arguments.build, arguments.objdump)
    print(f"isa: {checked} objects checked, {len(offences)} offences")
    if offences:
        print("\n".join(offences))
    return 1 if offences else 0


if __name__ == "__main__":
    sys.exit(main())
