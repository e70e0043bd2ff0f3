#!/usr/bin/env bash
# Fetches the default model with the installed neoserve and prints the folder in which the tests find it by its usual
# name. A folder named by NEOSERVE_TEST_MODELS is taken as it is.  tools/test_models.sh VENV
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -n "${NEOSERVE_TEST_MODELS:-}" ]; then
  echo "$NEOSERVE_TEST_MODELS"
  exit 0
fi
"$1/bin/neoserve" pull >&2
path="$("$1/bin/python" -c 'from neoserve.formats.source import resolve_model; print(resolve_model(None).path)')"
mkdir -p build/models
ln -sfn "$path" build/models/smollm2-135m-instruct-q4_1.gguf
echo "$PWD/build/models"
