"""What keeps bytes from remote memory: the way from a trainer's memory into a node's, taken apart.

The same bytes are sent by iperf3, between two plain processes (plain.py) without and with checksums, and by
deepvm.
"""

from __future__ import annotations

import random
import sys
import time
from collections import defaultdict

from benchmarks import Options, Result, measurement
from benchmarks.checkpoint.contest.contest import OURS, Worker, Workload
from benchmarks.common import limits
from benchmarks.common.scratch import scratch_folder
from benchmarks.transfer.plain import CONNECTIONS, PlainTransfer

SEED = 7
ROUNDS, QUICK_ROUNDS = 15, 3
WORKLOADS = (
    Workload(name="resnet50", title="ResNet-50 + Adam", size_bytes=0.31e9),
    Workload(name="gpt2", title="GPT-2 small + AdamW", size_bytes=1.49e9),
)


def run(options: Options) -> Result:
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    found, samples = [], {}
    for workload in WORKLOADS:
        rates = samples[workload.name] = _measure(workload, rounds)
        plain, hashed = rates["memory to memory"], rates["with checksums"]
        for what, values in rates.items():
            found.append(measurement(f"{workload.title}: {what}", [v / 2**30 for v in values], unit="GiB/s"))
        for what, mine, theirs in (
            ("memory to memory, over iperf3", plain, rates["iperf3 -l 1M"]),
            ("with checksums, over iperf3", hashed, rates["iperf3 -l 1M"]),
            ("deepvm over iperf3", rates["deepvm"], rates["iperf3 -l 1M"]),
            ("deepvm over memory to memory with checksums", rates["deepvm"], hashed),
        ):
            ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
            wanted = 0.8 if what.startswith("deepvm over memory") else None
            found.append(measurement(f"{workload.title}: {what}", ratios, unit="times", at_least=wanted))
    return Result(
        title="Transfer",
        about="The way of a checkpoint's bytes into the memory of a node on this machine, taken apart.",
        seed=SEED,
        measurements=found,
        notes=[
            "iperf3 -l 1M: one stream, one buffer that stays in the cache, no checksums.",
            f"memory to memory: two processes, {CONNECTIONS} connections set up as deepvm's, pieces of "
            "512 KiB, from memory of the size of the state into memory of that size, nothing else; with checksums: the "
            "same, each piece hashed (xxh3) at both ends while it is in the cache.",
            "deepvm: from save() until all bytes are verified in the node, layout, commit and manifest included.",
        ],
        samples=samples,
    )


def _measure(workload: Workload, rounds: int) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = defaultdict(list)
    iperf3 = limits.Iperf3()
    chance = random.Random(SEED)
    with scratch_folder() as scratch:
        ours = Worker(OURS, workload, scratch)
        plain = PlainTransfer(limits.warm_memory(ours.size_bytes))
        try:
            for number in range(rounds + 2):
                print(f"{time.strftime('%H:%M:%S')} transfer: {workload.name} {number}", file=sys.stderr, flush=True)
                times = {}
                for kind in chance.sample(["iperf3 -l 1M", "memory to memory", "with checksums", "deepvm"], 4):
                    if kind == "deepvm":
                        times[kind] = ours.size_bytes / ours.save(number + 1)["remote"]
                    elif kind == "iperf3 -l 1M":
                        times[kind] = iperf3.bytes_per_s()
                    else:
                        times[kind] = plain.bytes_per_s(hashed=kind == "with checksums")
                if number >= 2:
                    for kind, rate in times.items():
                        rates[kind].append(rate)
        finally:
            plain.close()
            ours.close()
            iperf3.close()
    return dict(rates)
