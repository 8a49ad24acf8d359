"""Step times and makespans of eight configurations, predicted by a roofline that was fitted to others, and measured.

Configurations are residual networks on images of 32 pixels that differ in batch, width, depth and workers; each worker
has one core. All configurations of one number of workers take turns in the same processes. Makespans are those of fresh
processes: their start, known from configurations of the fit, and 30 predicted steps. A round has the steps of all
configurations and then all makespans, and figures are medians of rounds, so that a busy neighbour meets both alike.
"""

from __future__ import annotations

import json
import os
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


def run(options: Options) -> Result:
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    times: dict[Configuration, list[float]] = {one: [] for one in (*FITTED, *PREDICTED)}
    runs: dict[Configuration, list[float]] = {one: [] for one in (*STARTS, *PREDICTED)}
    for round_ in range(rounds):
        for workers in (1, 2):
            chosen = [c for c in times if c.workers == workers]
            _say(f"round {round_ + 1} of {rounds}: steps of {len(chosen)} configurations with {workers} worker(s)")
            for one, taken in zip(chosen, _train(chosen, rounds=TURNS, steps=STEPS, warm=WARM)[0], strict=True):
                times[one] += taken
        for one, makespans in runs.items():
            _say(f"round {round_ + 1} of {rounds}: makespan of {one.title}")
            makespans.append(_train([one], rounds=1, steps=RUN_STEPS, warm=0)[1])
    roofline = fit_roofline([_point(c, statistics.median(times[c])) for c in FITTED])
    starts = {workers: _start_s(workers, times, runs) for workers in (1, 2)}
    rows, step_errors, run_errors = [], [], []
    for one in PREDICTED:
        predicted = roofline.seconds(one.load, HERE, SHARED if one.workers > 1 else None)
        measured = statistics.median(times[one])
        makespan = statistics.median(runs[one])
        expected = starts[one.workers] + RUN_STEPS * predicted
        step_errors.append(abs(predicted / measured - 1))
        run_errors.append(abs(expected / makespan - 1))
        rows.append(
            [one.title, f"{predicted * 1e3:.1f} ms", f"{measured * 1e3:.1f} ms", f"{predicted / measured - 1:+.1%}",
             f"{expected:.2f} s", f"{makespan:.2f} s", f"{expected / makespan - 1:+.1%}"]
        )  # fmt: skip
    columns = ["configuration", "step predicted", "measured", "error", "makespan predicted", "measured", "error"]
    return Result(
        title="Calibration",
        about="Step times and makespans that a roofline fitted here predicts for configurations it has not seen.",
        seed=0,
        measurements=[*_errors(step_errors, run_errors), *_resnet18(quick=options.quick)],
        tables=[Table(title="Predicted and measured", columns=columns, rows=rows), _fit_table(roofline, times)],
        notes=[
            "Widths are multiples of 16, as vectors are: with 24 channels a step took 25 % longer than predicted.",
            f"The roofline was fitted to {len(FITTED)} other configurations; all medians are of {rounds} rounds.",
            f"By leaving one out it tells an error of {roofline.error or 0:.1%} (median), "
            f"{roofline.worst_error or 0:.1%} (worst).",
            "Load before and after: " + ", ".join(f"{load:.1f}" for load in os.getloadavg()) + " (1, 5, 15 minutes).",
        ],
        samples={
            **{c.title: taken for c, taken in times.items()},
            **{f"makespan of {c.title}": taken for c, taken in runs.items()},
        },
    )


def _errors(steps: Sequence[float], runs: Sequence[float]) -> list[Measurement]:
    return [
        measurement("error of 8 predicted step times, median", [100 * e for e in steps], unit="%", below=10.0),
        measurement("error of 8 predicted step times, worst", [100 * max(steps)], unit="%", below=20.0),
        measurement("error of 8 predicted makespans, median", [100 * e for e in runs], unit="%", below=10.0),
        measurement("error of 8 predicted makespans, worst", [100 * max(runs)], unit="%", below=20.0),
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


def _start_s(workers: int, times: dict[Configuration, list[float]], runs: dict[Configuration, list[float]]) -> float:
    """What a run takes besides its steps, from configurations of the fit."""
    known = [c for c in STARTS if c.workers == workers]
    besides = [statistics.median(runs[c]) - RUN_STEPS * statistics.median(times[c]) for c in known]
    return max(0.0, statistics.mean(besides))


def _train(
    configurations: Sequence[Configuration], *, rounds: int, steps: int, warm: int
) -> tuple[list[list[float]], float]:
    """Return the step times of each configuration, and the wall time of all."""
    workers = configurations[0].workers
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="deepvm-benchmark-") as folder:
        task: dict[str, Any] = {
            "configurations": [asdict(c) for c in configurations], "rounds": rounds, "steps": steps, "warm": warm,
            "workers": workers, "meet": f"{folder}/meet",
        }  # fmt: skip
        began = time.monotonic()
        ranks = []
        try:
            for rank in range(workers):
                words = json.dumps({**task, "rank": rank, "cores": [cores[rank % len(cores)]]})
                out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
                ranks.append(subprocess.Popen([sys.executable, str(PROCESS), words], stdout=out, text=True))
            answer, _ = ranks[0].communicate(timeout=DEADLINE_S)
            taken = time.monotonic() - began
            codes = [rank.wait(timeout=60) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    if any(codes):
        raise RuntimeError(f"a process of the calibration benchmark ended with {codes}")
    return json.loads(answer), taken


def _fit_table(roofline: Roofline, times: dict[Configuration, list[float]]) -> Table:
    rows = []
    for one in FITTED:
        predicted = roofline.seconds(one.load, HERE, SHARED if one.workers > 1 else None)
        measured = statistics.median(times[one])
        left_out = roofline.leave_one_out.get(one.title)
        rows.append(
            [one.title, f"{measured * 1e3:.1f} ms", f"{predicted / measured - 1:+.1%}",
             "" if left_out is None else f"{left_out:+.1%}"]
        )  # fmt: skip
    columns = ["configuration", "measured", "fit", "left out"]
    return Table(title="The configurations of the fit", columns=columns, rows=rows)


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} calibration: {text}", file=sys.stderr, flush=True)
