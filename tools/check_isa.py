"""Checks that only the kernel folders of a build use instructions above the baseline, and that kernels are leaf code.

Usage: python tools/check_isa.py BUILD_FOLDER

Every instruction is disassembled and given back to the assembler, told to know the baseline alone (x86-64-v2 or
armv8-a): what it refuses would end the program with SIGILL on a CPU of the baseline. So nothing depends on a list of
mnemonics that somebody has to keep complete; what cannot be decoded or assembled again is an offence too. Checked are

- the objects of a build, all executable sections, functions that run at load time included: baseline objects against
  the baseline, kernel objects against the feature set that their folder is named after;
- the linked extension, with the linker's map (_native.map) telling which parts come from kernel objects: what the
  linker took from static archives and start files, or made itself, is held to the baseline as well;
- on AArch64, if llvm-objdump is at hand, the baseline parts once more by LLVM's tables (x86's are not by feature).

Outline atomics (__aarch64_ldadd4_relax and its kin) hold LSE atomics behind a run-time check and are allowed. Kernel
objects must define no weak symbol (the linker could choose that copy, compiled with the folder's flags, for baseline
code too) and hold nothing that runs at load time. Exit code 1 if there is an offence.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

# The baseline in the assembler's words. Its x86-64-v2 is what the psABI's table says, without LAHF: always known to it.
BASELINE = {
    "x86_64": "generic64+sse4.2+popcnt+cx16+fxsr+cmov+clflush+nop+syscall",
    "aarch64": "armv8-a",
}
_AVX2 = BASELINE["x86_64"] + "+avx2+fma+f16c"
_AVX512 = _AVX2 + "+avx512f+avx512bw+avx512vl+avx512dq"
_V8_2 = "armv8.2-a+dotprod"
_SVE = _V8_2 + "+fp16+i8mm+bf16+sve"
# What the code of a kernel folder may use besides: the folder's name is the feature set that its rows ask for.
KERNEL_FEATURES = {
    "x86_64": {
        "avx2": _AVX2,
        "avx_vnni": _AVX2 + "+avx_vnni",
        "avx512": _AVX512,
        "avx512_vnni": _AVX512 + "+avx512_vnni",
        "avx512_bf16": _AVX512 + "+avx512_vnni+avx512_bf16",
        "avx512_fp16": _AVX512 + "+avx512_vnni+avx512_fp16",
        "amx": _AVX512 + "+avx512_vnni+avx512_bf16+amx_tile+amx_int8+amx_bf16",
    },
    "aarch64": {
        "neon": BASELINE["aarch64"],
        "fp16": "armv8.2-a+fp16",
        "dotprod": _V8_2,
        "i8mm": _V8_2 + "+i8mm",
        "bf16": "armv8.2-a+bf16",
        "sve": _SVE,
        "sve2": _SVE + "+sve2",
    },
}
MACHINES = {62: "x86_64", 183: "aarch64"}
# Older processors run these encodings as no operation, or tzcnt as the bsf that compilers mean by it.
X86_HARMLESS = frozenset({"endbr64", "endbr32", "tzcnt"})
# Prefixes that change no operation, and that the assembler does not take as the disassembler writes them.
X86_PREFIX = re.compile(r"^(?:(?:data16|addr32|[cdefgs]s|bnd|notrack|xacquire|xrelease|rex(?:\.\w+)?)\s+)+")
# xgetbv reads which registers the system saves, after CPUID has said that it exists.
GUARDED = {"xgetbv": re.compile(r"native/core/features\.cpp")}
OUTLINE_ATOMIC = re.compile(r"^__aarch64_(?:cas|swp|ldadd|ldset|ldclr|ldeor)\d+_")
OUTLINE_MEMBER = re.compile(
    r"libgcc\.a\((?:cas|swp|ldadd|ldset|ldclr|ldeor)_\d+_\d\.o\)|/outline_atomic_\w+\.S\.o\)|\(outline_atomic_\w+\.S\.o\)"
)
KERNEL_OBJECT = re.compile(r"CMakeFiles/neoserve_kernels_(\w+)\.dir/")

SYMBOL_LINE = re.compile(r"^[0-9a-f]+ <(.+)>:$")
CODE_LINE = re.compile(r"^\s*([0-9a-f]+):\s+(.*)$")
COMMENT = {"x86_64": re.compile(r"\s*#.*$"), "aarch64": re.compile(r"\s*(?://|;).*$")}
TARGET = re.compile(r"(?:0x)?[0-9a-f]+ <[^>]*>$")
BRANCH = re.compile(r"^(?:j\w*|call\w*|loop\w*|b|bl|b\.\w+|cbn?z|tbn?z|adrp?|ldr|ldrsw|prfm)\b")
BARE_TARGET = re.compile(r"(?<=[ ,])(?:0x)?[0-9a-f]+$")
UNDECODED = re.compile(r"\(bad\)|<unknown>|^\.(?:inst|word|byte|short|long|quad)\b")


@dataclass(frozen=True)
class Place:
    """Where an instruction stands: file, function (or input file of the linker), and as which code it is judged."""

    file: str
    symbol: str
    march: str


def machine_of(path: Path) -> str:
    """Architecture of an ELF file: x86_64 or aarch64.

    Raises ValueError when it is no ELF file or of another machine.
    """
    with path.open("rb") as file:
        header = file.read(20)
    if len(header) < 20 or header[:4] != b"\x7fELF":
        raise ValueError(f"{path}: not an ELF object")
    machine = struct.unpack_from("<H", header, 18)[0]
    if machine not in MACHINES:
        raise ValueError(f"{path}: ELF machine {machine}; known are x86-64 (62) and AArch64 (183)")
    return MACHINES[machine]


def binutils(machine: str, tool: str) -> str:
    """Path of objdump or as for a machine: the native edition or the cross edition.

    Raises FileNotFoundError naming the package to install.
    """
    prefixed = shutil.which(f"{machine.replace('_', '-')}-linux-gnu-{tool}") or shutil.which(
        f"{machine}-linux-gnu-{tool}"
    )
    own = shutil.which(tool) if os.uname().machine == machine else None
    if found := prefixed or own:
        return found
    package = "binutils" if os.uname().machine == machine else f"binutils-{machine.replace('_', '-')}-linux-gnu"
    raise FileNotFoundError(f"no {tool} for {machine}; run: apt-get install {package}")


def llvm_objdump() -> str | None:
    """Path of the newest llvm-objdump, or None."""
    names = ["llvm-objdump", *(f"llvm-objdump-{version}" for version in range(16, 31))]
    return next((path for name in reversed(names) if (path := shutil.which(name))), None)


def output_of(command: list[str]) -> list[str]:
    """Lines that a tool prints; its failure raises CalledProcessError."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def disassembly(listing: Iterable[str]) -> Iterator[tuple[int, str, str]]:
    """(address, symbol, instruction) of the lines that a disassembler prints."""
    symbol = ""
    for line in listing:
        if heading := SYMBOL_LINE.match(line):
            symbol = heading.group(1)
        elif code := CODE_LINE.match(line):
            yield int(code.group(1), 16), symbol, re.sub(r"\s+", " ", code.group(2)).strip()


def assembler_text(machine: str, instruction: str) -> str | None:
    """An instruction as the assembler takes it (a branch goes to itself), or None if there is nothing to judge.

    What the disassembler could not decode is returned as it is: the caller tells it by UNDECODED.
    """
    if UNDECODED.search(instruction):
        return instruction
    text = TARGET.sub(".", COMMENT[machine].sub("", instruction).strip())
    if machine == "x86_64":
        text = X86_PREFIX.sub("", text + " ").strip()
        if not text or text.split()[0] in X86_HARMLESS:
            return None
    if BRANCH.match(text):
        text = BARE_TARGET.sub(".", text)
    return text


def refused(machine: str, march: str, texts: list[str]) -> dict[int, str]:
    """Index in ``texts`` -> why the assembler, knowing ``march`` alone, does not take that instruction."""
    found = {index: "cannot be decoded" for index, text in enumerate(texts) if UNDECODED.search(text)}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "all.s"
        lines = ("" if index in found else text for index, text in enumerate(texts))
        source.write_text("\n".join(lines) + "\n")
        command = [binutils(machine, "as"), f"-march={march}", "-o", os.devnull, str(source)]
        result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    for line in result.stderr.splitlines():
        if error := re.match(r"^.*all\.s:(\d+): (?:Fatal error|Error): (.*)$", line):
            foreign = re.search(r"not supported on|does not support", error.group(2))
            why = "above the baseline" if march == BASELINE[machine] else f"above {march}"
            found[int(error.group(1)) - 1] = why if foreign else f"not assembled again ({error.group(2)})"
        elif "rror: " in line:
            raise ValueError(f"{command[0]} {command[1]}: {line}")
    return found


class Listing:
    """Instructions of many files, each kept once per feature set with the first place that it was found in."""

    def __init__(self, machine: str) -> None:
        self.machine = machine
        self.places: dict[tuple[str, str], Place] = {}

    def add(self, place: Place, instruction: str) -> None:
        """Takes up one instruction, unless its place is where it is known to be guarded."""
        guard = GUARDED.get(instruction.split()[0]) if instruction else None
        if guard and guard.search(f"{place.file} {place.symbol}"):
            return
        if OUTLINE_ATOMIC.match(place.symbol):
            return
        text = assembler_text(self.machine, instruction)
        if text:
            self.places.setdefault((place.march, text), place)

    def offences(self) -> list[str]:
        """One line for each instruction that is above the feature set it is held to."""
        found = []
        for march in sorted({march for march, _ in self.places}):
            texts = [text for of, text in self.places if of == march]
            for index, why in sorted(refused(self.machine, march, texts).items()):
                place = self.places[march, texts[index]]
                found.append(f"{place.file}: {place.symbol}: {texts[index]}: {why}")
        return found


def load_time_code(path: Path, objdump: str) -> list[str]:
    """Offences of one kernel object: weak definitions, static initialisers, resolvers that the loader calls."""
    offences = []
    for line in output_of([objdump, "-t", str(path)]):
        fields = line.split()
        # address, seven flags, section, size, name; w is a weak symbol, u a unique one, i one with a resolver
        flags = re.match(r"^[0-9a-f]+ (.{7}) ", line)
        if flags is None or "*UND*" in line:
            continue
        if flags.group(1)[0] == "u" or "w" in flags.group(1)[1]:
            offences.append(f"{path.name}: weak symbol {fields[-1]}; make it static or put it in an unnamed namespace")
        if "i" in flags.group(1):
            offences.append(f"{path.name}: {fields[-1]} has a resolver, which the loader calls on every CPU")
    for line in output_of([objdump, "-h", str(path)]):
        if re.search(r"\s\.(?:(?:pre)?init_array|ctors|fini_array|dtors|init|fini)\b", line):
            offences.append(f"{path.name}: has a static initialiser; kernels hold constant-initialised data only")
    return offences


def kernel_march(machine: str, folder: str) -> str:
    """Feature set, in the assembler's words, of a kernel folder.

    Raises ValueError for one that this file does not know.
    """
    if folder not in KERNEL_FEATURES[machine]:
        raise ValueError(
            f"kernel folder {folder} has no entry in KERNEL_FEATURES of tools/check_isa.py; add its features"
        )
    return KERNEL_FEATURES[machine][folder]


def map_ranges(lines: Iterable[str]) -> list[tuple[int, int, str]]:
    """(start, end, input file) of every piece that a linker's map names, sorted; of GNU ld, gold and lld."""
    ranges = []
    started = False
    for line in lines:
        if re.match(r"^(?:Linker script and memory map|Memory map|\s*VMA\s+LMA\s+Size)", line):
            started = True
        if not started:
            continue  # GNU ld lists what it discards first, in the same form
        if lld := re.match(r"^\s*([0-9a-f]+)\s+[0-9a-f]+\s+([0-9a-f]+)\s+\d+\s+(\S.*):\(\.[^)]*\)$", line):
            start, size, name = int(lld.group(1), 16), int(lld.group(2), 16), lld.group(3)
        elif gnu := re.match(r"^\s*(?:\.\S+)?\s+0x([0-9a-f]+)\s+0x([0-9a-f]+)\s+(\S.*)$", line):
            start, size, name = int(gnu.group(1), 16), int(gnu.group(2), 16), gnu.group(3)
        else:
            continue
        if size:
            ranges.append((start, start + size, name))
    return sorted(ranges)


def judge_linked(machine: str, path: Path) -> Callable[[int], Place | None]:
    """For a linked extension: how the instruction at an address is judged; None where anything is allowed."""
    ranges = map_ranges((path.parent / "_native.map").read_text(errors="replace").splitlines())
    starts = [start for start, _, _ in ranges]

    def judge(address: int) -> Place | None:
        index = bisect_right(starts, address) - 1
        name = ranges[index][2] if index >= 0 and address < ranges[index][1] else "made by the linker"
        if OUTLINE_MEMBER.search(name):
            return None
        kernel = KERNEL_OBJECT.search(name)
        march = kernel_march(machine, kernel.group(1)) if kernel else BASELINE[machine]
        return Place(path.name, name, march)

    return judge


def check_by_llvm(path: Path, judge: Callable[[int], Place | None] | None) -> list[str]:
    """Offences that LLVM's disassembler sees in the baseline code of an AArch64 file, if it is installed."""
    tool = llvm_objdump()
    if tool is None:
        return []
    offences = []
    listing = output_of([tool, "-d", "--no-show-raw-insn", "--mattr=+v8a", str(path)])
    for address, symbol, text in disassembly(listing):
        place = judge(address) if judge else None
        skipped = judge is not None and (place is None or place.march != BASELINE["aarch64"])
        if "<unknown>" in text and not skipped and not OUTLINE_ATOMIC.match(symbol):
            where = place.symbol if place else symbol
            offences.append(f"{path.name}: {where}: instruction at {address:#x} is above armv8-a (llvm-objdump)")
    return offences


def check_build(build: Path) -> tuple[list[str], int]:
    """Offences in a CMake build folder, and the number of files checked."""
    targets = build / "CMakeFiles"
    offences: list[str] = []
    listings: dict[str, Listing] = {}
    checked = 0
    for path in sorted(targets.rglob("*.o")):
        shown = path.relative_to(targets)
        if not shown.parts[0].startswith(("neoserve_", "_native", "nanobind")):
            continue
        machine = machine_of(path)
        objdump = binutils(machine, "objdump")
        kernel = KERNEL_OBJECT.search(f"CMakeFiles/{shown}")
        march = kernel_march(machine, kernel.group(1)) if kernel else BASELINE[machine]
        listing = listings.setdefault(machine, Listing(machine))
        checked += 1
        for _, symbol, text in disassembly(output_of([objdump, "-d", "--no-show-raw-insn", str(path)])):
            listing.add(Place(str(shown), symbol, march), text)
        if kernel:
            offences += load_time_code(path, objdump)
        elif machine == "aarch64":
            offences += check_by_llvm(path, None)
    for path in sorted(build.glob("_native*.so")):
        checked += 1
        if not (build / "_native.map").exists():
            offences.append(f"{path.name}: no linker map beside it; build again (CMakeLists.txt asks for _native.map)")
            continue
        machine = machine_of(path)
        judge = judge_linked(machine, path)
        listing = listings.setdefault(machine, Listing(machine))
        for address, _, text in disassembly(
            output_of([binutils(machine, "objdump"), "-d", "--no-show-raw-insn", str(path)])
        ):
            place = judge(address)
            if place:
                listing.add(place, text)
        if machine == "aarch64":
            offences += check_by_llvm(path, judge)
    for listing in listings.values():
        offences += listing.offences()
    if checked == 0:
        offences.append(f"{build}: no objects of neoserve found; build first (tools/build_native.sh)")
    return offences, checked


def main() -> int:
    """Command-line entry; returns the exit code."""
    parser = argparse.ArgumentParser(description="Check a build for instructions above the baseline.")
    parser.add_argument("build", type=Path)
    try:
        offences, checked = check_build(parser.parse_args().build)
    except (FileNotFoundError, ValueError) as error:
        print(f"isa: {error}", file=sys.stderr)
        return 1
    print(f"isa: {checked} files checked, {len(offences)} offences")
    if offences:
        print("\n".join(offences[:40]))
    return 1 if offences else 0


if __name__ == "__main__":
    sys.exit(main())
