#!/usr/bin/env bash
# Builds the AArch64 release wheel (clang against Debian 11's libraries), checks it and unpacks it into build/arm/tree
# for the emulated tests; then compiles the same sources with g++, whose warnings and instructions are checked, too.
set -euo pipefail
cd "$(dirname "$0")/../.."
arm="$PWD/build/arm"
wheels="$PWD/build/wheels"

tools/wheels/build.sh aarch64 cp311
"$wheels/tools/bin/python" tools/wheels/check.py "$wheels"/neoserve-*-cp311-cp311-*aarch64.whl
rm -rf "$arm/tree"
"$wheels/tools/bin/python" -m zipfile -e "$wheels"/neoserve-*-cp311-cp311-*aarch64.whl "$arm/tree"

python="$wheels/python-311-x86_64/usr/bin/python3.11"
export PYTHONPATH="$wheels/backend" PATH="$wheels/tools/bin:$PATH"
cmake -S . -B "$arm/gcc" -G Ninja -DCMAKE_TOOLCHAIN_FILE="$PWD/cmake/aarch64-linux-gnu.cmake" \
  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_BUILD_TYPE=Release -DNEOSERVE_WERROR=ON \
  -DNEOSERVE_TARGET_PYTHON_INCLUDE="$wheels/headers-311-aarch64" \
  -DNEOSERVE_TARGET_SUFFIX=.cpython-311-aarch64-linux-gnu.so \
  -DPython_EXECUTABLE="$python" -Dnanobind_DIR="$("$python" -m nanobind --cmake_dir)" \
  >"$arm/cmake.log" 2>&1 || { cat "$arm/cmake.log" >&2; exit 1; }
grep -h 'NeoServe:' "$arm/cmake.log"
cmake --build "$arm/gcc" --parallel "$(nproc)" >"$arm/ninja.log" 2>&1 || { cat "$arm/ninja.log" >&2; exit 1; }
echo "arm: g++ compiles the same sources without a warning"
python tools/check_isa.py "$arm/gcc"
