"""Running the contest: start contestants, let one save at a time, in an order drawn anew, and keep the figures."""

from __future__ import annotations

import itertools
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import Options
from benchmarks.common import limits, peers
from benchmarks.common.scratch import REPOSITORY, scratch_folder

TURNS = 3  # of several saves each, where not all states fit into memory
ANSWER_S, START_S = 150, 240
GIB = 2**30
WORKER = "benchmarks.checkpoint.contest.worker"
MEMORY_OF_PROCESS, MEMORY_PER_STATE = 0.3 * GIB, 2.6  # what a contestant takes: torch, then state, gradients, a copy

OURS, PUBLISHED, LIMITS = "deepvm", "published", "limits"
LOCAL = (
    "torch.save", "safetensors", "DCP save", "DCP async_save, thread", "DCP async_save, process",
    "DCP async_save, cached stager", "DCP async_save, async staging",
)  # fmt: skip
FOREIGN = {  # contestant -> environment
    "torch_checkpointing": "torch_checkpointing",
    "torchsnapshot": "torchsnapshot",
    "DLRover": "dlrover",
    "lm-resiliency": "lm-resiliency",
    "torchft HTTP": "torchft",
}


@dataclass(frozen=True, kw_only=True)
class Workload:
    name: str
    title: str
    size_bytes: float
    switches: bool = False  # all eight settings of the published scheme
    foreign: bool = True
    local: tuple[str, ...] = LOCAL
    remote_times: float | None = None  # the target against the published scheme
    targets: bool = False


Samples = dict[str, list[dict[str, float]]]


@dataclass
class Measured:
    """All that was measured of one workload."""

    workload: Workload
    size_bytes: int = 0
    samples: Samples = field(default_factory=lambda: defaultdict(list))
    first: Samples = field(default_factory=lambda: defaultdict(list))
    iperf3: list[float] = field(default_factory=list)  # bytes a second, one a round
    skipped: dict[str, str] = field(default_factory=dict)

    def of(self, name: str, what: str) -> list[float]:
        return [times[what] for times in self.samples[name] if what in times]


class Failed(Exception):
    """A contestant that cannot go on; the text says why."""


class Worker:
    def __init__(self, name: str, workload: Workload, scratch: Path) -> None:
        self.name = name
        python = peers.python(FOREIGN[name]) if name in FOREIGN else Path(sys.executable)
        self._scratch = scratch / name.replace(" ", "-").replace(",", "")
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._scratch.mkdir(parents=True)
        self._log = (scratch / f"{self._scratch.name}.log").open("wb")
        self._process = subprocess.Popen(
            [str(python), "-m", WORKER, workload.name, str(self._scratch), name, "{}"],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,  # so that what a peer leaves behind can be ended with it
        )
        try:
            self.size_bytes = int(self._answer(START_S)["size_bytes"])
        except Failed:
            self.close()
            raise

    def save(self, step: int, **switches: bool) -> dict[str, float]:
        return dict(self._ask({"save": {"step": step, **switches}}, ANSWER_S)["times"])

    def _ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise Failed("its process ended") from None
        return self._answer(timeout_s)

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        line = self._process.stdout.readline() if readable else b""
        if not line:
            raise Failed("its process ended" if readable else f"it did not answer within {timeout_s} s")
        answer = json.loads(line)
        if "failed" in answer:
            raise Failed(answer["failed"])
        return dict(answer)

    def close(self) -> None:
        try:
            self._ask({"close": True}, 60)
        except Failed:
            pass
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(timeout=30)
            self._log.close()
            shutil.rmtree(self._scratch, ignore_errors=True)


def measure(workload: Workload, rounds: int, options: Options, chance: random.Random) -> Measured:
    found = Measured(workload)
    names = [LIMITS, OURS, PUBLISHED, *workload.local]
    if workload.foreign and options.peers:
        names += FOREIGN
    elif workload.foreign:
        found.skipped.update(dict.fromkeys(FOREIGN, "left out with --no-peers"))
    with scratch_folder() as scratch, ExitStack() as stack:
        iperf3 = limits.Iperf3()
        stack.callback(iperf3.close)
        together = len(names) * (MEMORY_OF_PROCESS + MEMORY_PER_STATE * workload.size_bytes)
        if together < 0.85 * _available_bytes():
            _rounds(found, names, rounds, chance, scratch, iperf3)
        else:
            _turns(found, names, rounds, chance, scratch, iperf3)
    return found


def _rounds(
    found: Measured, names: list[str], rounds: int, chance: random.Random, scratch: Path, iperf3: limits.Iperf3
) -> None:
    """All contestants stay; in each round each saves once."""
    with ExitStack() as stack:
        workers = {}
        for name in names:
            worker = _started(found, name, scratch)
            if worker is not None:
                workers[name] = worker
                stack.callback(worker.close)
        for number in range(rounds):
            _say(f"{found.workload.name}: round {number + 1} of {rounds}")
            found.iperf3.append(iperf3.bytes_per_s())
            order = list(workers)
            chance.shuffle(order)
            for name in order:
                if name not in found.skipped:
                    _save(found, workers[name], number + 3)


def _turns(
    found: Measured, names: list[str], rounds: int, chance: random.Random, scratch: Path, iperf3: limits.Iperf3
) -> None:
    """One contestant at a time is there, for several saves; then the next, and so on again."""
    turns = max(1, min(TURNS, rounds // 5))  # starting one and warming it up costs as much as a few saves
    for turn in range(turns):
        saves = range(rounds * turn // turns, rounds * (turn + 1) // turns)
        order = list(names)
        chance.shuffle(order)
        _say(f"{found.workload.name}: turn {turn + 1} of {turns}, {len(saves)} saves of each")
        found.iperf3 += [iperf3.bytes_per_s() for _ in saves]
        for name in order:
            worker = None if name in found.skipped else _started(found, name, scratch)
            if worker is not None:
                with closing(worker):
                    for number in saves:
                        if name not in found.skipped:
                            _save(found, worker, number + 3)


def _started(found: Measured, name: str, scratch: Path) -> Worker | None:
    """A worker that has made its first two saves."""
    try:
        worker = Worker(name, found.workload, scratch)
    except (Failed, peers.Unavailable) as error:
        _skip(found, name, str(error), scratch)
        return None
    found.size_bytes = worker.size_bytes
    try:
        found.first[name].append(worker.save(1))
        worker.save(2)
    except Failed as error:
        worker.close()
        _skip(found, name, str(error), scratch)
        return None
    return worker


def _save(found: Measured, worker: Worker, step: int) -> None:
    try:
        if worker.name == PUBLISHED:
            for key, switches in switch_settings(found.workload).items():
                found.samples[key].append(worker.save(step, **switches))
        else:
            found.samples[worker.name].append(worker.save(step))
    except Failed as error:
        _skip(found, worker.name, f"{error} (at save {step})", None)


def _skip(found: Measured, name: str, reason: str, scratch: Path | None) -> None:
    found.skipped[name] = reason
    _say(f"{name} is skipped: {reason}")
    for log in [] if scratch is None else scratch.glob(f"{name.replace(' ', '-').replace(',', '')}.log"):
        print(log.read_text(errors="replace")[-2000:], file=sys.stderr)


def switch_settings(workload: Workload) -> dict[str, dict[str, bool]]:
    """Name -> settings; the scheme as published first."""
    every = itertools.product((False, True), repeat=3) if workload.switches else [(False,) * 3]
    return {_switched(*on): dict(zip(("mem", "trans", "pack"), on, strict=True)) for on in every}


def _switched(mem: bool, trans: bool, pack: bool) -> str:
    on = [n for n, is_on in (("Check-Mem", mem), ("Check-Trans", trans), ("Check-Pack", pack)) if is_on]
    return " + ".join([PUBLISHED, *on])


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
