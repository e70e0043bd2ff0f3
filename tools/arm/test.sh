#!/usr/bin/env bash
# Builds NeoServe for AArch64 and runs the kernel tests under emulated CPUs: tools/arm/test.sh [CPU...]
# Without arguments, one CPU for each class of instruction sets:
#   cortex-a72     NEON only                          neoverse-v1    + i8mm, bf16, SVE of 256 bits
#   neoverse-n1    + dot product, fp16, LSE atomics   neoverse-n2    + SVE2 of 128 bits
#   max,sve=off,sme=off   i8mm and bf16 without SVE
set -euo pipefail
cd "$(dirname "$0")/../.."
cpus=("$@")
if [ "${#cpus[@]}" -eq 0 ]; then
  cpus=(cortex-a72 neoverse-n1 neoverse-v1 neoverse-n2 max,sve=off,sme=off)
fi
started=$SECONDS
tools/arm/setup.sh
tools/arm/build.sh
echo "arm: ready after $((SECONDS - started)) s"

for cpu in "${cpus[@]}"; do
  started=$SECONDS
  echo "arm: $cpu"
  tools/arm/python.sh "$cpu" -m pytest -q -p no:cacheprovider tests/arm tests/kernels tests/models/test_same_bits.py ${PYTEST_ARGS:-}
  echo "arm: $cpu passed in $((SECONDS - started)) s"
done
