"""How long training stands still when a machine is killed: deepvm run against plain torchrun, on the same job.

Two machines of one worker each, played here. One machine's whole process tree gets SIGKILL; both sides replace it at
once. The time runs from the SIGKILL until the next step is finished. torchrun saves with torch.save and resumes with
torch.load, as its documentation shows; sides take turns, in an order drawn anew.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import Options, Result, Table, measurement
from benchmarks.common.scratch import REPOSITORY, scratch_folder
from deepvm.events import Event
from deepvm.runtime.ledger.ledger import Ledger

SEED = 7
ROUNDS, QUICK_ROUNDS = 7, 1
KILLS = 2  # in one run of a side
FIRST_S, AGAIN_S = 120.0, 180.0
STEPS = 100_000  # more than it ever does
BETWEEN = 23  # steps from one kill to the next: two saves, and some steps that are lost
JOB = str(Path(__file__).with_name("job.py"))
PARTS = ("process group and model", "restore", "first step")
OURS = ("detection", "rendezvous", "start and import of the replacement")
THEIRS = "detection, rendezvous, start and import"


def run(options: Options) -> Result:
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    chance = random.Random(SEED)
    pauses: dict[str, list[float]] = defaultdict(list)
    parts: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    ratios: list[float] = []
    for number in range(rounds):
        taken: dict[str, list[float]] = {}
        for side in chance.sample([_deepvm, _torchrun], 2):
            name = side.__name__.strip("_")
            print(f"{time.strftime('%H:%M:%S')} recovery: {name} {number}", file=sys.stderr, flush=True)
            with scratch_folder() as scratch:
                found = side(scratch)
            taken[name] = [pause for pause, _, _ in found]
            pauses[name] += taken[name]
            parts[name] += [part for _, part, _ in found]
        ratios.append(statistics.median(taken["deepvm"]) / statistics.median(taken["torchrun"]))
    return Result(
        title="Recovery",
        about="From SIGKILL of a machine's whole process tree to the next finished step: two workers over gloo, "
        "a state of 120 MB, a save every 10 steps; the machine is replaced at once.",
        seed=SEED,
        measurements=[
            measurement("deepvm run", pauses["deepvm"]),
            measurement("torchrun with torch.save and torch.load", pauses["torchrun"]),
            measurement("deepvm over torchrun", ratios, unit="times", below=0.4),
        ],
        tables=[
            Table(
                title="Where the time goes",
                columns=["s, medians", "deepvm", "torchrun"],
                rows=[
                    *([what, _median(parts["deepvm"], i), ""] for i, what in enumerate(OURS)),
                    [THEIRS, "", _median(parts["torchrun"], 0)],
                    *(
                        [what, _median(parts["deepvm"], i + len(OURS)), _median(parts["torchrun"], i + 1)]
                        for i, what in enumerate(PARTS)
                    ),
                ],
            )
        ],
        notes=[
            "The import ends when the last worker of the new group runs its first line. A replacement of deepvm joins "
            "before it imports; torchrun's parts overlap and cannot be told apart from outside.",
            "torchrun: --rdzv-backend c10d, --nnodes 2, and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which torch "
            "2.13 does not recover at all: a replacement waits for an address that nobody writes again.",
        ],
        samples={"pauses_s": dict(pauses), "parts_s": {k: [list(p) for p in v] for k, v in parts.items()}},
    )


Found = list[tuple[float, tuple[float, ...], float]]  # the pause, its parts, and when it began


def _median(parts: list[tuple[float, ...]], index: int) -> str:
    return f"{statistics.median(part[index] for part in parts):.2f}"


def _deepvm(scratch: Path) -> Found:
    plan = scratch / "plan.json"
    subprocess.run(
        [
            sys.executable, "-m", "deepvm", "plan", "--budget", "3", "--catalog", "paper-aws-2023", "--json",
            "-o", str(plan),
        ],
        check=True, stdout=subprocess.DEVNULL, cwd=REPOSITORY, timeout=60,
    )  # fmt: skip
    told = scratch / "told"
    command = [
        sys.executable, "-m", "deepvm", "run", str(plan), "--workers", "2", "--memory", "500MB",
        "--", JOB, str(told), "", str(STEPS),
    ]  # fmt: skip
    with _started(command, scratch, {"DEEPVM_RUNS": str(scratch / "runs")}) as process:
        found = _kills(told, lambda: _machine(process.pid, "worker/1"), replace=None)
        (ledger,) = (scratch / "runs").glob("*/ledger.sqlite")
        with Ledger.open(ledger) as book:
            events = list(book.events())
    return [
        (pause, (*_until_the_first_line(events, killed_s, parts[0]), *parts[1:]), killed_s)
        for pause, parts, killed_s in found
    ]


def _until_the_first_line(events: list[Event], killed_s: float, whole_s: float) -> tuple[float, float, float]:
    """Detection, rendezvous and import, as the ledger tells."""
    missed_s = next(e.at_s for e in events if e.kind == "machine-down" and e.at_s > killed_s) - killed_s
    formed_s = next(e.at_s for e in events if e.kind == "group" and e.at_s > killed_s) - killed_s
    return missed_s, formed_s - missed_s, whole_s - formed_s


def _torchrun(scratch: Path) -> Found:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    told = scratch / "told"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "9",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "x", "--local-addr", "127.0.0.1",
        JOB, str(told), str(scratch / "checkpoint.pt"), str(STEPS),
    ]  # fmt: skip
    # With torch 2.13's shared store, a replacement never learns the address of rank 0, and all give up after 60 s.
    env = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with _started(command, scratch, env):
        time.sleep(1.0)  # the first one serves the rendezvous
        others = [subprocess.Popen(command, cwd=REPOSITORY, env={**os.environ, **env}, **_quiet(scratch))]
        try:
            return _kills(
                told,
                lambda: others[-1].pid,
                replace=lambda: others.append(
                    subprocess.Popen(command, cwd=REPOSITORY, env={**os.environ, **env}, **_quiet(scratch))
                ),
            )
        finally:
            for other in others:
                _kill_tree(other.pid)
                other.wait(10)


def _kills(told: Path, victim: Callable[[], int], replace: Callable[[], Any] | None) -> Found:
    _await_step(told, 0.0, BETWEEN, FIRST_S)
    found = []
    for _ in range(KILLS):
        pid = victim()
        killed_s = time.time()
        _kill_tree(pid)
        if replace is not None:
            replace()
        lines = _await_step(told, killed_s, None, AGAIN_S)
        found.append((*_pause(lines, killed_s), killed_s))
        first = min(line["step"] for line in lines if line["what"] == "step" and line["at_s"] > killed_s + 0.2)
        _await_step(told, killed_s, first + BETWEEN, AGAIN_S)
    return found


def _pause(lines: list[dict[str, Any]], killed_s: float) -> tuple[float, tuple[float, ...]]:
    """Until a step is finished by the new group, and the parts of that time, each ended by the later of both ranks."""
    began_s = max(line["began_s"] for line in lines if line["what"] == "began" and line["at_s"] > killed_s)
    ends = [began_s]
    for what in ("model", "restored", "step"):
        ends.append(max(_first(lines, what, rank, began_s) for rank in (0, 1)))
    starts = [killed_s, *ends[:-1]]
    return ends[-1] - killed_s, tuple(end - start for start, end in zip(starts, ends, strict=True))


def _first(lines: list[dict[str, Any]], what: str, rank: int, after_s: float) -> float:
    return min(
        line["at_s"] for line in lines if line["what"] == what and line["rank"] == rank and line["at_s"] > after_s
    )


def _await_step(told: Path, after_s: float, step: int | None, within_s: float) -> list[dict[str, Any]]:
    """Until that step, or any of a group that began after a time, is finished by both ranks; what was told."""
    deadline = time.monotonic() + within_s
    while True:
        lines = [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else []
        began = [line["at_s"] for line in lines if line["what"] == "restored" and line["at_s"] > after_s]
        since_s = max(began) if step is None and len(began) >= 2 else after_s
        done = {
            line["rank"]
            for line in lines
            if line["what"] == "step" and line["at_s"] > since_s and (step is None or line["step"] >= step)
        }
        if done == {0, 1} and (step is not None or len(began) >= 2):
            return lines
        if time.monotonic() > deadline:
            raise RuntimeError(f"no step was finished within {within_s} s: {lines[-3:]}")
        time.sleep(0.02)


def _quiet(scratch: Path) -> dict[str, Any]:
    log = (scratch / "log.txt").open("ab")
    return {"stdout": log, "stderr": log, "stdin": subprocess.DEVNULL, "start_new_session": True}


@contextmanager
def _started(command: list[str], scratch: Path, env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, cwd=REPOSITORY, env={**os.environ, **env}, **_quiet(scratch))
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            _kill_tree(process.pid)
            process.wait(10)
        shutil.rmtree(scratch / "runs", ignore_errors=True)


def _machine(root: int, name: str) -> int:
    for pid in _tree(root):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"deepvm.runtime.agent" in words and name.encode() in words:
            return pid
    raise RuntimeError(f"no process of {name} was found")


def _tree(root: int) -> list[int]:
    children: dict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children[parent].append(int(entry.name))
    found, todo = [], [root]
    while todo:
        pid = todo.pop()
        found.append(pid)
        todo += children[pid]
    return found


def _kill_tree(root: int) -> None:
    for pid in _tree(root):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
