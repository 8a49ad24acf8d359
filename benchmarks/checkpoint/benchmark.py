"""Checkpoints: the Checkpointer with a memory node, beside the published scheme, peers, and what the machine allows.

Every contestant is a process of its own with a state of its own, and saves when it is told to, so that one alone is at
work. In each round all of them save once, in an order drawn anew; where their states do not fit into memory together
they take turns of several saves. First saves, which touch memory for the first time, have a column of their own; the
second is not counted, since some have two buffers to touch.
"""

from __future__ import annotations

import random

from benchmarks import Options, Result
from benchmarks.checkpoint.contest import report
from benchmarks.checkpoint.contest.contest import Workload, measure

SEED = 7
ROUNDS, QUICK_ROUNDS = 15, 3

WORKLOADS = (
    Workload(name="resnet50", title="ResNet-50 + Adam", size_bytes=0.31e9, switches=True, targets=True, remote_times=8),
    Workload(name="gpt2", title="GPT-2 small + AdamW", size_bytes=1.49e9, targets=True, remote_times=12),
    Workload(name="small", title="4,000 small tensors", size_bytes=0.06e9),
    Workload(
        name="lora",
        title="LoRA (r = 8) on GPT-2 small",
        size_bytes=0.50e9,
        foreign=False,
        local=("torch.save", "safetensors", "DCP async_save, cached stager", "DCP async_save, async staging"),
    ),
)


def run(options: Options) -> Result:
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    chance = random.Random(SEED)
    chosen = [w for w in WORKLOADS if not options.only or w.name in options.only]
    measured = [measure(workload, rounds, options, chance) for workload in chosen]
    return Result(
        title="Checkpoints",
        about=(
            "Saves of whole training states into the memory of a node on this machine (`deepvm memory-node` over "
            "loopback, spilling to the local disk), beside the published multi-level scheme re-enacted, other "
            "checkpointers, and what memory, network and disk allow, all in one run."
        ),
        seed=SEED,
        measurements=[m for found in measured for m in report.measurements(found)],
        tables=[table for found in measured for table in report.tables(found)],
        notes=[*report.method(rounds), *(note for found in measured for note in report.findings(found))],
        samples={m.workload.name: {"saves": m.samples, "first": m.first, "iperf3": m.iperf3} for m in measured},
    )
