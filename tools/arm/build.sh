#!/usr/bin/env bash
# Cross-compiles the extension for the unpacked AArch64 Python (tools/arm/setup.sh makes it), checks its instructions
# and puts it beside a copy of the Python sources in build/arm/tree. Incremental.
#   CXX=...   cross compiler (default: aarch64-linux-gnu-g++)
set -euo pipefail
cd "$(dirname "$0")/../.."
arm="$PWD/build/arm"
python_name="$(cat "$arm/python-name")"
version="${python_name#python}"
PATH="$arm/tools/bin:$PATH"

cmake -S . -B "$arm/native" -G Ninja -DCMAKE_TOOLCHAIN_FILE="$PWD/cmake/aarch64-linux-gnu.cmake" \
  -DCMAKE_CXX_COMPILER="${CXX:-aarch64-linux-gnu-g++}" -DCMAKE_BUILD_TYPE=Release -DNEOSERVE_WERROR=ON \
  -DNEOSERVE_TARGET_PYTHON_INCLUDE="$arm/root/usr/include/$python_name" \
  -DNEOSERVE_TARGET_SUFFIX=".cpython-${version/./}-aarch64-linux-gnu.so" \
  -DPython_EXECUTABLE="$arm/tools/bin/python" -Dnanobind_DIR="$(python -m nanobind --cmake_dir)" \
  >"$arm/cmake.log" 2>&1 || { cat "$arm/cmake.log" >&2; exit 1; }
grep -h 'NeoServe:' "$arm/cmake.log"
cmake --build "$arm/native" --parallel "$(nproc)" >"$arm/ninja.log" 2>&1 || { cat "$arm/ninja.log" >&2; exit 1; }
python tools/check_isa.py "$arm/native"

rm -rf "$arm/tree"
mkdir -p "$arm/tree"
cp -r python/neoserve "$arm/tree/"
find "$arm/tree" \( -name '*.so' -o -name __pycache__ \) -prune -exec rm -rf {} +
cp "$arm"/native/_native*.so "$arm/tree/neoserve/"
