#!/bin/sh
# What `make demo` shows. Every command here works as it stands, once deepvm is installed.
set -eu
DEEPVM=${DEEPVM:-$(command -v deepvm)}
OUT=$(mktemp -d)
trap 'rm -rf "$OUT"' EXIT

run() {
    printf '\n\033[2m$ deepvm %s\033[0m\n' "$*"
    "$DEEPVM" "$@"
}

run plan --budget 3 --explain
run plan --budget 3 --catalog paper-aws-2023 --checkpoint-size 300MB --buffers 2 --objective flopp
run sweep --catalog paper-virtual --checkpoint-size 500MB --from 0.5 --to 5 --step 0.5 --figure "$OUT/sweep.svg"
run reproduce --out "$OUT/paper"

printf '\n\033[2m$ python examples/checkpoint.py\033[0m\n'
"$(dirname "$DEEPVM")/python" "$(dirname "$0")/checkpoint.py"
