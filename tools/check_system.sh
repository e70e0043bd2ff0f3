#!/usr/bin/env bash
# Checks what building and running NeoServe needs, before anything is made: Python >= 3.10 with venv and headers, a
# C++20 compiler, disk. Prints the path of the compiler chosen on standard output; every lack is told on standard
# error with the Debian package that fills it, and the exit code is 1.
#   PYTHON=...  interpreter to check (default: python3)
#   CXX=...     compiler to use (default: the first fit one among c++, g++, clang++ and their versioned names)
set -euo pipefail
cd "$(dirname "$0")/.."

need_kilobytes=2000000
failed=0
packages=()

lack() { # message [package]
  echo "check: $1" >&2
  failed=1
  if [ $# -gt 1 ]; then packages+=("$2"); fi
}

check_python() {
  local python="$1" version suffix
  if ! command -v "$python" >/dev/null; then
    lack "Python not found ($python); NeoServe needs Python 3.10 or newer" python3
    return
  fi
  version="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
  if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    lack "$python is Python $version; NeoServe needs 3.10 or newer (choose one by PYTHON=python3.11 make ...)"
    return
  fi
  # Debian names the packages of its default Python python3-*, those of others python3.X-*.
  suffix="$version"
  if [ "$(command -v "$python")" = /usr/bin/python3 ]; then suffix=3; fi
  if ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
    lack "$python cannot make virtual environments (modules venv and ensurepip)" "python$suffix-venv"
  fi
  if ! "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))'; then
    lack "the C headers of $python are missing (Python.h)" "python$suffix-dev"
  fi
}

# Whether a compiler is g++ >= 11 or clang++ >= 16 (by its own macros) and links a C++20 program.
compiler_fits() {
  local folder status=0
  command -v "$1" >/dev/null || return 1
  folder="$(mktemp -d)"
  cat >"$folder/a.cpp" <<'EOF'
#if defined(__clang__) ? __clang_major__ < 16 : __GNUC__ < 11
#error compiler too old
#endif
#include <bit>
#include <span>
#include <vector>
int main() { std::vector<int> v(4); return static_cast<int>(std::span<int>(v).size()) - std::popcount(15u); }
EOF
  "$1" -std=c++20 "$folder/a.cpp" -o "$folder/a" >/dev/null 2>&1 || status=1
  rm -rf "$folder"
  return $status
}

find_compiler() {
  local candidates=(c++ g++ clang++) name
  if [ -n "${CXX:-}" ]; then
    candidates=("$CXX")
  else
    candidates+=(g++-{15,14,13,12,11} clang++-{22,21,20,19,18,17,16})
  fi
  for name in "${candidates[@]}"; do
    if compiler_fits "$name"; then
      command -v "$name"
      return
    fi
  done
  return 1
}

check_python "${PYTHON:-python3}"
if ! compiler="$(find_compiler)"; then
  if [ -n "${CXX:-}" ]; then
    lack "CXX=$CXX does not build C++20; NeoServe needs g++ 11 or clang++ 16, or newer" g++
  else
    lack "no C++20 compiler found; NeoServe needs g++ 11 or clang++ 16, or newer" g++
  fi
fi
free_kilobytes="$(df -Pk . | awk 'NR == 2 { print $4 }')"
if [ "$free_kilobytes" -lt "$need_kilobytes" ]; then
  lack "$((free_kilobytes / 1000)) MB of disk are free in $PWD; NeoServe needs $((need_kilobytes / 1000)) MB to build"
fi
case "$(uname -m)" in
  x86_64 | aarch64) ;;
  *) lack "processor $(uname -m) is not supported; NeoServe runs on x86-64 and AArch64" ;;
esac

if [ "$failed" -ne 0 ]; then
  if [ "${#packages[@]}" -gt 0 ]; then
    echo "check: on Debian or Ubuntu install: sudo apt-get install ${packages[*]}" >&2
  fi
  exit 1
fi
echo "$compiler"
