#!/usr/bin/env bash
# Runs the AArch64 Python with NeoServe under an emulated CPU: tools/arm/python.sh CPU ARGUMENT...
# e.g. tools/arm/python.sh neoverse-n1 -m pytest tests/kernels
set -euo pipefail
arm="$(cd "$(dirname "$0")/../.." && pwd)/build/arm"
cpu="$1"
shift
PYTHONPATH="$arm/tree:$arm/site" PYTHONDONTWRITEBYTECODE=1 NEOSERVE_EMULATED_CPU="$cpu" \
  exec "$arm/qemu-aarch64" -cpu "$cpu" -L "$arm/root" "$arm/root/usr/bin/$(cat "$arm/python-name")" "$@"
