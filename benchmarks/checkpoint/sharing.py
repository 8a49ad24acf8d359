"""Chunks that are common to several runs, sent and kept once; and what looking for them costs where there are none.

Both in one process with a memory node beside it, in an order drawn anew each round. A save that does not look is what
every save is after the first ones found nothing.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import deepvm
from benchmarks import Options, Result, measurement
from benchmarks.common.scratch import scratch_folder
from deepvm.checkpoint.save.memory_transfer import MemoryTransfer
from deepvm.store.memory.store import MemoryStore

SEED = 11
ROUNDS, QUICK_ROUNDS = 21, 3
WIDTH, LAYERS = 2048, 6
MIB = 2**20
DEADLINE_S = 60


def run(options: Options) -> Result:
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    torch.manual_seed(SEED)
    with scratch_folder() as scratch, _node(scratch) as address:
        alone, settled_chunks = _nothing_in_common(address, rounds)
        common = _one_base(address, rounds)
    ratios = [a / b for a, b in zip(alone["looks"], alone["does not look"], strict=True)]
    found = [
        measurement("AdamW on all weights, a save that does not look", alone["does not look"]),
        measurement("the same, a save that looks for what the node has", alone["looks"]),
        measurement("one over the other", ratios, unit="times"),
        measurement("chunks looked for after the first saves", [float(settled_chunks)], unit="chunks", below=1),
        measurement("first save of a run from a known base, all of it sent", common["all"]),
        measurement("the same, what the node has is shared", common["shared"]),
        measurement("bytes sent, of those that all of it has", common["part"], unit="times", below=0.1),
    ]
    return Result(
        title="Kept once",
        about=f"{LAYERS} layers of {WIDTH} x {WIDTH} and Adam, 302 MB, into a memory node on loopback.",
        seed=SEED,
        measurements=found,
        notes=[
            "From save() until the checkpoint is committed in the node's memory, while nothing else runs.",
            "Both sides hash what is shared, and loopback is faster than that: what is spared here is memory and "
            "network, not time. Time is won where the network carries less than the hash does.",
        ],
        samples={"alone": alone, "common": common},
    )


def _nothing_in_common(address: str, rounds: int) -> tuple[dict[str, list[float]], int]:
    model = _layers()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    chance, taken = random.Random(SEED), dict[str, list[float]]()
    with deepvm.Checkpointer({"model": model, "optimizer": optimizer}, f"memory://{address}", run="alone") as ckpt:
        for step in range(4):  # staging memory and blocks are touched, and the looking stops by itself
            _save(ckpt, step)
            optimizer.step()
        before = _offered(address)
        _save(ckpt, 4)
        settled_chunks = _offered(address) - before
        step = 5
        for _ in range(rounds):
            for way in chance.sample(("looks", "does not look"), 2):
                optimizer.step()
                _look(ckpt, way == "looks")
                taken.setdefault(way, []).append(_save(ckpt, step)[0])
                step += 1
    return taken, settled_chunks


def _one_base(address: str, rounds: int) -> dict[str, list[float]]:
    base, store = _layers(3 * LAYERS).requires_grad_(False), f"memory://{address}"
    with deepvm.Checkpointer({"base": base, "adapter": torch.nn.Linear(64, 64)}, store, run="first") as ckpt:
        _save(ckpt, 0)
    chance, taken, sent = random.Random(SEED), dict[str, list[float]](), dict[str, list[int]]()
    for number in range(rounds + 1):
        for way in chance.sample(("all", "shared"), 2):
            adapter = torch.nn.Linear(64, 64)
            with deepvm.Checkpointer({"base": base, "adapter": adapter}, store, run=f"{way}-{number}") as ckpt:
                _look(ckpt, way == "shared")
                seconds, bytes_sent = _save(ckpt, 0)
                ckpt._stores[0].delete(ckpt.run, 0)
            if number:  # the first pays for memory that is touched for the first time
                taken.setdefault(way, []).append(seconds)
                sent.setdefault(way, []).append(bytes_sent)
    return {**taken, "part": [a / b for a, b in zip(sent["shared"], sent["all"], strict=True)]}


def _layers(count: int = LAYERS) -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))


def _look(ckpt: deepvm.Checkpointer, wanted: bool) -> None:
    """What a run decides by itself, decided for it."""
    assert isinstance(ckpt._transfer, MemoryTransfer)
    offers: Any = ckpt._transfer._dedup
    offers.begin = lambda _: wanted


def _save(ckpt: deepvm.Checkpointer, step: int) -> tuple[float, int]:
    began = time.perf_counter()
    handle = ckpt.save(step)
    handle.wait("remote", DEADLINE_S)
    return time.perf_counter() - began, handle.bytes_sent


def _offered(address: str) -> int:
    store = MemoryStore([address])
    try:
        return int(str(store.status(address)["offered_chunks"]))
    finally:
        store.close()


@contextlib.contextmanager
def _node(scratch: Path) -> Iterator[str]:
    """``deepvm memory-node`` as a process, which writes nothing on: disks would disturb the figures."""
    ready, program = scratch / "ready", str(Path(sys.executable).with_name("deepvm"))
    words = ["memory-node", "--listen", "127.0.0.1:0", "--capacity", "2GiB", "--ready-file", str(ready)]
    process = subprocess.Popen([program, *words], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the memory node does not start")
            time.sleep(0.02)
        yield ready.read_text(encoding="utf-8").strip()
    finally:
        process.terminate()
        process.wait(DEADLINE_S)
