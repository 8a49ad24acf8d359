"""How saves and restores grow, as users meet them: every figure is of a fresh process, nothing is warmed or woken.

Curves by bytes, number of tensors, ranks, checkpoints kept and runs on a node. Contestants of one point take turns
within one round, in an order drawn anew: deepvm with a memory node, and torch.save and torch.load with a file.
"""

from __future__ import annotations

import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import Measurement, Options, Result, Table, measurement
from benchmarks.checkpoint.contest import ours
from benchmarks.common.scratch import scratch_folder

SEED = 7
ROUNDS, QUICK_ROUNDS = 7, 1
MB = 10**6
PROCESS = Path(__file__).with_name("process.py")
DEADLINE_S = 300
OURS, TORCH = "deepvm", "torch"
FIRST_STEP_S = 1.0  # what a first step takes, between the constructor and the first save
Samples = dict[str, list[float]]


@dataclass(frozen=True, kw_only=True)
class Point:
    """One place on a curve: what is saved, and what else the node has."""

    curve: str
    value: int
    bytes: int = 200 * MB
    tensors: int = 150
    adam: bool = False
    ranks: int = 1
    kept: int = 1
    runs: int = 1
    peer: bool = True  # torch beside it

    @property
    def task(self) -> dict[str, Any]:
        return {"bytes": self.bytes, "tensors": self.tensors, "adam": self.adam, "steps": list(range(1, self.kept + 1))}


POINTS = (
    *(Point(curve="bytes", value=mb, bytes=mb * MB, adam=True) for mb in (60, 300, 1200)),
    *(Point(curve="tensors", value=n, tensors=n) for n in (2_000, 20_000, 100_000)),
    *(Point(curve="ranks", value=n, ranks=n, peer=False) for n in (1, 2, 4)),
    *(Point(curve="checkpoints kept", value=n, bytes=2 * MB, kept=n, peer=False) for n in (1, 30, 300)),
    *(Point(curve="runs on the node", value=n, bytes=2 * MB, runs=n, peer=False) for n in (1, 30, 300)),
)


def run(options: Options) -> Result:
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    chosen = [p for p in POINTS if not options.only or p.curve in options.only]
    if options.quick:
        chosen = [p for p in chosen if p.value <= 20_000 and p.kept <= 30 and p.runs <= 30]
    found: dict[Point, Samples] = {}
    chance = random.Random(SEED)
    for point in chosen:
        print(f"{time.strftime('%H:%M:%S')} curves: {point.curve} {point.value}", file=sys.stderr, flush=True)
        with scratch_folder() as scratch:
            found[point] = _measure(point, scratch, rounds, chance)
    return Result(
        title="Curves",
        about="Saves and restores by bytes, tensors, ranks, checkpoints kept and runs on a node, each a fresh process.",
        seed=SEED,
        measurements=_targets(found),
        tables=[_table(curve, found) for curve in dict.fromkeys(p.curve for p in found)],
        notes=[
            "Medians of the rounds; the JSON file has every sample. 'restore' is the constructor and restore(), eager, "
            "into a model that was just built; torch's is torch.load of a file in the page cache and load_state_dict.",
            f"'first save' begins {FIRST_STEP_S:g} s after the constructor, as long as a first step; its stall is "
            "save() and what the optimizer then waits for; torch's is torch.save into the page cache. 'at once' begins "
            "with the constructor's return.",
            "A restore begins when the node has spilled what was saved and uses no processor any more, and after"
            " the import of what it needs; 'import' is that of deepvm, torch being there.",
            "Bytes: Adam on 150 tensors. Tensors: 200 MB without an optimizer.",
        ],
        samples={f"{p.curve} {p.value}": samples for p, samples in found.items()},
    )


def _measure(point: Point, scratch: Path, rounds: int, chance: random.Random) -> Samples:
    node = ours.MemoryNode(scratch, ours.capacity_bytes(point.bytes, point.kept + point.runs + 2))
    samples: Samples = defaultdict(list)
    file, url = scratch / "torch.pt", f"memory://{node.address}"
    try:
        for number in range(1, point.runs):
            _process(point.task, do="save", how=OURS, store=url, run=f"other-{number}")
        for number in range(rounds):
            for how in chance.sample([OURS, TORCH] if point.peer else [OURS], 2 if point.peer else 1):
                place = {"how": how, "store": url if how == OURS else str(file), "run": f"run-{number}"}
                for first_step_s, name in ((FIRST_STEP_S, "first save"), (0.0, "at once")):
                    if how == TORCH and name == "at once":
                        continue
                    again = {**place, "run": f"{place['run']}-{name.replace(' ', '-')}"}
                    saved = _ranks(point, do="save", first_step_s=first_step_s, **again)
                    samples[f"{how}: {name}, stall"].append(saved["stall_s"])
                    samples[f"{how}: {name}, committed"].append(saved["remote_s"])
                node.wait_idle()
                restored = _ranks(point, do="restore", **again)
                samples[f"{how}: restore"].append(restored["seconds"])
                if how == OURS:
                    samples[f"{how}: import"].append(restored["import_s"])
    finally:
        node.close()
    return samples


def _ranks(point: Point, **task: Any) -> Mapping[str, float]:
    """The slowest of all ranks."""
    if point.ranks == 1:
        return _process(point.task, **task)
    with socket.create_server(("127.0.0.1", 0)) as free:
        meet = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    words = [{**point.task, **task, "rank": r, "world": point.ranks, "meet": meet} for r in range(point.ranks)]
    started = [_start(word) for word in words]
    answers = [_answer(process) for process in started]
    return {key: max(answer[key] for answer in answers) for key in answers[0]}


def _process(about: Mapping[str, Any], **task: Any) -> Mapping[str, float]:
    return _answer(_start({**about, **task}))


def _start(task: Mapping[str, Any]) -> subprocess.Popen[str]:
    command = [sys.executable, str(PROCESS), json.dumps(task)]
    users = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=users)


def _answer(process: subprocess.Popen[str]) -> dict[str, float]:
    try:
        out, _ = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    if process.returncode:
        raise RuntimeError(f"a process of the curves ended with {process.returncode}")
    answer: dict[str, float] = json.loads(out)
    return answer


def _targets(found: Mapping[Point, Samples]) -> list[Measurement]:
    measurements = []
    for point, samples in found.items():
        if not point.peer:
            continue
        what = f"{point.curve} {point.value:,}"
        restores = _ratios(samples, "restore")
        stalls = _ratios(samples, "first save, stall")
        below = 0.8 if point.curve == "tensors" else 1.0 if point.bytes >= 200 * MB else None
        measurements += [
            measurement(f"{what}: eager restore from a node over torch.load", restores, unit="times", below=below),
            measurement(f"{what}: stall of the first save over torch.save", stalls, unit="times", below=1.0),
        ]
    per_tensor = {p.value: statistics.median(s[f"{OURS}: restore"]) / p.value
                  for p, s in found.items() if p.curve == "tensors"}  # fmt: skip
    if {20_000, 100_000} <= per_tensor.keys():
        growth = [per_tensor[100_000] / per_tensor[20_000]]
        what = "restore: time per tensor, 100,000 over 20,000 tensors"
        measurements.append(measurement(what, growth, unit="times", below=1.3))
    return measurements


def _ratios(samples: Samples, what: str) -> list[float]:
    pairs = zip(samples[f"{OURS}: {what}"], samples[f"{TORCH}: {what}"], strict=True)
    return [a / b for a, b in pairs]


def _table(curve: str, found: Mapping[Point, Samples]) -> Table:
    points = [p for p in found if p.curve == curve]
    columns = list(dict.fromkeys(name for p in points for name in found[p]))
    rows = [[f"{p.value:,}", *(_cell(found[p].get(name, ())) for name in columns)] for p in points]
    heads = {"bytes": "MB", "tensors": "tensors"}
    return Table(title=f"By {curve}", columns=[heads.get(curve, curve), *columns], rows=rows)


def _cell(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f} s" if values else ""
