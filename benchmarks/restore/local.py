"""Restores of GPT-2 small with AdamW in one process: from a local file that is in the page cache, and from a memory
node over loopback. Each begins with a model that is built and an optimizer that has never stepped."""

from __future__ import annotations

import copy
import gc
import mmap
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import load_file, save_file

import deepvm
from benchmarks.checkpoint.contest.ours import MemoryNode, capacity_bytes, rss_bytes
from benchmarks.common import limits, workloads
from benchmarks.transfer.plain import PlainTransfer

RUN = "restore"
SENTENCE = (1, 33)  # tokens of the first forward: one short sentence,
CONTEXT = (1, 1025)  # or as many as the model can see: the least that one is trained with
LONGER = ", a whole context"  # of contestants with that
STEPS = 3
CHUNK = 4 * 2**20
DEADLINE_S = 120
IPERF3_RUNS = 3
AWAKE = 1.3  # states: as much memory as a restore takes, and some
Samples = dict[str, list[float]]


class Fresh:
    """A model with other weights than were saved, and an optimizer without state."""

    def __init__(self, blank: torch.nn.Module, tokens: tuple[int, int] = SENTENCE) -> None:
        self.model = copy.deepcopy(blank)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.tokens = _tokens(tokens)

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def first_loss(self) -> float:
        with torch.no_grad():
            return float(self.model.loss(self.tokens))  # type: ignore[operator]

    def step_s(self) -> float:
        start = time.perf_counter()
        self.optimizer.zero_grad()
        self.model.loss(self.tokens).backward()  # type: ignore[operator]
        self.optimizer.step()
        return time.perf_counter() - start


def measure(scratch: Path, rounds: int, seed: int) -> tuple[Samples, int]:
    """Seconds (or bytes, where a name says so) of every round, and the bytes of the state. Leaves its files there."""
    saved = workloads.build("gpt2")
    places = _save(saved, scratch)
    node = MemoryNode(scratch, capacity_bytes(saved.size_bytes))
    iperf3 = limits.Iperf3()
    plain = PlainTransfer(limits.warm_memory(saved.size_bytes))
    try:
        remote = f"memory://{node.address}"
        with deepvm.Checkpointer({"model": saved.model, "optimizer": saved.optimizer}, remote, run=RUN) as ckpt:
            ckpt.save(1).wait("durable", DEADLINE_S)
        truth = {shape: _loss(saved.model, shape) for shape in (SENTENCE, CONTEXT)}
        model_bytes = sum(parameter.nbytes for parameter in saved.model.parameters())
        contestants: dict[str, Callable[[Fresh], Samples]] = {
            "torch.load": lambda fresh: _timed(fresh, _torch_load, places["torch"]),
            "safetensors + assign": lambda fresh: _timed(fresh, _safetensors, places["safetensors"]),
            "safetensors + assign, verified": lambda fresh: _timed(
                fresh, _safetensors_verified, places["safetensors"], model_bytes
            ),
            "file": lambda fresh: _timed(fresh, _ours, str(places["deepvm"]), False),
            "file, lazy": lambda fresh: _timed(fresh, _ours, str(places["deepvm"]), True),
            f"safetensors + assign{LONGER}": lambda fresh: _timed(fresh, _safetensors, places["safetensors"]),
            f"file, lazy{LONGER}": lambda fresh: _timed(fresh, _ours, str(places["deepvm"]), True),
            "node": lambda fresh: _timed(fresh, _ours, remote, False),
            "node, lazy": lambda fresh: _timed(fresh, _ours, remote, True),
        }
        blank = workloads.GPT2()
        undisturbed = Fresh(blank)
        undisturbed.step_s()
        found: Samples = defaultdict(list)
        chance = random.Random(seed)
        for number in range(rounds + 1):
            print(f"{time.strftime('%H:%M:%S')} restore: round {number} of {rounds}", file=sys.stderr, flush=True)
            rate = max(iperf3.bytes_per_s() for _ in range(IPERF3_RUNS))
            for name in chance.sample(sorted(contestants), len(contestants)):
                gc.collect()
                shape = CONTEXT if name.endswith(LONGER) else SENTENCE
                fresh = Fresh(blank, shape)
                if not name.startswith("node"):
                    _warm(places)  # before memory is woken, which does not stay awake for long
                limits.wake_memory(int(AWAKE * saved.size_bytes))
                times = contestants[name](fresh)
                assert fresh.first_loss() == truth[shape], name
                if name == "node, lazy":
                    before, after = _steps(undisturbed, fresh)
                    times.update({"step before": before, "step after": after})
                if number:  # the first round fills caches
                    for what, values in times.items():
                        found[what if what.startswith("step") else f"{name}: {what}"] += values
            if number:
                found["iperf3"].append(saved.size_bytes / rate)
                limits.wake_memory(int(AWAKE * saved.size_bytes))
                found["plain transfer"].append(saved.size_bytes / plain.into_fresh_memory_bytes_per_s())
                found["verifying"].append(_verifying_s(next(places["deepvm"].rglob("*.safetensors")), model_bytes))
        found["node: bytes of the parameters"] = [float(model_bytes)]
    finally:
        plain.close()
        iperf3.close()
        node.close()
    return found, saved.size_bytes


def files_in(scratch: Path) -> dict[str, Path]:
    return {name: scratch / name for name in ("torch", "safetensors", "deepvm")}


def _save(saved: workloads.State, scratch: Path) -> dict[str, Path]:
    places = files_in(scratch)
    torch.save(saved.state_dict(), places["torch"])
    save_file({name: tensor.contiguous() for name, tensor in saved.tensors().items()}, places["safetensors"])
    with deepvm.Checkpointer(
        {"model": saved.model, "optimizer": saved.optimizer}, str(places["deepvm"]), run=RUN
    ) as ckpt:
        ckpt.save(1).wait("durable", DEADLINE_S)
    return places


def _warm(places: dict[str, Path]) -> None:
    """Have the files in the page cache, whatever became of them since they were last read."""
    piece = bytearray(CHUNK)
    for place in places.values():
        for path in place.rglob("*") if place.is_dir() else [place]:
            if path.is_file():
                with path.open("rb", buffering=0) as file:
                    while file.readinto(piece):
                        pass


def _timed(fresh: Fresh, restore: Callable[..., Callable[[], None]], *arguments: object) -> Samples:
    before = _forget_peak()
    start = time.perf_counter()
    finish = restore(fresh, *arguments)
    ready = time.perf_counter() - start
    fresh.first_loss()
    first_loss = time.perf_counter() - start
    finish()
    peak = rss_bytes(os.getpid(), "VmHWM") - before
    return {"ready": [ready], "first loss": [first_loss], "peak extra bytes": [float(peak)]}


def _torch_load(fresh: Fresh, path: Path) -> Callable[[], None]:
    state = torch.load(path, map_location="cpu", weights_only=True)
    fresh.model.load_state_dict(state["model"])
    fresh.optimizer.load_state_dict(state["optimizer"])
    return lambda: None


def _safetensors(fresh: Fresh, path: Path) -> Callable[[], None]:
    """The file is mapped, and the model's parameters become views of it; what is read later is read later."""
    tensors = load_file(path)
    model = {k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")}
    fresh.model.load_state_dict(model, strict=False, assign=True)
    fresh.model.lm_head.weight = fresh.model.wte.weight  # type: ignore[union-attr]
    state: dict[int, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        if name.startswith("optimizer.state."):
            _, _, index, key = name.split(".")
            state[int(index)][key] = tensor
    optimizer = torch.optim.AdamW(fresh.model.parameters(), lr=1e-4)
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    fresh.optimizer = optimizer
    return lambda: None


def _safetensors_verified(fresh: Fresh, path: Path, model_bytes: int) -> Callable[[], None]:
    """The same, while as many bytes of the same file as the parameters have are hashed on all cores, from the first
    moment on: what a loss costs that is not told before its weights are known to be whole."""
    pool = ThreadPoolExecutor(1)
    verifying = pool.submit(_verifying_s, path, model_bytes)
    _safetensors(fresh, path)
    untold = fresh.first_loss

    def first_loss() -> float:
        found = untold()
        verifying.result()
        return found

    fresh.first_loss = first_loss  # type: ignore[method-assign]
    return pool.shutdown


def _ours(fresh: Fresh, store: str, lazy: bool) -> Callable[[], None]:
    ckpt = deepvm.Checkpointer(fresh.state, store, run=RUN)
    assert ckpt.restore(lazy=lazy) == 1
    return ckpt.close


def _steps(undisturbed: Fresh, restored: Fresh) -> tuple[list[float], list[float]]:
    """Steps of a model that was never restored and of one that was, taking turns; each once before, unmeasured."""
    before, after = [], []
    restored.step_s()
    undisturbed.step_s()
    for _ in range(STEPS):
        before.append(undisturbed.step_s())
        after.append(restored.step_s())
    return before, after


def _loss(model: torch.nn.Module, tokens: tuple[int, int]) -> float:
    with torch.no_grad():
        return float(model.loss(_tokens(tokens)))  # type: ignore[operator]


def _tokens(shape: tuple[int, int]) -> torch.Tensor:
    return torch.randint(0, 50257, shape, generator=torch.Generator().manual_seed(1))


def _verifying_s(path: Path, size_bytes: int) -> float:
    """What the checksums of the parameters take by themselves, on all cores, in a mapped file."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        view = memoryview(mapped)
        start = time.perf_counter()
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda at: xxhash.xxh3_64_intdigest(view[at : at + CHUNK]), range(0, size_bytes, CHUNK)))
        taken_s = time.perf_counter() - start
        view.release()
    return taken_s


def _forget_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return rss_bytes(os.getpid())
