#!/usr/bin/env bash
# Compiles tests/native/thread_pool_stress.cpp with ThreadSanitizer and runs it (about 20 s). A race, a wrong result or
# a hang of two minutes fails.
#   CXX=...   compiler (default: g++)
set -euo pipefail
cd "$(dirname "$0")/.."
build="build/tsan"
mkdir -p "$build"
case "$(uname -m)" in
  x86_64) baseline=(-march=x86-64-v2) ;;
  aarch64) baseline=(-march=armv8-a -moutline-atomics) ;;
  *) echo "test_tsan: processor $(uname -m) is not supported" >&2 && exit 1 ;;
esac
"${CXX:-g++}" -std=c++20 -O1 -g -Wall -Wextra -Werror -fsanitize=thread "${baseline[@]}" -I native \
  tests/native/thread_pool_stress.cpp native/core/thread_pool.cpp -pthread -o "$build/thread_pool_stress"
TSAN_OPTIONS="halt_on_error=1 exitcode=66" timeout 120 "$build/thread_pool_stress"
