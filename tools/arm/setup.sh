#!/usr/bin/env bash
# Makes what the emulated AArch64 tests need, in build/arm (about 400 MB, one minute; nothing is done twice):
#   qemu-aarch64   qemu-user 10, which knows neoverse-n1, -v1 and -n2
#   root/          an unpacked AArch64 Debian with Python
#   site/          the Python packages that NeoServe and its tests import, for AArch64
#   tools/         virtual environment with cmake, ninja, nanobind for the cross build
# Needs Debian 12 or 13. Missing system packages are installed through apt-get when run as root, else named.
set -euo pipefail
cd "$(dirname "$0")/../.."
. tools/arm/debian.sh
arm="$PWD/build/arm"
mkdir -p "$arm"

# qemu 7.2 of Debian 12 lacks neoverse-v1 and -n2, so the static one of Debian 13 is unpacked everywhere.
qemu_suite=trixie
suite="$(. /etc/os-release && echo "${VERSION_CODENAME:-}")"
case "$suite" in
  bookworm | trixie) ;;
  *)
    echo "arm: this is not Debian 12 (bookworm) or 13 (trixie), but '$suite'; run make test-arm there" >&2
    exit 1
    ;;
esac

missing=()
for package in g++-aarch64-linux-gnu binutils-aarch64-linux-gnu python3 python3-venv; do
  dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
if [ "${#missing[@]}" -gt 0 ]; then
  if [ "$(id -u)" -ne 0 ]; then
    echo "arm: packages are missing; run: sudo apt-get install ${missing[*]}" >&2
    exit 1
  fi
  echo "arm: installing ${missing[*]}"
  apt-get -qq update
  DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends --yes "${missing[@]}" >/dev/null
fi
if ! debian_mirror >/dev/null 2>&1; then
  if [ "$(id -u)" -eq 0 ]; then apt-get -qq update; fi
  debian_mirror >/dev/null
fi

if [ ! -x "$arm/qemu-aarch64" ]; then
  echo "arm: unpacking qemu"
  unpack_debian alone "$qemu_suite" "$(dpkg --print-architecture)" "$arm/qemu" qemu-user
  mv "$arm/qemu/usr/bin/qemu-aarch64" "$arm/qemu-aarch64"
  rm -rf "$arm/qemu"
fi

if [ ! -e "$arm/root/.complete" ]; then
  echo "arm: unpacking an AArch64 Python ($suite)"
  rm -rf "$arm/root"
  unpack_debian closure "$suite" arm64 "$arm/root" python3 libpython3-dev libstdc++6
  # Debian 13 has its libraries below usr only; the loader is looked for in /lib.
  if [ ! -e "$arm/root/lib" ]; then ln -s usr/lib "$arm/root/lib"; fi
  touch "$arm/root/.complete"
fi
python_name="$(cd "$arm/root/usr/bin" && ls python3.?? | head -n 1)"
echo "$python_name" >"$arm/python-name"

# The cross build asks its own interpreter for the version, which must be the target's.
if ! /usr/bin/python3 -c "import sys; sys.exit('python%d.%d' % sys.version_info[:2] != '$python_name')"; then
  echo "arm: /usr/bin/python3 is not $python_name; install the python3 package of $suite" >&2
  exit 1
fi
if [ ! -e "$arm/tools/.complete" ]; then
  echo "arm: installing cmake, ninja, nanobind"
  /usr/bin/python3 -m venv "$arm/tools"
  "$arm/tools/bin/pip" -q --disable-pip-version-check install cmake ninja 'nanobind>=2.4,<4'
  touch "$arm/tools/.complete"
fi

"$arm/tools/bin/python" - >"$arm/requirements.txt" <<'EOF'
import tomllib
print("\n".join(tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]))
print("hypothesis\npytest\npytest-asyncio\npytest-timeout\nsafetensors")
EOF
if ! cmp -s "$arm/requirements.txt" "$arm/site/.complete"; then
  echo "arm: downloading the AArch64 editions of the Python packages"
  rm -rf "$arm/site"
  "$arm/tools/bin/pip" -q --disable-pip-version-check install --target "$arm/site" --only-binary :all: \
    --implementation cp --python-version "${python_name#python}" \
    --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 \
    -r "$arm/requirements.txt"
  cp "$arm/requirements.txt" "$arm/site/.complete"
fi
