"""What tests/kernels/test_force.py is to find on this machine, read from the kernel's /proc/cpuinfo.

Usage: python .github/scripts/expected_rows.py [CPUINFO] >>"$GITHUB_ENV"
Prints NEOSERVE_EXPECT_FEATURES (all features, and no others) and NEOSERVE_EXPECT_ROWS (the rows that must be chosen).
It reads another source than the extension does (HWCAP, CPUID), so that a fault of the detection shows. Exit code 1 if
the machine has nothing above the baseline, for then a hosted run would prove nothing.
"""

from __future__ import annotations

import platform
import re
import sys
from pathlib import Path

# Flags of /proc/cpuinfo (all of them are needed) for each feature, in the terms of native/core/features.cpp.
FEATURES: dict[str, dict[str, set[str]]] = {
    "aarch64": {
        "neon": {"asimd"},
        "fp16": {"asimdhp"},
        "dotprod": {"asimddp"},
        "i8mm": {"i8mm"},
        "bf16": {"bf16"},
        "sve": {"sve"},
        "sve2": {"sve", "sve2"},
        "sve_i8mm": {"sve", "svei8mm"},
        "sve_bf16": {"sve", "svebf16"},
    },
    "x86_64": {
        "avx2": {"avx2", "fma", "f16c"},
        "avx_vnni": {"avx2", "avx_vnni"},
        "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
        "avx512_vnni": {"avx512f", "avx512_vnni"},
        "avx512_bf16": {"avx512f", "avx512_bf16"},
        "avx512_fp16": {"avx512f", "avx512_fp16"},
        "amx_int8": {"amx_tile", "amx_int8"},
        "amx_bf16": {"amx_tile", "amx_bf16"},
    },
}
# Folder of native/kernels that gets an op: the first one whose features are all there.
INTEGER_ROWS = ("linear_int8_channel", "linear_int8_group", "linear_int4_group")
INTEGER_FOLDERS = {
    "aarch64": [("i8mm", {"i8mm", "dotprod"}), ("dotprod", {"dotprod"})],
    "x86_64": [("avx512_vnni", {"avx512", "avx512_vnni"}), ("avx_vnni", {"avx_vnni"}), ("avx2", {"avx2"})],
}
BF16_FOLDERS = {"aarch64": [("bf16", {"bf16"})], "x86_64": []}


def cpu_flags(text: str) -> set[str]:
    """Flags of the first processor."""
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return set(match[1].split()) if match else set()


def expectation(machine: str, flags: set[str]) -> tuple[list[str], list[str]]:
    """(features, rows) that the extension must report on such a CPU."""
    features = [name for name, needed in FEATURES[machine].items() if needed <= flags]
    rows: list[str] = []
    for ops, folders in ((INTEGER_ROWS, INTEGER_FOLDERS), (("linear_bf16",), BF16_FOLDERS)):
        folder = next((name for name, needed in folders[machine] if needed <= set(features)), None)
        if folder is not None:
            rows += [f"{op}_{folder}" for op in ops]
    return features, rows


def main(arguments: list[str]) -> int:
    """Command line."""
    machine = platform.machine()
    features, rows = expectation(machine, cpu_flags(Path((arguments or ["/proc/cpuinfo"])[0]).read_text("utf-8")))
    if not rows:
        print(f"expected_rows: this {machine} has {', '.join(features) or 'nothing'}; no row above the baseline can "
              "be expected; use another runner", file=sys.stderr)  # fmt: skip
        return 1
    print(f"NEOSERVE_EXPECT_FEATURES={','.join(features)}")
    print(f"NEOSERVE_EXPECT_ROWS={','.join(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
