#!/usr/bin/env bash
# Builds NeoServe for AArch64 and tests it under emulated CPUs: tools/arm/test.sh [CPU...]
# Without arguments, one CPU for each class of instruction sets:
#   cortex-a72            NEON only                          neoverse-v1    + i8mm, bf16, SVE of 256 bits
#   neoverse-n1           NEON, fp16, dot product, LSE       neoverse-n2    + SVE2 of 128 bits
#   max,sve=off,sme=off   i8mm and bf16 without SVE
#   max,sve-max-vq=1, =2, =4   SVE2 with vectors of 128, 256 and 512 bits
# On each CPU one job asserts the features found and the rows chosen (tests/arm). Kernel rows run on all CPUs; the program, whole
# models and, if the default model is at hand, its fingerprint on neoverse-n1, -v1 and -n2. At the end comes a table.
#   JOBS=...         jobs at a time (default: one per processor)
#   PYTEST_ARGS=...  further arguments of pytest
#   PROMPTS=...      prompts of the fingerprint (default: 2 of 9)
#   MODELS=...       folder of the default model (default: NEOSERVE_TEST_MODELS or build/models, if it is there)
set -euo pipefail
cd "$(dirname "$0")/../.."
cpus=("$@")
if [ "${#cpus[@]}" -eq 0 ]; then
  # shellcheck disable=SC2054 # the commas belong to the name of one CPU
  cpus=(neoverse-n1 neoverse-v1 neoverse-n2 cortex-a72 max,sve=off,sme=off
    max,sve-max-vq=1 max,sve-max-vq=2 max,sve-max-vq=4)
fi
jobs="${JOBS:-$(nproc)}"
models="${MODELS:-${NEOSERVE_TEST_MODELS:-$PWD/build/models}}"
started=$SECONDS
tools/arm/setup.sh
tools/arm/build.sh
echo "arm: ready after $((SECONDS - started)) s"

# The parts. The rows of the neon and dotprod folders are the same code on every CPU that has them: where better ones
# are chosen they are left out, for they have run on the CPUs before. The largest shapes (marked slow) are left to x86-64.
dispatch=(tests/arm tests/kernels/test_force.py)
rows=(tests/kernels/test_rows_rowwise.py tests/kernels/test_rows_linear.py tests/kernels/test_rows_attention.py)
binding=(tests/kernels/test_reference_linear.py tests/kernels/test_reference_ops.py tests/kernels/test_phases.py
  tests/kernels/test_step_bounds.py tests/kernels/test_bind_bounds.py tests/kernels/test_sampler.py
  tests/kernels/test_threads.py)
program=(tests/unit/test_program_phases.py tests/unit/test_program_weights.py)
whole=(tests/models/test_same_bits.py tests/models/test_tiny.py tests/models/test_quantization.py)
newer="not (test_rows_linear and (_neon or _dotprod))"

# One line per job: CPU, name, arguments of pytest; the longest first, so that the processors end together.
list_jobs() {
  local cpu best
  for cpu in "${cpus[@]}"; do
    case "$cpu" in neoverse-n1 | neoverse-v1 | neoverse-n2)
      if [ -e "$models/smollm2-135m-instruct-q4_1.gguf" ]; then
        echo "1 $cpu|model|tests/models/test_fingerprint.py -k \"stored or int8\""
      fi ;;
    esac
  done
  for cpu in "${cpus[@]}"; do
    best="-k \"$newer\""
    case "$cpu" in
      neoverse-n1)
        echo "2 $cpu|rows|${rows[*]} -m \"not slow\""
        echo "3 $cpu|binding|${binding[*]} -m \"not slow\""
        echo "4 $cpu|program|${program[*]} ${whole[*]}" ;;
      neoverse-v1 | neoverse-n2)
        echo "3 $cpu|rows|${rows[*]} -m \"not slow\" $best"
        echo "4 $cpu|program|${program[*]} ${whole[*]}" ;;
      cortex-a72)
        echo "2 $cpu|rows|${rows[*]} tests/models/test_same_bits.py -m \"not slow\" -k \"not _dotprod\"" ;;
      *)
        echo "3 $cpu|rows|${rows[*]} tests/models/test_same_bits.py -m \"not slow\" $best" ;;
    esac
    echo "5 $cpu|dispatch|${dispatch[*]}"
  done
}

run_job() { # CPU NAME ARGUMENTS
  local begun=$SECONDS status=0 log="build/arm/logs/$1.$2.log" arguments
  eval "arguments=($3 ${PYTEST_ARGS:-})"
  # Two prompts of the fingerprint; all of them take minutes on each CPU (PROMPTS=9 make test-arm).
  NEOSERVE_TEST_PROMPTS="${PROMPTS:-2}" NEOSERVE_TEST_MODELS="$models" tools/arm/python.sh "$1" -m pytest -q \
    -p no:cacheprovider --durations=5 "${arguments[@]}" >"$log" 2>&1 || status=$?
  if [ "$status" -ne 0 ]; then
    sed "s/^/$1: /" "$log" >&2
    echo "arm: $1, $2: FAILED (exit code $status; 132 is an instruction that this CPU lacks)" >&2
    return "$status"
  fi
  echo "arm: $1, $2: $(tail -n 1 "$log") ($((SECONDS - begun)) s)"
}

if [ ! -e "$models/smollm2-135m-instruct-q4_1.gguf" ]; then
  echo "arm: $models has no smollm2-135m-instruct-q4_1.gguf: the default model is left out (make test-arm fetches it)"
fi
rm -rf build/arm/logs
mkdir -p build/arm/logs
pids=()
while IFS='|' read -r cpu name arguments; do
  while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do sleep 0.2; done
  run_job "$cpu" "$name" "$arguments" </dev/null &
  pids+=($!)
done < <(list_jobs | sort -s -k1,1n | cut -d' ' -f2-)
failed=0
for pid in "${pids[@]}"; do
  wait "$pid" || failed=1
done
if [ "$failed" -eq 0 ]; then
  python3 tools/arm/table.py build/arm/logs "${cpus[@]}"
  echo "arm: all passed in $((SECONDS - started)) s"
fi
exit "$failed"
