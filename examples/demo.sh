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

# The main job: train on the plan's machines, played here; one is taken away with a notice, then all at once without.
export DEEPVM_RUNS="$OUT/runs"
run plan --budget 3 --catalog paper-aws-2023 --top 1 -o "$OUT/plan.json" --json >/dev/null
run run "$OUT/plan.json" --name demo --save "every 20 steps" \
    --preempt "at:step:90:worker/1,at:step:190:worker/*:notice=0s" -- "$(dirname "$0")/digits.py" --steps 300 --step-time 0.03
