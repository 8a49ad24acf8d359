"""The same plan, save policy and trace, run here with real processes and replayed by the simulator: do they agree?

Time is scaled: a market of ticks of ten minutes is played at 600 times the pace, one second to a tick. The replay takes
its overheads from the run's own profile. A loss that comes within a moment of a step's end may or may not lose that
step. So a first, short run measures how long a start takes, and the trace of the second takes machines in the middle of
steps. If starts differ by half a step, which they do on a busy machine, one figure for all of them cannot tell which
step is lost: the comparison is made again with longer steps.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import Options, Result, Table, measurement
from benchmarks.common.scratch import REPOSITORY, scratch_folder
from deepvm.market.market import market_of
from deepvm.market.trace import load_trace
from deepvm.performance.overheads import overhead
from deepvm.performance.profile import Profile, read_profile
from deepvm.policy import parse_policy
from deepvm.runtime.ledger.ledger import Ledger
from deepvm.simulate.job import GangJob
from deepvm.simulate.replay import replay
from deepvm.simulate.saves import PolicySaves
from deepvm.simulate.strategy import Strategy

SPEED = 600.0  # market seconds in one of the run
TICK_S = 600.0
WORKERS = 2
EVERY = 3  # steps from one save to the next
SPELLS = (4, 5, 7)  # steps that are finished before each loss: 1, 2 and 1 of them are lost
OUTAGES = (4, 6, 3)  # ticks without any machine
LAST = 6  # steps after the last loss
ROUNDS, STEP_S, ATTEMPTS = 3, 4.0, 3
STEADY = 0.45  # of a step, by which a start may differ from their median
RUN_S = 1800.0
JOB = str(Path(__file__).with_name("paced.py"))


@dataclass(frozen=True, kw_only=True)
class Side:
    """What one of the two says."""

    steps_lost: int
    makespan_s: float
    losses: int
    waiting_s: float  # until the market had machines again


@dataclass(frozen=True, kw_only=True)
class Agreement:
    run: Side
    replay: Side
    step_s: float
    start_s: float  # from a machine's launch to training, measured by the run
    starts_s: tuple[float, ...]  # of each spell
    restore_s: float

    @property
    def steady(self) -> bool:
        """True if every start took as long as the replay supposes, to half a step."""
        return all(abs(one - self.start_s) < STEADY * self.step_s for one in self.starts_s)

    @property
    def makespan_error(self) -> float:
        """By how much the replay is longer than the run, as a share."""
        return self.replay.makespan_s / self.run.makespan_s - 1


def compare(folder: Path) -> Agreement:
    """Run and replay in a folder, which must be empty, until the starts were steady; the last attempt counts."""
    _write_plan(folder / "plan.json")
    first = _trace(folder / "first", [4], [2], start_s=15.0, step_s=STEP_S)
    _, profile = _run(folder, "first", first, steps=6, step_s=STEP_S)
    for attempt in range(ATTEMPTS):
        found, profile = _compared(folder, f"attempt-{attempt}", _start_s(profile), STEP_S * 2**attempt)
        if found.steady:
            break
        print(f"starts took {found.starts_s}, too different for {found.step_s:g} s", file=sys.stderr, flush=True)
    return found


def _compared(folder: Path, name: str, start_s: float, step_s: float) -> tuple[Agreement, Profile]:
    trace = _trace(folder / name, SPELLS, OUTAGES, start_s=start_s, step_s=step_s)
    steps = sum(_kept()) + LAST
    report, profile = _run(folder, name, trace, steps=steps, step_s=step_s)
    run = Side(
        steps_lost=report["steps"]["lost"],
        makespan_s=report["wall_s"],
        losses=len([pause for pause in report["pauses"] if pause["machines"]]),
        waiting_s=sum(pause["parts"].get("capacity_s", 0.0) for pause in report["pauses"]),
    )
    start_s, restore_s = _start_s(profile), _overhead(profile, "restore")
    agreement = Agreement(
        run=run, replay=_replayed(trace, profile, steps, start_s, restore_s), step_s=step_s, start_s=start_s,
        starts_s=_starts_s(folder / "runs" / name / "ledger.sqlite", restore_s), restore_s=restore_s,
    )  # fmt: skip
    return agreement, profile


def _kept() -> list[int]:
    """Return how many steps each spell adds: those that were saved."""
    return [steps // EVERY * EVERY for steps in SPELLS]


def _replayed(trace: Path, profile: Profile, steps: int, start_s: float, restore_s: float) -> Side:
    step_s = _step_s(profile)
    found = load_trace(trace, meaning="up")
    market = market_of([found], spot_usd=0.16, on_demand_usd=0.53)
    scaled = SPEED / 3600  # hours of the market in a second of the run
    job = GangJob(work_h=steps * step_s * scaled, machines=WORKERS)
    strategy = Strategy(
        name="as planned",
        saves=PolicySaves(
            policy=parse_policy(f"every {EVERY} steps"),
            work_h=job.work_h,
            step_h=step_s * scaled,
            stall_h=_overhead(profile, "save_stall") * scaled,
            remote_h=_overhead(profile, "save_remote") * scaled,
        ),
        start_h=start_s * scaled,
        restore_h=restore_s * scaled,
    )
    outcome = replay(market, job, strategy, [0.0])
    return Side(
        steps_lost=round(float(outcome.lost_h[0]) / (step_s * scaled)),
        makespan_s=float(outcome.hours[0]) / scaled,
        losses=int(outcome.losses[0]),
        waiting_s=float(outcome.waiting_h[0]) / scaled,
    )


def _overhead(profile: Profile, name: str) -> float:
    size = max(point.state_bytes for point in profile.overheads)
    return overhead([profile], name, size).seconds


def _step_s(profile: Profile) -> float:
    return next(point.step_s.median_s for point in profile.scaling if point.workers == WORKERS)


def _start_s(profile: Profile) -> float:
    """Return how long machines that are up take until they train, without the restore and without the first step."""
    stages = sum(_overhead(profile, name) for name in ("regroup", "start", "first_step"))
    return max(0.0, stages - _step_s(profile))


def _starts_s(ledger: Path, restore_s: float) -> tuple[float, ...]:
    """Return the time of each spell from the moment when its machines were up to the beginning of its first step."""
    found: list[float] = []
    up_s: float | None = None
    with Ledger.open(ledger) as book:
        for event in book.events():
            if event.kind == "machine-up" and str(event.machine).startswith("worker"):
                up_s = event.at_s
            elif event.kind == "step" and up_s is not None:
                restored_s = restore_s if found else 0.0
                found.append(round(event.at_s - float(event.data["seconds"]) - restored_s - up_s, 2))
                up_s = None
    return tuple(found)


def _trace(folder: Path, spells: Sequence[int], outages: Sequence[int], *, start_s: float, step_s: float) -> Path:
    """Write a trace that takes all machines in the middle of the step after each spell."""
    up: list[int] = []
    for steps, outage in zip(spells, outages, strict=True):
        up += [WORKERS] * math.ceil(start_s + (steps + 0.5) * step_s) + [0] * outage
    folder.mkdir()
    path = folder / "us-east-1a_T4_1.json"
    document = {"metadata": {"gap_seconds": TICK_S}, "data": up + [WORKERS] * 10_000}
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def _write_plan(path: Path) -> None:
    command = ["plan", "--budget", "3", "--catalog", "paper-aws-2023", "--json", "-o", str(path)]
    _deepvm(command, {}, 60.0)


def _run(folder: Path, name: str, trace: Path, *, steps: int, step_s: float) -> tuple[dict[str, Any], Profile]:
    command = [
        "run", str(folder / "plan.json"), "--name", name, "--workers", str(WORKERS), "--memory", "64MB", "--json",
        "--save", f"every {EVERY} steps", "--preempt", f"market:{trace}:meaning=up:speed={SPEED:g}",
        "--", JOB, str(steps), str(step_s),
    ]  # fmt: skip
    report = json.loads(_deepvm(command, {"DEEPVM_RUNS": str(folder / "runs"), "OMP_NUM_THREADS": "1"}, RUN_S))
    return report, read_profile(report["profile"])


def _deepvm(command: Sequence[str], env: Mapping[str, str], within_s: float) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "deepvm", *command],
        check=True, capture_output=True, text=True, timeout=within_s, cwd=REPOSITORY, env={**os.environ, **env},
    )  # fmt: skip
    return done.stdout


def run(options: Options) -> Result:
    rounds = options.rounds or (1 if options.quick else ROUNDS)
    found: list[Agreement] = []
    for _ in range(rounds):
        with scratch_folder() as scratch:
            found.append(compare(scratch))
            print(found[-1], file=sys.stderr, flush=True)
    errors = [100 * abs(one.makespan_error) for one in found]
    different = [float(abs(one.run.steps_lost - one.replay.steps_lost)) for one in found]
    return Result(
        title="Run and replay",
        about=f"The same plan of {WORKERS} workers, save policy (every {EVERY} steps) and trace with "
        f"{len(SPELLS)} losses of all workers and outages of {' '.join(map(str, OUTAGES))} s: run here with real "
        "processes, and replayed by the simulator with overheads from the run's own profile.",
        seed=0,
        measurements=[
            measurement("difference of the steps lost", different, unit="steps", below=0.5),
            measurement("difference of the makespans", errors, unit="%", below=10.0),
        ],
        tables=[
            Table(
                title="Side by side",
                columns=["round", "", "step, s", "steps lost", "losses", "makespan, s", "waiting for machines, s"],
                rows=[row for number, one in enumerate(found, start=1) for row in _rows(number, one)],
            )
        ],
        notes=[
            "A start, measured by each run: "
            + ", ".join(f"{one.start_s:.2f} s and {one.restore_s:.2f} s of restore" for one in found)
            + ".",
            "A loss within a moment of a step's end may or may not lose that step: here machines are taken in the "
            "middle of steps, by the starts of a shorter run before. Steps are longer in rounds in which starts "
            "differed by half a step: one figure for all starts cannot tell then which step is lost.",
        ],
        samples={"makespan_error": [one.makespan_error for one in found]},
    )


def _rows(number: int, one: Agreement) -> list[list[str]]:
    return [
        [
            str(number),
            name,
            f"{one.step_s:g}",
            str(side.steps_lost),
            str(side.losses),
            f"{side.makespan_s:.1f}",
            f"{side.waiting_s:.1f}",
        ]
        for name, side in (("run", one.run), ("replay", one.replay))
    ]
