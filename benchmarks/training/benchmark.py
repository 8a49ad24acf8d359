"""Training ResNet-50 with Adam on the CPU, with a save every 20 steps to a memory node on the same machine, or without.

Stretches of 20 steps with and without a save take turns in one process, in an order drawn anew for each pair, so that
both meet the same machine. Memory is compared between processes that train with saves from their start, and others that
train without: within one process the heap of a trainer grows by itself, and whatever comes later looks larger.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from benchmarks import Options, Result, measurement
from benchmarks.common.scratch import scratch_folder

SEED = 7
STEPS, QUICK_STEPS = 20, 6
PAIRS, QUICK_PAIRS = 8, 2
BATCH, SIDE = 8, 224  # a step of 1 to 2 s on two cores
BUFFERS = 2
PROCESSES, QUICK_PROCESSES = 6, 1  # of each kind, for their memory
STRETCHES, STRETCH_STEPS = 4, 4  # of each of these
DEADLINE_S = 120


def run(options: Options) -> Result:
    import deepvm
    from benchmarks.checkpoint.contest import ours

    steps = QUICK_STEPS if options.quick else STEPS
    pairs = options.rounds or (QUICK_PAIRS if options.quick else PAIRS)
    chance = random.Random(SEED)
    peaks = _peaks(options.rounds or (QUICK_PROCESSES if options.quick else PROCESSES), chance)
    loop = _Loop()
    loop.train(3)
    size = loop.size_bytes
    makespans: dict[bool, list[float]] = {True: [], False: []}
    stalls = []
    with scratch_folder() as scratch:
        empty = ours.empty_node_bytes(scratch)
        node = ours.MemoryNode(scratch, ours.capacity_bytes(size, BUFFERS))
        state = {"model": loop.model, "optimizer": loop.optimizer}
        with deepvm.Checkpointer(state, store=f"memory://{node.address}", run="training", on_error="raise") as ckpt:
            first = ckpt.save(0)
            loop.train(1)
            first.wait("durable", timeout_s=DEADLINE_S)
            for pair in range(1, pairs + 1):
                _say(f"pair {pair} of {pairs}")
                for saving in chance.sample((True, False), 2):
                    start = time.perf_counter()
                    handle = ckpt.save(pair) if saving else None
                    loop.train(steps)
                    makespans[saving].append(time.perf_counter() - start)
                    if handle is not None:
                        handle.wait("durable", timeout_s=DEADLINE_S)  # long reached: a stretch takes half a minute
                        stalls.append(handle.stall_s)
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
            measurement(
                "peak memory of trainers with saves over that of trainers without, in states",
                [saving - without for saving, without in zip(peaks[True], peaks[False], strict=True)],
                unit="times",
                below=1.05,
                note="pairs of processes",
            ),
            measurement("peak memory of a trainer without saves, in states", peaks[False], unit="times"),
            measurement("memory of the node, in states", [node_times], unit="times", note=f"{BUFFERS} buffers"),
            measurement("all of it with saves over without", [_total(makespans)], unit="times", note="sums"),
        ],
        notes=["Ratios are of the two stretches of one pair; node and trainer share the cores."],
        samples={
            "with": makespans[True],
            "without": makespans[False],
            "stall": stalls,
            "peak with": peaks[True],
            "peak without": peaks[False],
        },
    )


class _Loop:
    def __init__(self) -> None:
        import torch

        from benchmarks.common.workloads import resnet50

        torch.manual_seed(SEED)
        self.model = resnet50()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self._images = torch.randn(BATCH, 3, SIDE, SIDE)
        self._labels = torch.randint(0, 1000, (BATCH,))
        self._loss = torch.nn.CrossEntropyLoss()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self._loss(self.model(self._images), self._labels).backward()
            self.optimizer.step()

    @property
    def size_bytes(self) -> int:
        from benchmarks.common.workloads import State

        return State(name="training", model=self.model, optimizer=self.optimizer).size_bytes


def _peaks(count: int, chance: random.Random) -> dict[bool, list[float]]:
    """By whether they save: the most memory of each of so many processes, in states, at the median of its stretches."""
    peaks: dict[bool, list[float]] = {True: [], False: []}
    for number in range(1, count + 1):
        _say(f"memory of processes {number} of {count}")
        for saving in chance.sample((True, False), 2):
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
                peaks[saving].append(process.submit(_peak, saving).result())
    return peaks


def _peak(saving: bool) -> float:
    import deepvm
    from benchmarks.checkpoint.contest import ours

    loop = _Loop()
    loop.train(3)
    size, peaks = loop.size_bytes, []
    with scratch_folder() as scratch, ExitStack() as stack:
        save: Callable[[int], deepvm.SaveHandle | None] = lambda _: None  # noqa: E731
        if saving:
            node = ours.MemoryNode(scratch, ours.capacity_bytes(size, BUFFERS))
            stack.callback(node.close)
            state = {"model": loop.model, "optimizer": loop.optimizer}
            store = f"memory://{node.address}"
            save = stack.enter_context(deepvm.Checkpointer(state, store=store, run="memory", on_error="raise")).save
        for stretch in range(STRETCHES):
            _forget_peak()
            handle = save(stretch)
            loop.train(STRETCH_STEPS)
            if handle is not None:
                handle.wait("durable", timeout_s=DEADLINE_S)
            peaks.append(ours.rss_bytes(os.getpid(), "VmHWM") / size)
    return statistics.median(peaks)


def _total(makespans: dict[bool, list[float]]) -> float:
    return sum(makespans[True]) / sum(makespans[False])


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} training: {text}", file=sys.stderr, flush=True)
