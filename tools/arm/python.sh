#!/usr/bin/env bash
# Runs the AArch64 Python with NeoServe under an emulated CPU: tools/arm/python.sh CPU ARGUMENT...
# e.g. tools/arm/python.sh neoverse-n1 -m pytest tests/kernels
set -euo pipefail
build="$(cd "$(dirname "$0")/../.." && pwd)/build"
root="$build/wheels/python-311-aarch64"
cpu="$1"
shift
PYTHONPATH="$build/arm/tree:$build/arm/site" PYTHONDONTWRITEBYTECODE=1 NEOSERVE_EMULATED_CPU="$cpu" \
  exec "$build/wheels/qemu-aarch64" -cpu "$cpu" -L "$root" "$root/usr/bin/python3.11" "$@"
