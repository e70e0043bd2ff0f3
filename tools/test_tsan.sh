#!/usr/bin/env bash
# The native library under the sanitizers: the thread pool under ThreadSanitizer; a small transformer from token ids to
# sampled tokens (tests/native/program_stress.cpp) under ThreadSanitizer, and under AddressSanitizer with
# UndefinedBehaviorSanitizer. A race, a stray access, undefined behaviour, other bits than one thread gives, or a hang
# fails. Then the behaviour of the pool without a sanitizer, since it measures CPU time. Two to three minutes.
#   CXX=...   compiler (default: g++)
set -euo pipefail
cd "$(dirname "$0")/.."
case "$(uname -m)" in
  x86_64) baseline=(-march=x86-64-v2) folder=avx2 kernels="x86_64/avx2" kernel_flags=(-mavx2 -mfma -mf16c) ;;
  aarch64) baseline=(-march=armv8-a -moutline-atomics) folder=neon kernels="aarch64/neon" kernel_flags=(-march=armv8-a) ;;
  *) echo "test_tsan: processor $(uname -m) is not supported" >&2 && exit 1 ;;
esac
cxx="${CXX:-g++}"
# As CMake writes it (cmake/NeoServeKernels.cmake): one folder of kernels is enough here.
mkdir -p build/tsan/generated
echo "NEOSERVE_KERNEL_FOLDER($folder)" >build/tsan/generated/kernel_folders.inc
common=(-std=c++20 -O1 -g -Wall -Wextra -Werror -fno-omit-frame-pointer -ffp-contract=off "${baseline[@]}"
  -I native -I build/tsan/generated)

# build FOLDER SANITIZER_FLAGS...: FOLDER/program_stress and FOLDER/thread_pool_stress
build() {
  local out="$1"
  shift
  rm -rf "$out" && mkdir -p "$out"
  "$cxx" "${common[@]}" "$@" "${kernel_flags[@]}" -fno-exceptions -fno-rtti -c "native/kernels/$kernels/rows.cpp" \
    -o "$out/kernels.o" &
  local kernels_job=$!
  local source objects=()
  for source in native/core/*.cpp native/ops/*.cpp native/exec/*.cpp native/cpus/*.cpp; do
    "$cxx" "${common[@]}" "$@" -c "$source" -o "$out/$(basename "$(dirname "$source")")_$(basename "$source" .cpp).o"
    objects+=("$out/$(basename "$(dirname "$source")")_$(basename "$source" .cpp).o")
  done
  wait "$kernels_job"
  "$cxx" "${common[@]}" "$@" tests/native/program_stress.cpp "${objects[@]}" "$out/kernels.o" -pthread \
    -o "$out/program_stress"
  "$cxx" "${common[@]}" "$@" tests/native/thread_pool_stress.cpp "$out"/core_{thread_pool,system_sync}.o -pthread \
    -o "$out/thread_pool_stress"
}

build build/tsan/thread -fsanitize=thread
export TSAN_OPTIONS="halt_on_error=1 exitcode=66"
timeout 300 build/tsan/thread/thread_pool_stress
timeout 300 build/tsan/thread/program_stress 70 23
build build/tsan/address -fsanitize=address,undefined -fno-sanitize-recover=all
export ASAN_OPTIONS="detect_stack_use_after_return=1" UBSAN_OPTIONS="print_stacktrace=1"
timeout 300 build/tsan/address/thread_pool_stress
timeout 300 build/tsan/address/program_stress 130 9

"$cxx" "${common[@]}" -O2 tests/native/thread_pool_behaviour.cpp native/core/{thread_pool,system_sync}.cpp -pthread \
  -o build/tsan/thread_pool_behaviour
timeout 300 build/tsan/thread_pool_behaviour
