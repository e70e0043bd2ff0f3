#!/usr/bin/env bash
# Builds NeoServe for AArch64 and runs the kernel tests under emulated CPUs: tools/arm/test.sh [CPU...]
# Without arguments, one CPU for each class of instruction sets:
#   neoverse-n1    NEON, fp16, dot product, LSE       neoverse-v1    + i8mm, bf16, SVE of 256 bits
#   cortex-a72     NEON only                          neoverse-n2    + SVE2 of 128 bits
#   max,sve=off,sme=off   i8mm and bf16 without SVE
#   JOBS=...         CPUs tested at a time (default: one per processor)
#   PYTEST_ARGS=...  further arguments of pytest
set -euo pipefail
cd "$(dirname "$0")/../.."
cpus=("$@")
if [ "${#cpus[@]}" -eq 0 ]; then
  cpus=(neoverse-n1 cortex-a72 neoverse-v1 neoverse-n2 max,sve=off,sme=off)
fi
jobs="${JOBS:-$(nproc)}"
started=$SECONDS
tools/arm/setup.sh
tools/arm/build.sh
echo "arm: ready after $((SECONDS - started)) s"

# The first CPU runs everything, with the portable reference and the bounds of the binding. The others run what differs
# on them: the choice of rows, whole models, and the rows; but not the largest shapes (marked slow), and of the products
# not those of the neon and dotprod folders where these are not the best (the same code has run on the first two).
everywhere=(tests/arm tests/kernels/test_force.py tests/kernels/test_rows_rowwise.py tests/kernels/test_rows_linear.py
  tests/kernels/test_rows_attention.py tests/models/test_same_bits.py)
run_cpu() { # CPU first?
  local begun=$SECONDS status=0 selection=("${everywhere[@]}")
  if [ "$2" -eq 1 ]; then
    selection=(tests/arm tests/kernels tests/models/test_same_bits.py)
  else
    selection+=(-m "not slow")
    if [ "$1" != cortex-a72 ]; then selection+=(-k "not (test_rows_linear and (_neon or _dotprod))"); fi
  fi
  # shellcheck disable=SC2086
  tools/arm/python.sh "$1" -m pytest -q -p no:cacheprovider "${selection[@]}" ${PYTEST_ARGS:-} \
    >"build/arm/$1.log" 2>&1 || status=$?
  if [ "$status" -ne 0 ]; then
    sed "s/^/$1: /" "build/arm/$1.log" >&2
    echo "arm: $1 FAILED (exit code $status; 132 is an instruction that this CPU lacks)" >&2
    return "$status"
  fi
  echo "arm: $1: $(tail -n 1 "build/arm/$1.log") ($((SECONDS - begun)) s)"
}

pids=()
first=1
for cpu in "${cpus[@]}"; do
  while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do sleep 0.2; done
  run_cpu "$cpu" "$first" &
  pids+=($!)
  first=0
done
failed=0
for pid in "${pids[@]}"; do
  wait "$pid" || failed=1
done
exit "$failed"
