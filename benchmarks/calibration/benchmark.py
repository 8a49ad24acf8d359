"""Step times and makespans of eight configurations, predicted by a roofline that was fitted to others, and measured.

Configurations are residual networks on images of 32 pixels that differ in batch, width, depth and workers; each worker
has one core. All configurations of one number of workers take turns in the same processes. Makespans are those of fresh
processes: their start, known from configurations of the fit, and 30 predicted steps. A round has the steps of all
configurations and then all makespans, and figures are medians of rounds, so that a busy neighbour meets both alike.
All is measured in wall time, and in a worker's processor time, in which a neighbour's processes do not count.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import Measurement, Options, Result, Table, measurement
from deepvm.calibrate.compute import ComputeSettings, calibrate_compute
from deepvm.calibrate.scaling import ScalingSettings, calibrate_scaling
from deepvm.calibrate.workloads import build
from deepvm.performance.roofline import Load, Peaks, Roofline, RooflinePoint, fit_roofline

ROUNDS, QUICK_ROUNDS = 3, 1
TURNS = 3  # of each configuration in a round
STEPS, WARM = 3, 1  # of a configuration in a turn
CLOCKS = ("wall", "processor")
RUN_STEPS = 30  # of a makespan
DEADLINE_S = 900
PROCESS = Path(__file__).with_name("process.py")
HERE = Peaks(device="one core")
SHARED = "two workers"  # they share the caches and the memory


@dataclass(frozen=True)
class Configuration:
    width: int
    depth: int
    batch: int
    workers: int = 1

    @property
    def title(self) -> str:
        return f"width {self.width}, depth {self.depth}, batch {self.batch}, {self.workers} worker(s)"

    @property
    def load(self) -> Load:
        counts = build("tiny", width=self.width, depth=self.depth).count_step(self.batch)
        return Load(
            flops=counts.flops,
            traffic_bytes=counts.traffic_bytes,
            operations=counts.operations,
            exchanged_bytes=counts.gradient_bytes if self.workers > 1 else 0,
        )


STARTS = (  # of the fit: what their runs take beside their steps is what a start takes
    Configuration(16, 1, 16),
    Configuration(16, 2, 8),
    Configuration(16, 1, 32, 2),
    Configuration(48, 1, 8, 2),
)
FITTED = (
    *STARTS,
    Configuration(16, 1, 64),
    Configuration(16, 3, 24),
    Configuration(32, 1, 8),
    Configuration(32, 1, 64),
    Configuration(32, 2, 24),
    Configuration(48, 1, 16),
    Configuration(48, 3, 8),
    Configuration(64, 1, 8),
    Configuration(64, 2, 16),
    Configuration(32, 2, 16, 2),
    Configuration(64, 1, 16, 2),
)
PREDICTED = (
    Configuration(16, 1, 40),
    Configuration(32, 1, 32),
    Configuration(16, 2, 48),
    Configuration(48, 2, 12),
    Configuration(32, 3, 16),
    Configuration(64, 1, 16),
    Configuration(32, 1, 24, 2),
    Configuration(48, 2, 16, 2),
)


@dataclass(frozen=True)
class Measured:
    """Steps and makespans by configuration, in seconds of one clock."""

    clock: str
    steps: dict[Configuration, list[float]]
    runs: dict[Configuration, list[float]]

    def step_s(self, one: Configuration) -> float:
        return statistics.median(self.steps[one])

    def run_s(self, one: Configuration) -> float:
        return statistics.median(self.runs[one])

    def start_s(self, workers: int) -> float:
        """What a run takes besides its steps, from configurations of the fit."""
        known = [c for c in STARTS if c.workers == workers]
        return max(0.0, statistics.mean(self.run_s(c) - RUN_STEPS * self.step_s(c) for c in known))


def run(options: Options) -> Result:
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    before = os.getloadavg()
    found = [
        Measured(clock, {one: [] for one in (*FITTED, *PREDICTED)}, {one: [] for one in (*STARTS, *PREDICTED)})
        for clock in CLOCKS
    ]
    for round_ in range(rounds):
        title = f"round {round_ + 1} of {rounds}"
        for workers in (1, 2):
            chosen = [c for c in found[0].steps if c.workers == workers]
            _say(f"{title}: steps of {len(chosen)} configurations with {workers} worker(s)")
            for one, taken in zip(chosen, _train(chosen, rounds=TURNS, steps=STEPS, warm=WARM)[0], strict=True):
                for measured, seconds in zip(found, zip(*taken, strict=True), strict=True):
                    measured.steps[one] += seconds
        for one in found[0].runs:
            _say(f"{title}: makespan of {one.title}")
            for measured, makespan in zip(found, _train([one], rounds=1, steps=RUN_STEPS, warm=0)[1], strict=True):
                measured.runs[one].append(makespan)
    after = os.getloadavg()
    measurements, tables, notes = [], [], []
    for measured in found:
        roofline = fit_roofline([_point(c, measured.step_s(c)) for c in FITTED])
        errors, table = _predict(roofline, measured)
        measurements += errors
        tables += [table, _fit_table(roofline, measured)]
        notes.append(
            f"By leaving one out the roofline of {measured.clock} time tells an error of {roofline.error or 0:.1%} "
            f"(median), {roofline.worst_error or 0:.1%} (worst)."
        )
    return Result(
        title="Calibration",
        about="Step times and makespans that a roofline fitted here predicts for configurations it has not seen.",
        seed=0,
        measurements=[*measurements, *_resnet18(quick=options.quick)],
        tables=tables,
        notes=[
            "Widths are multiples of 16, as vectors are: with 24 channels a step took 25 % longer than predicted.",
            f"The rooflines were fitted to {len(FITTED)} other configurations; all medians are of {rounds} rounds.",
            *notes,
            f"Load of the last 5 minutes: {before[1]:.1f} processes before, {after[1]:.1f} after. Wall times tell of "
            "the model only if the machine does nothing else.",
        ],
        samples={
            f"{what}{c.title}, {measured.clock} time": taken
            for measured in found
            for what, table in (("", measured.steps), ("makespan of ", measured.runs))
            for c, taken in table.items()
        },
    )


def _predict(roofline: Roofline, found: Measured) -> tuple[list[Measurement], Table]:
    rows, step_errors, run_errors = [], [], []
    for one in PREDICTED:
        predicted = roofline.seconds(one.load, HERE, SHARED if one.workers > 1 else None)
        measured, makespan = found.step_s(one), found.run_s(one)
        expected = found.start_s(one.workers) + RUN_STEPS * predicted
        step_errors.append(abs(predicted / measured - 1))
        run_errors.append(abs(expected / makespan - 1))
        rows.append(
            [one.title, f"{predicted * 1e3:.1f} ms", f"{measured * 1e3:.1f} ms", f"{predicted / measured - 1:+.1%}",
             f"{expected:.2f} s", f"{makespan:.2f} s", f"{expected / makespan - 1:+.1%}"]
        )  # fmt: skip
    columns = ["configuration", "step predicted", "measured", "error", "makespan predicted", "measured", "error"]
    table = Table(title=f"Predicted and measured, {found.clock} time", columns=columns, rows=rows)
    return _errors(found.clock, step_errors, run_errors), table


def _errors(clock: str, steps: Sequence[float], runs: Sequence[float]) -> list[Measurement]:
    return [
        made
        for what, errors in (("step times", steps), ("makespans", runs))
        for made in (
            measurement(f"{clock} time: error of 8 {what}, median", [100 * e for e in errors], unit="%", below=10.0),
            measurement(f"{clock} time: error of 8 {what}, worst", [100 * max(errors)], unit="%", below=20.0),
        )
    ]


def _resnet18(*, quick: bool) -> list[Measurement]:
    """The time of both calibrations of ResNet-18, with the command line's settings."""
    _say("deepvm calibrate compute and scaling, ResNet-18")
    began = time.monotonic()
    calibrate_compute(ComputeSettings(limit_s=1.0 if quick else 8.0))
    calibrate_scaling(ScalingSettings(limit_s=1.0 if quick else 8.0), warn=lambda _: None)
    taken = time.monotonic() - began
    return [measurement("deepvm calibrate compute and scaling of ResNet-18", [taken], below=180.0)]


def _point(one: Configuration, step_s: float) -> RooflinePoint:
    relative = SHARED if one.workers > 1 else None
    return RooflinePoint(peaks=HERE, load=one.load, step_s=step_s, relative_to=relative, label=one.title)


def _train(
    configurations: Sequence[Configuration], *, rounds: int, steps: int, warm: int
) -> tuple[list[list[tuple[float, float]]], tuple[float, float]]:
    """Return the steps of each configuration, and the run as a whole, by both clocks."""
    workers = configurations[0].workers
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="deepvm-benchmark-") as folder:
        task: dict[str, Any] = {
            "configurations": [asdict(c) for c in configurations], "rounds": rounds, "steps": steps, "warm": warm,
            "workers": workers, "meet": f"{folder}/meet",
        }  # fmt: skip
        began, used = time.monotonic(), _children_s()
        ranks = []
        try:
            for rank in range(workers):
                words = json.dumps({**task, "rank": rank, "cores": [cores[rank % len(cores)]]})
                out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
                ranks.append(subprocess.Popen([sys.executable, str(PROCESS), words], stdout=out, text=True))
            answer, _ = ranks[0].communicate(timeout=DEADLINE_S)
            taken = time.monotonic() - began
            codes = [rank.wait(timeout=60) for rank in ranks]
            processor = (_children_s() - used) / workers
        finally:
            for rank in ranks:
                rank.kill()
    if any(codes):
        raise RuntimeError(f"a process of the calibration benchmark ended with {codes}")
    return json.loads(answer), (taken, processor)


def _children_s() -> float:
    """Return the processor time of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _fit_table(roofline: Roofline, found: Measured) -> Table:
    rows = []
    for one in FITTED:
        predicted = roofline.seconds(one.load, HERE, SHARED if one.workers > 1 else None)
        measured = found.step_s(one)
        left_out = roofline.leave_one_out.get(one.title)
        rows.append(
            [one.title, f"{measured * 1e3:.1f} ms", f"{predicted / measured - 1:+.1%}",
             "" if left_out is None else f"{left_out:+.1%}"]
        )  # fmt: skip
    columns = ["configuration", "measured", "fit", "left out"]
    return Table(title=f"The configurations of the fit, {found.clock} time", columns=columns, rows=rows)


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} calibration: {text}", file=sys.stderr, flush=True)
