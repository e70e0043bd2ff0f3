#!/usr/bin/env bash
# Goes through every execution of the thread pool's synchronisation that the C++ memory model allows (tests/native/model;
# docs/threads.md): the litmus tests of the model, the pool as it ships, and the pool with each memory order weakened.
# About half a minute. Any processor: the model does not use the machine's own memory order.
#   tools/test_memory_model.sh deep   larger scenarios instead; some minutes and up to 1 GB
#   CXX=...                           compiler (default: g++)
set -euo pipefail
cd "$(dirname "$0")/.."
build="build/memory_model"
mkdir -p "$build"
flags=(-std=c++20 -O3 -g -Wall -Wextra -Werror -I native)
model=tests/native/model
for name in machine fiber explorer; do
  "${CXX:-g++}" "${flags[@]}" -c "$model/$name.cpp" -o "$build/$name.o"
done
for program in litmus pool_model; do
  "${CXX:-g++}" "${flags[@]}" "$model/$program.cpp" "$build"/{machine,fiber,explorer}.o -o "$build/$program"
done
if [ "${1:-}" = deep ]; then
  timeout 3600 "$build/pool_model" deep
else
  timeout 120 "$build/litmus"
  timeout 300 "$build/pool_model"
  timeout 300 "$build/pool_model" mutations
fi
