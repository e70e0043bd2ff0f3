"""Checks release wheels: what they say they are, what they need of a system, and what they must not hold.

Usage: build/wheels/tools/bin/python tools/wheels/check.py [WHEEL...]      default: all of build/wheels

Each wheel's extension is read as it is, on any machine: architecture and file name as the tag says; symbol versions at
most those of manylinux_2_28 (glibc 2.28, libstdc++ of GCC 8), by our own reading and by auditwheel; no library outside
manylinux's list, no search path, no executable stack, no text relocation; no thread-local storage of the initial-exec
model, which a process that has loaded other libraries may have no room for; no symbol exported but the module's entry;
only the stable ABI in abi3 wheels (abi3audit); no path of the build machine; size within the budget. Of one edition,
both architectures must ask for the same symbols of Python. Prints one line per wheel, then the offences; exit code 1
if there are any. tools/wheels/import.sh loads the wheels and lets them answer.
"""

from __future__ import annotations

import re
import struct
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / "build" / "wheels"

NAME = re.compile(r"^neoserve-[^-]+-(cp3\d+)-(cp3\d+|abi3)-manylinux_2_(\d+)_(x86_64|aarch64)\.whl$")
MACHINES = {"x86_64": 62, "aarch64": 183}
GLIBC_MINOR = 28
# The newest versions that manylinux_2_28 grants (PEP 600; the table of auditwheel).
HIGHEST = {"GLIBC": (2, GLIBC_MINOR), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (8, 0, 0)}
LIBRARIES = frozenset(
    {
        "libc.so.6",
        "libm.so.6",
        "libpthread.so.0",
        "libdl.so.2",
        "librt.so.1",
        "libgcc_s.so.1",
        "libstdc++.so.6",
        "ld-linux-aarch64.so.1",
        "ld-linux-x86-64.so.2",
    }
)


@dataclass
class Report:
    """What was found in one wheel."""

    wheel: Path
    edition: str = ""
    highest: dict[str, tuple[int, ...]] = field(default_factory=dict)
    python_symbols: frozenset[str] = frozenset()
    offences: list[str] = field(default_factory=list)

    def blame(self, text: str) -> None:
        """Takes up one offence."""
        self.offences.append(f"{self.wheel.name}: {text}")


def readelf(*arguments: str) -> str:
    """What readelf (binutils; it reads every architecture) prints."""
    return subprocess.run(["readelf", "-W", *arguments], check=True, capture_output=True, text=True).stdout


def dotted(version: tuple[int, ...]) -> str:
    """A version as it is written."""
    return ".".join(str(part) for part in version)


def symbol_versions(listing: str) -> dict[str, tuple[int, ...]]:
    """Highest version of each family (GLIBC, GLIBCXX, ...) in the version needs that ``readelf -V`` prints."""
    found: dict[str, tuple[int, ...]] = {}
    for family, text in re.findall(r"Name: ([A-Z]+)_([\d.]+)\s", listing):
        version = tuple(int(part) for part in text.split("."))
        found[family] = max(found.get(family, ()), version)
    return found


def check_dynamic(report: Report, library: Path) -> None:
    """What the loader is asked for: libraries, versions, stack, thread-local storage, exports."""
    dynamic = readelf("-d", str(library))
    for needed in re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic):
        if needed not in LIBRARIES:
            report.blame(f"needs {needed}, which is not on manylinux's list; link it statically or do without")
    if re.search(r"\((?:RPATH|RUNPATH)\)", dynamic):
        report.blame("has a library search path (RPATH)")
    if re.search(r"\bTEXTREL\b", dynamic):
        report.blame("has text relocations; compile every object with -fPIC")
    if re.search(r"\bSTATIC_TLS\b", dynamic):
        report.blame("has the flag STATIC_TLS: thread-local variables of the initial-exec model")
    relocations = set(re.findall(r"\bR_\w+", readelf("-r", str(library))))
    for name in sorted(relocations):
        if re.search(r"TPOFF|TPREL", name):
            report.blame(f"has the relocation {name}: thread-local variables of the initial-exec model")
    stack = re.search(r"^\s*GNU_STACK\s.*\s([RWE ]{3})\s+0x", readelf("-l", str(library)), re.MULTILINE)
    if stack is None or "E" in stack.group(1):
        report.blame("asks for an executable stack")
    report.highest = symbol_versions(readelf("-V", str(library)))
    for family, version in report.highest.items():
        if family not in HIGHEST:
            report.blame(
                f"needs the symbol version {family}_{dotted(version)}, of a family that manylinux does not grant"
            )
        elif version > HIGHEST[family]:
            report.blame(
                f"needs {family}_{dotted(version)}; manylinux_2_{GLIBC_MINOR} ends at {dotted(HIGHEST[family])}"
            )
    if "GLIBC" not in report.highest:
        report.blame("no GLIBC version was found in its symbols; the reading of readelf -V fails")
    symbols = [line.split() for line in readelf("--dyn-syms", str(library)).splitlines() if re.match(r"\s*\d+:", line)]
    exported = [fields[7] for fields in symbols if len(fields) > 7 and fields[6] != "UND"]
    if exported != ["PyInit__native"]:
        report.blame(f"exports {', '.join(exported[:4])} ({len(exported)}); only PyInit__native is meant to be")
    names = (fields[7] for fields in symbols if len(fields) > 7 and fields[6] == "UND")
    report.python_symbols = frozenset(name for name in names if re.match(r"_?Py", name))


def check_contents(report: Report, match: re.Match[str], folder: Path) -> None:
    """Files of an unpacked wheel against its name: one extension, of that architecture and edition."""
    python, abi, _, arch = match.groups()
    suffix = ".abi3.so" if abi == "abi3" else f".cpython-{python[2:]}-{arch}-linux-gnu.so"
    libraries = sorted(path for path in folder.rglob("*") if re.search(r"\.so(?:\.|$)", path.name))
    if [path.relative_to(folder).as_posix() for path in libraries] != [f"neoserve/_native{suffix}"]:
        report.blame(f"holds the libraries {[path.name for path in libraries]}; expected is _native{suffix} alone")
        return
    library = libraries[0]
    content = library.read_bytes()
    machine = struct.unpack_from("<H", content, 18)[0]
    if content[:4] != b"\x7fELF" or machine != MACHINES[arch]:
        report.blame(f"_native{suffix} is for ELF machine {machine}; the tag says {arch} ({MACHINES[arch]})")
        return
    for text in (str(ROOT).encode(), str(WHEELS).encode(), str(Path.home()).encode() + b"/"):
        if text in content:
            report.blame(f"_native{suffix} holds the path {text.decode()} of the build machine")
            break
    tags = re.findall(r"^Tag: (.+)$", next(folder.glob("*.dist-info/WHEEL")).read_text(), re.MULTILINE)
    expected = "-".join((python, abi, f"manylinux_2_{match.group(3)}_{arch}"))
    if tags != [expected]:
        report.blame(f"its WHEEL file has the tags {tags}; the name says {expected}")
    check_dynamic(report, library)


def run_tool(report: Report, *command: str) -> str:
    """Output of a checker in the tools' environment; its failure is an offence."""
    program = WHEELS / "tools" / "bin" / command[0]
    if not program.exists():
        report.blame(f"{command[0]} is not installed; run tools/wheels/setup.sh")
        return ""
    result = subprocess.run([str(program), *command[1:]], capture_output=True, text=True)
    output = re.sub(r"\s+", " ", result.stdout + result.stderr)
    if result.returncode != 0:
        report.blame(f"{command[0]}: {output[:400]}")
    return output


def check_wheel(wheel: Path) -> Report:
    """All checks of one wheel that need no other."""
    report = Report(wheel)
    match = NAME.match(wheel.name)
    if match is None:
        report.blame("its name is not that of a release wheel: neoserve-VERSION-PYTHON-ABI-manylinux_2_NN_ARCH.whl")
        return report
    report.edition = match.group(2)
    if int(match.group(3)) > GLIBC_MINOR:
        report.blame(f"is tagged manylinux_2_{match.group(3)}; the floor promised is 2_{GLIBC_MINOR}")
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        check_contents(report, match, Path(folder))
    shown = run_tool(report, "auditwheel", "show", str(wheel))
    granted = re.search(r'platform tag: "manylinux_(\d+)_(\d+)_(\w+)"', shown)
    if granted is None or granted.group(3) != match.group(4) or int(granted.group(2)) > int(match.group(3)):
        report.blame(f"auditwheel does not grant the tag: {granted.group(0) if granted else shown[:300]}")
    if match.group(2) == "abi3":
        run_tool(report, "abi3audit", "--strict", str(wheel))
    budget = subprocess.run(
        [sys.executable, str(ROOT / "tools/check_budgets.py"), "wheel", str(wheel)], capture_output=True, text=True
    )
    if budget.returncode != 0:
        report.blame(budget.stdout.strip().splitlines()[-1])
    versions = ", ".join(f"{family}_{dotted(report.highest[family])}" for family in HIGHEST if family in report.highest)
    by_auditwheel = granted.group(0).split()[-1] if granted else "none"
    print(f"wheel: {wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB; {versions}; auditwheel: {by_auditwheel}")
    return report


def main() -> int:
    """Command-line entry; returns the exit code."""
    wheels = [Path(argument) for argument in sys.argv[1:]] or sorted(WHEELS.glob("*.whl"))
    if not wheels:
        print("wheel: none in build/wheels; run tools/wheels/build.sh", file=sys.stderr)
        return 1
    reports = [check_wheel(wheel) for wheel in wheels]
    offences = [offence for report in reports for offence in report.offences]
    for report in reports:
        for other in reports:
            extra = report.python_symbols - other.python_symbols
            if report.edition == other.edition and extra:
                offences.append(
                    f"{report.wheel.name}: asks Python for {', '.join(sorted(extra)[:5])}, unlike {other.wheel.name}"
                )
    print(f"wheel: {len(reports)} checked, {len(offences)} offences")
    if offences:
        print("\n".join(offences))
    return 1 if offences else 0


if __name__ == "__main__":
    sys.exit(main())
