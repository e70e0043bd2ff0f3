"""Prints the table of an emulated run: CPU class, features, rows chosen for the main ops, tests run.

Usage: python tools/arm/table.py LOGS CPU...  (tools/arm/test.sh calls it; LOGS holds CPU.JOB.log of pytest)
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

OPS = ("linear_int8_channel", "linear_int4_group", "linear_bf16", "linear_f32", "attention_bf16")
QUESTION = """
from neoserve import _native
print(",".join(_native.cpu_features()), 8 * _native.sve_vector_bytes())
for op, _, folder, chosen, _ in _native.rows():
    if chosen:
        print(op, folder)
"""
PASSED = re.compile(r"\b(\d+) passed")


def tests_passed(logs: Path, cpu: str) -> int:
    """Sum of the tests that passed in all jobs of one CPU; a log without a summary raises ValueError."""
    total = 0
    for log in sorted(logs.glob(f"{cpu}.*.log")):
        found = PASSED.findall(log.read_text(encoding="utf-8").rsplit("\n", 2)[-2])
        if not found:
            raise ValueError(f"{log}: no summary of pytest in the last line")
        total += int(found[0])
    return total


def describe(cpu: str) -> tuple[str, dict[str, str]]:
    """The features that NeoServe finds on an emulated CPU, and the feature set of the row chosen per op."""
    runner = Path(__file__).with_name("python.sh")
    answer = subprocess.run([runner, cpu, "-c", QUESTION], check=True, capture_output=True, text=True).stdout
    first, *lines = answer.splitlines()
    features, bits = first.split()
    vector = f" ({bits} bits)" if bits != "0" else ""
    return features.replace(",", " ") + vector, dict(line.split() for line in lines)


def main() -> int:
    """Command-line entry; returns the exit code."""
    logs, cpus = Path(sys.argv[1]), sys.argv[2:]
    print("| CPU | features | " + " | ".join(OPS) + " | tests passed |")
    print("|---" * (len(OPS) + 3) + "|")
    for cpu in cpus:
        features, rows = describe(cpu)
        cells = [cpu, features, *(rows[op] for op in OPS), str(tests_passed(logs, cpu))]
        print("| " + " | ".join(cells) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
