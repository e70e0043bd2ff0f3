#!/usr/bin/env bash
# Runs the kernel tests on the AVX-VNNI and AVX-512 VNNI rows on a CPU that has AVX2 alone: the folders are compiled
# through SIMDe (tests/kernels/simde/immintrin.h) in build/emulated, beside a copy of the Python sources. Nothing of it
# goes into a wheel. The default model, if it is at hand, must show the fingerprint of every other CPU. It proves the logic of the rows, not the instructions a compiler picks (docs/testing.md).
#   PYTHON=...   interpreter with the test packages and nanobind, cmake, ninja (default: .venv/bin/python)
# Arguments go to pytest. Needs Debian's libsimde-dev.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-.venv/bin/python}"
if [ ! -e /usr/include/simde/x86/avx512.h ]; then
  echo "test_emulated_x86: SIMDe is missing; run: apt-get install libsimde-dev" >&2
  exit 1
fi
if [ "$(uname -m)" != x86_64 ] || ! grep -qw avx2 /proc/cpuinfo; then
  echo "test_emulated_x86: needs an x86-64 CPU with AVX2" >&2
  exit 1
fi
build="build/emulated"
scripts="$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')"
PATH="$scripts:$PATH"
mkdir -p "$build"
cmake -S . -B "$build/native" -G Ninja -DNEOSERVE_EMULATE=ON -DCMAKE_BUILD_TYPE=Release \
  -DPython_EXECUTABLE="$("$python" -c 'import sys; print(sys.executable)')" \
  >"$build/cmake.log" 2>&1 || { cat "$build/cmake.log" >&2; exit 1; }
grep -h 'NeoServe:' "$build/cmake.log"
cmake --build "$build/native" --parallel "$(nproc)" >"$build/ninja.log" 2>&1 || { cat "$build/ninja.log" >&2; exit 1; }

rm -rf "$build/tree"
mkdir -p "$build/tree"
cp -r python/neoserve "$build/tree/"
find "$build/tree" \( -name '*.so' -o -name __pycache__ \) -prune -exec rm -rf {} +
cp "$build"/native/_native*.so "$build/tree/neoserve/"

features=avx2,avx_vnni,avx512,avx512_vnni
rows=linear_int8_channel_avx512_vnni,linear_int8_group_avx512_vnni,linear_int4_group_avx512_vnni,attention_bf16_avx512_vnni
PYTHONPATH="$PWD/$build/tree" PYTHONDONTWRITEBYTECODE=1 NEOSERVE_EXPECT_FEATURES="$features" NEOSERVE_EXPECT_ROWS="$rows" \
  NEOSERVE_TEST_PROMPTS="${PROMPTS:-2}" NEOSERVE_TEST_MODELS="${NEOSERVE_TEST_MODELS:-$PWD/build/models}" exec "$python" -m pytest -q -p no:cacheprovider \
  tests/kernels tests/models/test_same_bits.py tests/models/test_fingerprint.py -m "not slow" "$@"
