#!/usr/bin/env bash
# Proves a built image by running it: tools/containers/smoke.sh IMAGE
# What is in it and what is not, its size, the server as the user it names, a chat, the health check in good and bad
# times, the end by SIGTERM, and the server again offline, on a read-only root, without capabilities, as a user that
# the image does not know. Prints one line for each; ends at the first that does not hold.
#   ENGINE=...          docker (default) or podman
#   ENGINE_OPTIONS=...  further arguments of `ENGINE run`
#   HOST_PORT=...       port of this machine that is published (default: 8000; in the host's network it must be 8000)
#   LIMIT_MB=...        how large the unpacked image may be (default: 300)
#   START_SECONDS=...   how long the server may take until it is ready (default: 300; the first start fetches a model)
set -euo pipefail
image="$1"
engine="${ENGINE:-docker}"
read -r -a options <<<"${ENGINE_OPTIONS:-}"
port="${HOST_PORT:-8000}"
limit="${LIMIT_MB:-300}"
patience="${START_SECONDS:-300}"
name="neoserve-smoke-$$"
python=/opt/neoserve/bin/python
python_here="$(command -v python3)"

fail() {
  echo "smoke: FAILED: $1" >&2
  "$engine" logs "$name" 2>&1 | tail -n 20 >&2 || true
  exit 1
}
ok() { echo "smoke: $1"; }
tidy() {
  "$engine" rm --force --volumes "$name" >/dev/null 2>&1 || true
  "$engine" volume rm "$name" >/dev/null 2>&1 || true
}
trap tidy EXIT

inspect() { "$engine" image inspect --format "$1" "$image"; }
once() { # command argument...: in a new container, with the image's user
  "$engine" run --rm ${options[@]+"${options[@]}"} --entrypoint "$1" "$image" "${@:2}"
}
state() { "$engine" inspect --format "{{.State.$1}}" "$name"; }
ask() { # path [body]: prints the answer; asked from within, so that it works without a network as well
  "$engine" exec "$name" "$python" -c '
import sys, urllib.request
body = sys.argv[2].encode() if len(sys.argv) > 2 else None
request = urllib.request.Request("http://127.0.0.1:8000" + sys.argv[1], body, {"Content-Type": "application/json"})
print(urllib.request.urlopen(request, timeout=120).read().decode())' "$@"
}
wait_ready() {
  local begun=$SECONDS
  until ask /health >/dev/null 2>&1; do
    [ "$(state Running)" = true ] || fail "the server has ended with exit code $(state ExitCode)"
    [ $((SECONDS - begun)) -lt "$patience" ] || fail "the server is not ready after $patience s"
    sleep 1
  done
  ok "ready after $((SECONDS - begun)) s"
}
chat() {
  local answer
  answer="$(ask /v1/chat/completions '{"model": "SmolLM2-135M-Instruct", "temperature": 0, "max_tokens": 24,
    "messages": [{"role": "user", "content": "What is the capital of France?"}]}')"
  grep -q Paris <<<"$answer" || fail "the chat answered $answer"
  ok "chat: $("$python_here" -c 'import json, sys; print(json.load(sys.stdin)["choices"][0]["message"]["content"])' \
    <<<"$answer")"
}
health_check() { # expected exit code
  local status=0 text
  text="$("$engine" exec "$name" "${check[@]}")" || status=$?
  [ "$status" -eq "$1" ] || fail "the health check ended with $status, not $1: $text"
  ok "health check: exit code $status${text:+ ($text)}"
}
stop() { # seconds that it may take
  local begun=$SECONDS code
  "$engine" stop -t 30 "$name" >/dev/null
  code="$(state ExitCode)"
  [ "$code" -eq 0 ] || fail "after SIGTERM the exit code is $code (137: it had to be killed)"
  [ $((SECONDS - begun)) -le "$1" ] || fail "the end took $((SECONDS - begun)) s; at most $1 s are allowed"
  [ "$(state Running)" = false ] && [ "$(state Pid)" -eq 0 ] || fail "a process is left"
  ok "SIGTERM: exit code 0 after $((SECONDS - begun)) s, no process left"
}

# The image
[ "$(inspect '{{.Config.User}}')" = 10001:0 ] || fail "the user is not 10001:0"
[ "$(inspect '{{index .Config.Entrypoint 0}}')" = /opt/neoserve/bin/neoserve ] || fail "the entry point is a shell"
# The command of HEALTHCHECK itself is what runs below; the two engines show it in different places.
health='{{json .Config.Healthcheck}}'
[ "$engine" = docker ] || health='{{json .HealthCheck}}'
mapfile -t check < <(inspect "$health" | "$python_here" -c 'import json, sys
kind, *command = json.load(sys.stdin)["Test"]
assert kind == "CMD", "the health check is given to a shell"
print("\n".join(command))')
[ "${#check[@]}" -gt 1 ] || fail "there is no HEALTHCHECK in exec form"
[ "$(inspect '{{.Config.StopSignal}}')" = SIGTERM ] || fail "the stop signal is not SIGTERM"
for label in title licenses version revision; do
  [ -n "$(inspect "{{index .Config.Labels \"org.opencontainers.image.$label\"}}")" ] || fail "no label $label"
done
ok "$(inspect '{{.Os}}/{{.Architecture}}'), user, entry point and labels are there"
bytes="$(once sh -c 'du -sbx / 2>/dev/null | cut -f 1' || true)"
megabytes=$((bytes / 1000000))
[ "$megabytes" -gt 0 ] && [ "$megabytes" -lt "$limit" ] || fail "the unpacked image has $megabytes MB; the limit is $limit"
ok "$megabytes MB unpacked (limit $limit)"
# shellcheck disable=SC2016 # expanded in the container
once sh -c '
  for tool in gcc g++ c++ cc make cmake ninja git curl; do
    if command -v "$tool"; then exit 1; fi
  done
  [ "$(id -u):$(id -g)" = 10001:0 ] && [ -w /cache ] && [ ! -w /opt/neoserve ] && [ ! -w / ] || exit 1
  [ ! -e /root/.cache ] && [ ! -e /src ] && [ ! -e /wheels ] && [ -z "$(ls /var/lib/apt/lists)" ]' ||
  fail "there is a compiler, a cache, or a folder that the user may or may not write"
ok "no compiler, no caches; /cache alone can be written"
once "$python" -c 'import neoserve, neoserve._native, platform; print("smoke: neoserve", neoserve.__version__,
  "on Python", platform.python_version(), platform.machine(), neoserve._native.cpu_features())'
once /opt/neoserve/bin/neoserve doctor >/dev/null || fail "neoserve doctor"

# The server as it is meant to be run
"$engine" run --detach --name "$name" ${options[@]+"${options[@]}"} --publish "127.0.0.1:$port:8000" \
  --volume "$name:/cache" "$image" >/dev/null 2>&1 || fail "the container does not start"
for _ in $(seq 60); do # alive at once, long before the model is there
  if ask /health/live >/dev/null 2>&1; then break; fi
  sleep 0.5
done
health_check 0
wait_ready
chat
"$python_here" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=60)' \
  "http://127.0.0.1:$port/health" || fail "the published port does not answer"
ok "the published port answers"
health_check 0
# The process is stopped where it is: the port still takes connections, but nobody answers.
"$engine" kill --signal STOP "$name" >/dev/null
health_check 1
"$engine" kill --signal CONT "$name" >/dev/null
health_check 0
stop 10
"$engine" rm "$name" >/dev/null

# podman would mount writable folders over /tmp and others; docker does not.
strict=(--read-only)
if [ "$engine" = podman ]; then strict+=(--read-only-tmpfs=false); fi
# Hardened: offline, read-only, no capabilities, and a user of group 0 without a name
"$engine" run --detach --name "$name" ${options[@]+"${options[@]}"} --network none "${strict[@]}" --cap-drop ALL \
  --security-opt no-new-privileges --user 54321:0 --env HF_HUB_OFFLINE=1 --volume "$name:/cache" \
  "$image" --threads 1 >/dev/null 2>&1 || fail "the container does not start read-only as an unknown user"
wait_ready
chat
[ "$("$engine" exec "$name" id -u)" = 54321 ] || fail "the user is not the one that was asked for"
"$engine" exec "$name" sh -c 'touch /opt/neoserve/x' 2>/dev/null && fail "the root is not read-only"
stop 10
ok "offline, read-only, without capabilities, as user 54321:0"

# An unknown user with an empty cache can store a model: the folder belongs to group 0.
"$engine" run --rm ${options[@]+"${options[@]}"} "${strict[@]}" --user 54321:0 --entrypoint sh "$image" -c \
  'mkdir -p "$XDG_CACHE_HOME/neoserve/models" && touch "$HF_HOME" && ls -ld /cache >/dev/null' ||
  fail "an unknown user cannot write a fresh /cache"
ok "a fresh /cache can be written by an unknown user"
echo "smoke: all passed"
