#!/usr/bin/env bash
# Writes anew the exact versions and hashes that the container image is built from: deploy/requirements.txt (what runs)
# and deploy/build-requirements.txt (what builds), for both architectures. Needs uv (pip install uv).
#   PYTHON_VERSION=...   of the image's Debian (default: 3.11)
set -euo pipefail
cd "$(dirname "$0")/../.."
version="${PYTHON_VERSION:-3.11}"

compile() { # output input...
  local output="$1"
  shift
  uv pip compile --no-config --universal --python-version "$version" --generate-hashes --upgrade --quiet \
    --no-emit-index-url --no-annotate --custom-compile-command tools/containers/lock.sh --output-file "$output" "$@"
}

build="$(mktemp --suffix .in)"
trap 'rm -f "$build"' EXIT
python3 - >"$build" <<'EOF'
import re
text = open("pyproject.toml", encoding="utf-8").read()
table = text.split("[build-system]", 1)[1].split("\n[", 1)[0]
print("\n".join(re.findall(r'"([^"]+)"', table.split("requires", 1)[1].split("]", 1)[0])))
print("cmake\nninja\npip")
EOF
compile deploy/requirements.txt pyproject.toml deploy/requirements.in
compile deploy/build-requirements.txt "$build"
