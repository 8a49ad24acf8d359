"""Training ResNet-50 with Adam on the CPU, with a save every 20 steps to a memory node on the same machine, or without.

Stretches of 20 steps with and without a save take turns in one process, in an order drawn anew for each pair, so that
both meet the same machine.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from pathlib import Path

from benchmarks import Options, Result, measurement
from benchmarks.checkpoint_contest.contest import scratch_folder

SEED = 7
STEPS, QUICK_STEPS = 20, 6
PAIRS, QUICK_PAIRS = 8, 2
BATCH, SIDE = 8, 224  # a step of 1 to 2 s on two cores
BUFFERS = 2
STRETCHES_BEFORE = 5  # before there is a checkpointer, each way
DEADLINE_S = 120


def run(options: Options) -> Result:
    import deepvm
    from benchmarks.checkpoint_contest import ours

    steps = QUICK_STEPS if options.quick else STEPS
    pairs = options.rounds or (QUICK_PAIRS if options.quick else PAIRS)
    chance = random.Random(SEED)
    loop = _Loop()
    make_checkpointer = deepvm.Checkpointer  # imported here: its code is no memory of a save
    loop.train(3)
    size = loop.size_bytes
    without, disturbed = [], []
    for _ in range(STRETCHES_BEFORE):  # no two are the same: see the table
        without.append(loop.peak_bytes(steps))
        disturbed.append(loop.disturbed_peak_bytes(steps))
    peak_without = statistics.median(without)
    makespans: dict[bool, list[float]] = {True: [], False: []}
    stalls, peaks = [], []
    with scratch_folder() as scratch:
        empty = ours.empty_node_bytes(scratch)
        node = ours.MemoryNode(scratch, ours.capacity_bytes(size, BUFFERS))
        state = {"model": loop.model, "optimizer": loop.optimizer}
        with make_checkpointer(state, store=f"memory://{node.address}", run="training", on_error="raise") as ckpt:
            first = ckpt.save(0)
            loop.train(1)
            first.wait("durable", timeout_s=DEADLINE_S)
            for pair in range(1, pairs + 1):
                _say(f"pair {pair} of {pairs}")
                for saving in chance.sample((True, False), 2):
                    _forget_peak()
                    start = time.perf_counter()
                    handle = ckpt.save(pair) if saving else None
                    loop.train(steps)
                    makespans[saving].append(time.perf_counter() - start)
                    if handle is not None:
                        handle.wait("durable", timeout_s=DEADLINE_S)  # long reached: a stretch takes half a minute
                        stalls.append(handle.stall_s)
                        peaks.append((ours.rss_bytes(os.getpid(), "VmHWM") - peak_without) / size)
            node_times = (ours.rss_bytes(node.pid) - empty) / size
        node.close()
    ratios = [a / b for a, b in zip(makespans[True], makespans[False], strict=True)]
    return Result(
        title="Training with checkpoints",
        about=(
            f"ResNet-50 with Adam, batch {BATCH}, {SIDE} × {SIDE}, on this machine's cores; a save of {size / 1e6:.0f} "
            f"MB every {steps} steps to `deepvm memory-node` on the same machine, which spills to the local disk."
        ),
        seed=SEED,
        measurements=[
            measurement("makespan with saves over without", ratios, unit="times", below=1.03),
            measurement(f"{steps} steps without a save", makespans[False]),
            measurement(f"{steps} steps with a save", makespans[True]),
            measurement("stall of a save", stalls),
            measurement("peak memory of the trainer over that without, in states", peaks, unit="times", below=1.05),
            *(
                measurement(
                    f"peak memory of the trainer without a checkpointer, {how}, over its median, in states",
                    [(peak - peak_without) / size for peak in peaks_of],
                    unit="times",
                    note=note,
                )
                for how, peaks_of, note in (
                    ("as it is", without, "its own spread"),
                    ("with 100 strings of 700 bytes that come and go with each stretch", disturbed, "its heap's order"),
                )
            ),
            measurement("memory of the node, in states", [node_times], unit="times", note=f"{BUFFERS} buffers"),
            measurement("all of it with saves over without", [_total(makespans)], unit="times", note="sums"),
        ],
        notes=["Ratios are of the two stretches of one pair; node and trainer share the cores."],
        samples={"with": makespans[True], "without": makespans[False], "stall": stalls},
    )


class _Loop:
    def __init__(self) -> None:
        import torch

        from benchmarks.workloads import resnet50

        torch.manual_seed(SEED)
        self.model = resnet50()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self._images = torch.randn(BATCH, 3, SIDE, SIDE)
        self._labels = torch.randint(0, 1000, (BATCH,))
        self._loss = torch.nn.CrossEntropyLoss()
        self._small: list[bytes] = []

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self._loss(self.model(self._images), self._labels).backward()
            self.optimizer.step()

    def peak_bytes(self, steps: int) -> int:
        """The most memory that this process has while it trains."""
        from benchmarks.checkpoint_contest import ours

        _forget_peak()
        self.train(steps)
        return ours.rss_bytes(os.getpid(), "VmHWM")

    def disturbed_peak_bytes(self, steps: int) -> int:
        """The same, with something small on its heap that lies elsewhere in every stretch, as a save's does."""
        self._small = [bytes(700 + number) for number in range(100)]
        return self.peak_bytes(steps)

    @property
    def size_bytes(self) -> int:
        from benchmarks.workloads import State

        return State(name="training", model=self.model, optimizer=self.optimizer).size_bytes


def _total(makespans: dict[bool, list[float]]) -> float:
    return sum(makespans[True]) / sum(makespans[False])


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} training: {text}", file=sys.stderr, flush=True)
