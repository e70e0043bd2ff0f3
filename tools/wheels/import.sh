#!/usr/bin/env bash
# Installs every wheel of build/wheels (or those given) into a clean environment of each fit Python at hand and lets the
# default model answer: tools/wheels/import.sh [WHEEL...]
# x86-64: the unpacked Pythons of tools/wheels/setup.sh, and python3.12 to python3.14 where they are installed. AArch64:
# the unpacked Pythons under an emulated CPU; for cp310 there is none.
#   CPU=...   emulated CPU (default: neoverse-n1)
set -euo pipefail
cd "$(dirname "$0")/../.."
wheels="$PWD/build/wheels"
cpu="${CPU:-neoverse-n1}"
given=("$@")
if [ "${#given[@]}" -eq 0 ]; then given=("$wheels"/neoserve-*.whl); fi
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
export PYTHONNOUSERSITE=1 PYTHONDONTWRITEBYTECODE=1
unset PYTHONPATH PYTHONHOME
pip() { "$wheels/tools/bin/pip" -q --disable-pip-version-check "$@" 2> >(grep -v '^WARNING: Location' >&2); }

answer() { # LABEL COMMAND...: the command is a Python that finds the installed wheel
  local label="$1" text
  shift
  (
    cd "$work"
    "$@" -c 'import neoserve._native as native; print(native.__file__, native.cpu_features())' >"$work/import.txt"
    grep -q "$work/" "$work/import.txt" || { echo "wheels: $label: imported from elsewhere: $(cat "$work/import.txt")" >&2; exit 1; }
    text="$("$@" -m neoserve generate "The capital of France is" --max-tokens 3 --temperature 0)"
    echo "wheels: $label: $(sed 's/.*\[/[/' "$work/import.txt") answers: $text"
    grep -q Paris <<<"$text"
  ) || { echo "wheels: $label FAILED" >&2; exit 1; }
}

pythons_for() { # EDITION
  local version
  case "$1" in
    cp310) cat "$wheels/python-310" ;;
    cp311) echo "$wheels/python-311-x86_64/usr/bin/python3.11" ;;
    abi3)
      echo "$wheels/python-313-x86_64/usr/bin/python3.13"
      for version in 3.12 3.13 3.14; do
        # A version manager's stand-in may be there without the Python.
        if "python$version" -c 'import venv' 2>/dev/null; then "python$version" -c 'import sys; print(sys.executable)'; fi
        find "$HOME/.pyenv/versions" -maxdepth 3 -path "*/$version.*/bin/python$version" 2>/dev/null
      done | sort -u
      ;;
  esac
}

import_x86() { # WHEEL EDITION
  local python name
  for python in $(pythons_for "$2"); do
    name="$("$python" -c 'import platform; print(platform.python_version(), "glibc", platform.libc_ver()[1])')"
    rm -rf "$work/venv"
    "$python" -m venv --without-pip "$work/venv"
    pip --python "$work/venv/bin/python" install "$1"
    answer "$2 x86_64, Python $name" "$work/venv/bin/python"
  done
}

import_aarch64() { # WHEEL EDITION
  local version root
  case "$2" in
    cp310)
      echo "wheels: cp310 aarch64: not imported, there is no AArch64 Python 3.10 here (its symbols are checked by check.py)"
      return
      ;;
    cp311) version=3.11 ;;
    abi3) version=3.13 ;;
  esac
  root="$wheels/python-${version/./}-aarch64"
  rm -rf "$work/site"
  pip install --target "$work/site" --only-binary :all: --implementation cp --python-version "$version" \
    --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 "$1"
  answer "$2 aarch64, Python $version on $cpu" env PYTHONPATH="$work/site" \
    "$wheels/qemu-aarch64" -cpu "$cpu" -L "$root" "$root/usr/bin/python$version"
}

for wheel in "${given[@]}"; do
  wheel="$(realpath "$wheel")"
  case "$(basename "$wheel")" in
    *-cp310-cp310-*) edition=cp310 ;;
    *-cp311-cp311-*) edition=cp311 ;;
    *-cp312-abi3-*) edition=abi3 ;;
    *)
      echo "wheels: $wheel is not one that tools/wheels/build.sh made" >&2
      exit 2
      ;;
  esac
  case "$wheel" in
    *aarch64.whl) import_aarch64 "$wheel" "$edition" ;;
    *) import_x86 "$wheel" "$edition" ;;
  esac
done
