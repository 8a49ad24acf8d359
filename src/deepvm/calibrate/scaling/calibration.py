"""``deepvm calibrate scaling``: worker counts in, a profile with step times by workers and the best curve out."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepvm.calibrate.profile_file import ProfileFile
from deepvm.errors import MissingExtra, UsageError
from deepvm.performance.crossvalidate import CurveChoice
from deepvm.performance.measured import Samples
from deepvm.performance.profile import Profile, ScalingPoint
from deepvm.plan.profiles import choose_scaling
from deepvm.runtime.this_machine import here_and_now

MOST_PER_CORE = 4
Tick = Callable[[str, int, int], None]
_BATCH = {"resnet18": 32, "tiny": 32}  # of each worker; others 1
_ELSEWHERE = ("ssh", "slurm", "ec2", "skypilot")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingSettings:
    """What to measure. One worker is always measured: a speedup is relative to it."""

    workers: tuple[int, ...] = (1, 2, 4)
    workload: str = "resnet18"
    width: int | None = None
    depth: int | None = None
    batch: int | None = None  # of each worker; the workload's own unless given
    precision: str = "fp32"
    device: str = "auto"
    on: str = "local"
    cores_per_worker: int | None = None  # an equal share for as many workers as the machine has cores for
    instance: str | None = None
    output: Path | None = None
    again: bool = False
    repeats: int = 20
    limit_s: float = 8.0
    most_workers: int | None = None  # that the next point may have

    def __post_init__(self) -> None:
        if self.on != "local":
            known = f"--on {self.on} cannot be done yet" if self.on in _ELSEWHERE else f"--on {self.on} is unknown"
            raise UsageError(f"{known}: deepvm calibrate scaling measures processes of this machine (--on local)")
        if not self.workers:
            raise UsageError("--workers names no count: write it like 1,2,4")
        for count in self.workers:
            if count < 1:
                raise UsageError(f"--workers has {count}: counts are one or more")
        if self.batch is not None and not 1 <= self.batch <= 2**20:
            raise UsageError(f"--batch is {self.batch}: it must be from 1 to {2**20}")
        if self.repeats < 1:
            raise UsageError(f"--repeats is {self.repeats}: it must be one or more")
        if not 0 < self.limit_s < 1e6:
            raise UsageError(f"--seconds is {self.limit_s:g}: it must be above zero")

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(sorted({1, *self.workers}))

    @property
    def title(self) -> str:
        varied = "".join(f", {name} {v}" for name, v in (("width", self.width), ("depth", self.depth)) if v is not None)
        return f"{self.workload}{varied}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingCalibration:
    profile: Profile
    choice: CurveChoice | None  # None if one worker alone was measured
    measured: int  # points of this call; the others were in the file

    def to_json(self) -> dict[str, Any]:
        return {
            "profile": self.profile.to_json(),
            "choice": None if self.choice is None else self.choice.to_json(),
            "measured_now": self.measured,
        }


def calibrate_scaling(
    settings: ScalingSettings = ScalingSettings(),
    progress: Tick = lambda *_: None,
    warn: Callable[[str], None] = warnings.warn,
) -> ScalingCalibration:
    """Measure data-parallel steps with several workers here. Points that the output file has are not measured again."""
    try:
        from deepvm.calibrate.compute.devices import check_precision, pick_device
        from deepvm.calibrate.workloads import build
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtra("calibrating", "train") from None
    build(settings.workload)  # refuses an unknown name
    device = pick_device(settings.device)
    check_precision(settings.precision, device.torch)
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    on_gpus = device.torch.type == "cuda"
    if device.torch.type == "mps" and settings.counts[-1] > 1:
        raise UsageError("an Apple GPU cannot be shared by several workers: say --device cpu")
    warning = check_counts(settings.counts, len(cores), device.count if on_gpus else None)
    if warning is not None:
        warn(warning)
    share = settings.cores_per_worker or default_share(settings.counts, len(cores))
    if not 1 <= share <= len(cores):
        raise UsageError(f"--cores-per-worker is {share}: this machine has {len(cores)} cores")
    now = here_and_now()
    machine = device.on(now.machine)
    if settings.instance is not None:
        machine = replace(machine, instance=settings.instance)
    file = ProfileFile.open(
        settings.output,
        workload=settings.title,
        precision=settings.precision,
        provenance=replace(now, machine=machine),
    )
    if settings.again:
        file.forget("scaling")
    batch = settings.batch or _BATCH.get(settings.workload, 1)
    done = {p.workers for p in file.profile.scaling if (p.batch, p.cores_per_worker) == (batch, share)}
    todo = [count for count in settings.counts if count not in done]
    for i, count in enumerate(todo):
        what = f"{settings.title}, {count} worker{'s' if count > 1 else ''}"
        progress(what, i, len(todo))
        point, notes = _measure(settings, device.torch.type, count, batch, share, cores)
        file.add(point, notes=notes)
        progress(what, i + 1, len(todo))
    choice = choose_scaling(
        [p for p in file.profile.scaling if (p.batch, p.cores_per_worker) == (batch, share)],
        most_workers=settings.most_workers or (device.count if on_gpus else max(len(cores), settings.counts[-1])),
    )
    return ScalingCalibration(profile=file.profile, choice=choice, measured=len(todo))


def default_share(counts: tuple[int, ...], cores: int) -> int:
    """Return the cores of each worker: equal for all points, so that they differ by the exchange alone."""
    return max(1, cores // max(count for count in counts if count <= cores or count == 1))


def check_counts(counts: tuple[int, ...], cores: int, gpus: int | None) -> str | None:
    """Return a warning of more workers than cores, and refuse what would measure waiting alone."""
    most = counts[-1]
    if gpus is not None:
        if most > gpus:
            raise UsageError(f"{most} workers need {most} GPUs, this machine has {gpus}: give fewer --workers")
        return None
    if most > MOST_PER_CORE * cores:
        raise UsageError(
            f"{most} workers on {cores} cores would only wait for each other: "
            f"at most {MOST_PER_CORE * cores} (4 for each core) can be measured here"
        )
    if most > cores:
        return f"{most} workers share {cores} cores: such points tell of this machine, not of {most} machines"
    return None


def _measure(
    settings: ScalingSettings, device: str, count: int, batch: int, share: int, cores: list[int]
) -> tuple[ScalingPoint, tuple[str, ...]]:
    from deepvm.calibrate.compute.steady import doubts
    from deepvm.calibrate.scaling.processes import cores_of_ranks, run_group

    load = os.getloadavg()[0] if hasattr(os, "getloadavg") and count == 1 else None
    task = {
        "workload": settings.workload, "width": settings.width, "depth": settings.depth, "batch": batch,
        "precision": settings.precision, "device": device, "repeats": settings.repeats, "limit_s": settings.limit_s,
    }  # fmt: skip
    answer = run_group(task, workers=count, cores=cores_of_ranks(count, share, cores))
    samples = Samples(tuple(float(s) for s in answer["seconds"]))
    point = ScalingPoint(
        workers=count,
        batch=batch,
        step_s=samples,
        gradient_bytes=int(answer["gradient_bytes"]),
        cores_per_worker=share,
    )
    named = f"scaling with {count} worker{'s' if count > 1 else ''}"
    notes = doubts(named, samples, load=load, cores=len(cores), settled=bool(answer["settled"]))
    if count * share > len(cores) and device == "cpu":
        notes = (*notes, f"{named}: they shared {len(cores)} cores")
    return point, notes
