#!/usr/bin/env bash
# Tells whether a change can alter what is built, tested or shipped: .github/scripts/changes.sh BASE HEAD
# Prints "code=true" or "code=false", a line for $GITHUB_OUTPUT. Text alone is false; what is not known is true.
set -euo pipefail
base="$1"
head="$2"
# The first push of a branch has no base: all zeros.
if ! git rev-parse --quiet --verify "$base^{commit}" >/dev/null; then
  echo "code=true"
  exit 0
fi
code=false
while IFS= read -r path; do
  case "$path" in
    # The wheel and the image hold these two, although they are texts.
    README.md | LICENSE) code=true ;;
    docs/*.md | *.md | .gitignore | .github/dependabot.yml) ;;
    *) code=true ;;
  esac
done < <(git diff --name-only "$base...$head")
echo "code=$code"
