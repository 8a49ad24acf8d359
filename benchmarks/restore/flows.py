"""Restores over connections that are limited one by one: four that bring first what is needed first, against one that
brings everything before anything runs. See flows.py for the network."""

from __future__ import annotations

import contextlib
import gc
import json
import random
import sys
import time
from pathlib import Path

from benchmarks.transfer import flows

SEED = 7
KINDS = {"1 connection, eager": (1, False), "4 connections, eager": (4, False), "4 connections, lazy": (4, True)}


def measure(scratch: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds until the first loss, of each kind."""
    from benchmarks.checkpoint.contest.ours import capacity_bytes

    with flows.namespaces() as (trainer, node):
        room = capacity_bytes(3 * 500 * 10**6)
        return flows.in_namespaces("benchmarks.restore.flows", scratch, trainer, node, rounds, room)


def trainer_main(address: str, rounds: int) -> None:
    """In the trainer's namespace."""
    import deepvm
    from benchmarks.common import workloads
    from benchmarks.restore.local import RUN, Fresh

    saved = workloads.build("gpt2")
    url = f"memory://{address}?connections=4"
    with deepvm.Checkpointer({"model": saved.model, "optimizer": saved.optimizer}, url, run=RUN) as ckpt:
        ckpt.save(1).wait("durable", flows.DEADLINE_S)
    blank = workloads.GPT2()
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    chance = random.Random(SEED)
    for _ in range(rounds):
        for kind in chance.sample(sorted(KINDS), len(KINDS)):
            gc.collect()
            connections, lazy = KINDS[kind]
            fresh = Fresh(blank)
            start = time.perf_counter()
            store = f"memory://{address}?connections={connections}"
            with contextlib.closing(deepvm.Checkpointer(fresh.state, store, run=RUN)) as ckpt:
                assert ckpt.restore(lazy=lazy) == 1
                fresh.first_loss()
                found[kind].append(time.perf_counter() - start)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    trainer_main(sys.argv[1], int(sys.argv[2]))
