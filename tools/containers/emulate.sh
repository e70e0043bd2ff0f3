#!/usr/bin/env bash
# Builds the Dockerfile and proves the image (smoke.sh), without a daemon, a registry or a machine of the architecture:
# tools/containers/emulate.sh [amd64|arm64...]   (default: amd64)
# The engine is Debian's podman, in namespaces of its own (namespace.py). The base image is made from the Debian mirror
# that apt is configured with, under the name that the Dockerfile gives it. A foreign architecture runs in qemu-user:
# every command of the Dockerfile, and then the server. All is kept in build/containers.
#   NEOSERVE_SKIP_BUILD=1   tests the image of the last run
#   NEOSERVE_OWN_COMPILER=1 emulates the compiler as well (about ten times slower). Else, for arm64, the build argument CXX
#                           names this machine's cross compiler of the same Debian, seen in the build through a mount
#   QEMU_CPU=...            emulated CPU in the tests (default: neoverse-n1)
# Needs Debian 12 or 13, root, and Linux 6.7 for a foreign architecture.
set -euo pipefail
cd "$(dirname "$0")/../.."
work="$PWD/build/containers"

install_engine() { # package... needed besides
  local missing=() package
  for package in podman buildah crun mmdebstrap arch-test "$@"; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
  done
  [ "${#missing[@]}" -gt 0 ] || return 0
  echo "containers: installing ${missing[*]}"
  apt-get -qq update
  DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends --yes "${missing[@]}" >/dev/null
}

install_emulator() { # architecture
  local emulator="qemu-aarch64"
  [ "$1" = arm64 ] || emulator="qemu-x86_64"
  if [ ! -x "$work/$emulator" ]; then
    echo "containers: unpacking $emulator"
    . tools/arm/debian.sh
    unpack_debian alone trixie "$(dpkg --print-architecture)" "$work/qemu" qemu-user
    mv "$work/qemu/usr/bin/$emulator" "$work/$emulator"
    rm -rf "$work/qemu"
  fi
  echo "${emulator#qemu-}:$work/$emulator"
}

# Debian's own base image is a minimal system without manuals; this is one too (usr-is-merged: without perl).
make_base() { # architecture
  [ ! -s "$work/base-$1.tar" ] || return 0
  echo "containers: making the base image of Debian 12 for $1"
  mmdebstrap --mode=root --format=tar --variant=minbase --skip=check/qemu,chroot/mount/sys --architectures="$1" \
    --hook-dir=/usr/share/mmdebstrap/hooks/merged-usr --include=usr-is-merged --dpkgopt=force-unsafe-io \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
    --customize-hook='rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/apt/*' \
    --customize-hook='rm -f "$1"/etc/apt/apt.conf.d/99mmdebstrap "$1"/etc/dpkg/dpkg.cfg.d/99mmdebstrap' \
    bookworm "$work/base-$1.tar.new" >"$work/base-$1.log" 2>&1 || { tail -n 20 "$work/base-$1.log" >&2; return 1; }
  rm -rf "$work/engine-$1" # what was built on another base
  mv "$work/base-$1.tar.new" "$work/base-$1.tar"
}

# There are no control groups and no networks of one's own in here; limits above the machine's are refused.
configure_engine() { # folder
  mkdir -p "$1"
  cat >"$1/containers.conf" <<EOF
[containers]
netns = "host"
default_ulimits = ["nofile=1024:$(ulimit -Hn)", "nproc=4096:4096"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
tmp_dir = "$1/tmp"
EOF
  cat >"$1/storage.conf" <<EOF
[storage]
driver = "overlay"
graphroot = "$1/storage"
runroot = "$1/run"
EOF
  # crun asks which kind of control groups there is, although it is to use none; a mixture of both is refused.
  if [ -d /sys/fs/cgroup/unified ]; then mount --bind /sys/fs/cgroup/unified /sys/fs/cgroup; fi
  export CONTAINERS_CONF="$1/containers.conf" CONTAINERS_STORAGE_CONF="$1/storage.conf"
}

# What this machine needs to reach its package index, for the commands in the container as well: its certificates.
network_options() { # folder
  local bundle="${PIP_CERT:-${SSL_CERT_FILE:-}}"
  [ -n "$bundle" ] || return 0
  printf '[global]\ncert = /run/host-certificates.crt\n' >"$1/pip.conf"
  echo "--volume=$bundle:/run/host-certificates.crt:ro"
  echo "--volume=$1/pip.conf:/etc/pip.conf:ro"
}

# This machine's compiler for the foreign architecture runs in the foreign root as it is: the kernel is this machine's,
# and its loader and libraries lie at places that a root of another architecture leaves free. Assembler and linker are
# found from the compiler's own place, the libraries also by the addresses in their linker scripts.
cross_options() { # folder
  local name=aarch64-linux-gnu cross="$1/cross"
  mkdir -p "$cross/bin" "$cross/lib/gcc-cross" "$cross/$name"
  cp -L "/usr/bin/$name-as" "/usr/bin/$name-ld" "$cross/bin/"
  cp -L "/usr/bin/$name-g++" "$cross/bin/g++"
  printf -- '--volume=%s:ro\n' "$cross:/run/cross" "/usr/lib/gcc-cross:/run/cross/lib/gcc-cross" \
    "/usr/$name:/run/cross/$name" "/usr/$name:/usr/$name" /lib64:/lib64 \
    /usr/lib/x86_64-linux-gnu:/usr/lib/x86_64-linux-gnu
  echo "--build-arg=CXX=/run/cross/bin/g++"
}

# Runs in the namespaces.
build_and_test() { # architecture
  local image="localhost/neoserve:$1" base options=() cross=() begun
  base="$(sed -n 's/^ARG BASE=//p' Dockerfile)"
  make_base "$1"
  configure_engine "$work/engine-$1"
  mapfile -t options < <(network_options "$work/engine-$1")
  if [ -z "${NEOSERVE_SKIP_BUILD:-}" ]; then
    podman image exists "$base" || podman import --quiet --arch "$1" "$work/base-$1.tar" "$base" >/dev/null
    if [ "$1" = arm64 ] && [ "$(dpkg --print-architecture)" = amd64 ] && [ -z "${NEOSERVE_OWN_COMPILER:-}" ]; then
      mapfile -t cross < <(cross_options "$work/engine-$1")
    fi
    begun=$SECONDS
    podman build --pull=never --isolation chroot --format docker --network host --platform "linux/$1" --tag "$image" \
      --build-arg SOURCE_DATE_EPOCH="$(git log -1 --format=%ct)" --build-arg REVISION="$(git rev-parse HEAD)" \
      "${options[@]}" ${cross[@]+"${cross[@]}"} . >"$work/build-$1.log" 2>&1 || { tail -n 40 "$work/build-$1.log" >&2; return 1; }
    echo "containers: $1 built in $((SECONDS - begun)) s (log: build/containers/build-$1.log)"
  fi
  if [ "$1" != "$(dpkg --print-architecture)" ]; then
    options+=("--env=QEMU_CPU=${QEMU_CPU:-neoverse-n1}")
  fi
  # Podman would have systemd run the health check, which is not there; smoke.sh runs its command.
  options+=(--cgroups=disabled --no-healthcheck)
  ENGINE=podman ENGINE_OPTIONS="${options[*]}" tools/containers/smoke.sh "$image"
}

if [ "${1:-}" = --inside ]; then
  build_and_test "$2"
  exit
fi
if [ "$(id -u)" -ne 0 ]; then
  echo "containers: this must run as root (it makes user namespaces with all ids)" >&2
  exit 1
fi
[ "$#" -gt 0 ] || set -- amd64
mkdir -p "$work"
for architecture in "$@"; do
  case "$architecture" in
    amd64 | arm64) ;;
    *) echo "containers: the architecture is '$architecture'; it must be amd64 or arm64" >&2; exit 1 ;;
  esac
  binfmt=()
  compiler=()
  if [ "$architecture" = arm64 ]; then compiler=(g++-aarch64-linux-gnu); fi
  if [ "$architecture" = "$(dpkg --print-architecture)" ]; then
    install_engine
  else
    install_engine ${compiler[@]+"${compiler[@]}"}
    binfmt=(--binfmt "$(install_emulator "$architecture" | tail -n 1)")
  fi
  python3 tools/containers/namespace.py ${binfmt[@]+"${binfmt[@]}"} "$0" --inside "$architecture"
done
