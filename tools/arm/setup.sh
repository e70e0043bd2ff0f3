#!/usr/bin/env bash
# Makes what the emulated AArch64 tests need (nothing is done twice): what release wheels are built and checked with
# (tools/wheels/setup.sh: clang, Debian 11's libraries, an unpacked AArch64 Python 3.11, qemu), and in build/arm
#   site/            the Python packages that NeoServe and its tests import, for AArch64
# Needs an x86-64 Debian 12 or 13. Missing system packages are installed through apt-get when run as root, else named.
set -euo pipefail
cd "$(dirname "$0")/../.."
arm="$PWD/build/arm"
wheels="$PWD/build/wheels"
mkdir -p "$arm"

tools/wheels/setup.sh
if ! command -v aarch64-linux-gnu-g++ >/dev/null; then
  if [ "$(id -u)" -ne 0 ]; then
    echo "arm: a package is missing; run: sudo apt-get install g++-aarch64-linux-gnu" >&2
    exit 1
  fi
  echo "arm: installing g++-aarch64-linux-gnu"
  DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends --yes g++-aarch64-linux-gnu >/dev/null
fi

PYTHONPATH="$wheels/backend" "$wheels/tools/bin/python" - >"$arm/requirements.txt" <<'PYTHON'
import sys
if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib
print("\n".join(tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]))
print("httpx\nhypothesis\npytest\npytest-asyncio\npytest-timeout\nsafetensors")
PYTHON
if ! cmp -s "$arm/requirements.txt" "$arm/site/.complete"; then
  echo "arm: downloading the AArch64 editions of the Python packages"
  rm -rf "$arm/site"
  "$wheels/tools/bin/pip" -q --disable-pip-version-check install --target "$arm/site" --only-binary :all: \
    --implementation cp --python-version 3.11 \
    --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 \
    -r "$arm/requirements.txt"
  cp "$arm/requirements.txt" "$arm/site/.complete"
fi
