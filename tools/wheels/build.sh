#!/usr/bin/env bash
# Builds release wheels for x86-64 and AArch64 on an x86-64 Debian 12 or 13, into build/wheels:
#   tools/wheels/build.sh [x86_64|aarch64]... [cp310|cp311|abi3]...     default: all six
# abi3 is the wheel for Python 3.12 and all later ones (stable ABI). tools/wheels/setup.sh fetches what is needed, and
# says what NEOSERVE_PYTHON_CP310 is for. tools/wheels/check.sh checks and imports the wheels.
#   JOBS=...               parallel compilations (default: one per processor)
#   SOURCE_DATE_EPOCH=...  time stamp inside the wheels (default: that of the last commit): equal sources, equal bytes
set -euo pipefail
cd "$(dirname "$0")/../.."
wheels="$PWD/build/wheels"

architectures=()
editions=()
for argument in "$@"; do
  case "$argument" in
    x86_64 | aarch64) architectures+=("$argument") ;;
    cp310 | cp311 | abi3) editions+=("$argument") ;;
    *)
      echo "wheels: argument '$argument' is none of x86_64, aarch64, cp310, cp311, abi3" >&2
      exit 2
      ;;
  esac
done
if [ "${#architectures[@]}" -eq 0 ]; then architectures=(x86_64 aarch64); fi
if [ "${#editions[@]}" -eq 0 ]; then editions=(cp310 cp311 abi3); fi

tools/wheels/setup.sh
compiler="$(cat "$wheels/compiler")"
if [[ " ${editions[*]} " == *" cp310 "* && ! -e "$wheels/python-310" ]]; then
  echo "wheels: no Python 3.10 with headers was found; neither Debian nor PyPI has one. Name one by" >&2
  echo "wheels: NEOSERVE_PYTHON_CP310=/path/to/python3.10, or build the others: tools/wheels/build.sh cp311 abi3" >&2
  exit 1
fi
export SOURCE_DATE_EPOCH="${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 315532800)}"
export CMAKE_BUILD_PARALLEL_LEVEL="${JOBS:-$(nproc)}" CMAKE_GENERATOR=Ninja
# Most objects do not depend on the Python: what one edition has compiled, the next ones take over.
export CMAKE_CXX_COMPILER_LAUNCHER=ccache CCACHE_DIR="$wheels/ccache" CCACHE_NOHASHDIR=1
unset CXX CC CFLAGS CXXFLAGS LDFLAGS # the toolchain file decides

build() { # ARCH EDITION
  local arch="$1" edition="$2" version python suffix tag objects log started=$SECONDS
  case "$edition" in
    cp310) version=310 python="$(cat "$wheels/python-310")" suffix=".cpython-310-$arch-linux-gnu.so" ;;
    cp311) version=311 python="$wheels/python-311-x86_64/usr/bin/python3.11" suffix=".cpython-311-$arch-linux-gnu.so" ;;
    abi3) version=313 python="$wheels/python-313-x86_64/usr/bin/python3.13" suffix=.abi3.so ;;
  esac
  objects="$wheels/objects/$edition-$arch"
  log="$wheels/$edition-$arch.log"
  rm -rf "$wheels/made" "$wheels/objects/$edition-$arch"
  mkdir -p "$wheels/made" "$wheels/objects"
  # The backend's interpreter is the target's version on x86-64; _PYTHON_HOST_PLATFORM and SETUPTOOLS_EXT_SUFFIX name the
  # target's architecture. With CI set it waits 20 s, not 5, for cmake's first answer, which a busy machine needs.
  if ! CI="${CI:-true}" PATH="$wheels/tools/bin:$PATH" PYTHONPATH="$wheels/backend" PYTHONNOUSERSITE=1 \
    _PYTHON_HOST_PLATFORM="linux-$arch" SETUPTOOLS_EXT_SUFFIX="$suffix" \
    "$python" -m pip --disable-pip-version-check wheel --no-build-isolation --no-deps -v -w "$wheels/made" \
    -C build-dir="$objects" \
    -C cmake.define.CMAKE_TOOLCHAIN_FILE="$PWD/cmake/wheel-linux.cmake" \
    -C cmake.define.NEOSERVE_WHEEL_ARCH="$arch" \
    -C cmake.define.NEOSERVE_WHEEL_CLANG="$compiler" \
    -C cmake.define.NEOSERVE_WHEEL_SYSROOT="$wheels/sysroot-$arch" \
    -C cmake.define.NEOSERVE_TARGET_PYTHON_INCLUDE="$wheels/headers-$version-$arch" \
    -C cmake.define.NEOSERVE_TARGET_SUFFIX="$suffix" \
    -C cmake.define.NEOSERVE_WERROR=ON . >"$log" 2>&1; then
    cat "$log" >&2
    echo "wheels: the build of $edition for $arch failed (log: $log)" >&2
    exit 1
  fi
  "$wheels/tools/bin/python" tools/check_isa.py "$objects"
  "$wheels/tools/bin/python" -m wheel tags --remove --platform-tag "manylinux_2_28_$arch" "$wheels"/made/*.whl >/dev/null
  tag="$(basename "$wheels"/made/*.whl)"
  mv "$wheels"/made/*.whl "$wheels/"
  rmdir "$wheels/made"
  echo "wheels: $tag ($((SECONDS - started)) s, clang $compiler)"
}

for arch in "${architectures[@]}"; do
  for edition in "${editions[@]}"; do
    rm -f "$wheels"/neoserve-*-"${edition/abi3/cp312-abi3}"-*"$arch".whl
    build "$arch" "$edition"
  done
done
