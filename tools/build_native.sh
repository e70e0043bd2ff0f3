#!/usr/bin/env bash
# Incremental development build: compiles native/ in build/dev and puts the extension beside the Python sources, so
# that PYTHONPATH=python runs the working tree.
#   PYTHON=...     interpreter to build for (default: .venv/bin/python)
#   BUILD_DIR=...  build folder (default: build/dev)
#   JOBS=...       parallel compilations (default: all cores)
# Further arguments go to CMake, e.g. -DNEOSERVE_SANITIZE=thread -DCMAKE_BUILD_TYPE=RelWithDebInfo.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-.venv/bin/python}"
build_dir="${BUILD_DIR:-build/dev}"
jobs="${JOBS:-$(nproc)}"

scripts="$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')"
PATH="$scripts:$PATH"
if ! command -v ninja >/dev/null || ! "$python" -m nanobind --version >/dev/null 2>&1; then
  echo "build_native: nanobind, cmake or ninja is missing; run: $python -m pip install nanobind cmake ninja" >&2
  exit 1
fi
mkdir -p "$build_dir"
exec 9>"$build_dir.lock" && flock 9 # two builds at once would disturb each other
cmake -S . -B "$build_dir" -G Ninja -DPython_EXECUTABLE="$("$python" -c "import sys; print(sys.executable)")" \
  -DCMAKE_BUILD_TYPE=Release "$@" >"$build_dir.log" 2>&1 || { cat "$build_dir.log" >&2; exit 1; }
grep -h 'NeoServe:' "$build_dir.log" || true
cmake --build "$build_dir" --parallel "$jobs"

# Replaced by rename, so that a process which has the old one mapped keeps running on it.
for library in "$build_dir"/_native*.so; do
  target="python/neoserve/$(basename "$library")"
  if ! cmp -s "$library" "$target"; then
    cp "$library" "$target.new" && mv -f "$target.new" "$target"
  fi
done
