"""``deepvm calibrate scaling``: worker counts in, a profile with step times by workers and the best curve out."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepvm.calibrate.profile_file import ProfileFile
from deepvm.calibrate.scaling.hosts import PYTHON, Hosts, examine, parse_hosts
from deepvm.errors import MissingExtra, UsageError
from deepvm.performance.crossvalidate import CurveChoice
from deepvm.performance.measured import Provenance, Samples
from deepvm.performance.profile import Profile, ScalingPoint
from deepvm.plan.profiles import choose_scaling
from deepvm.runtime.this_machine import here_and_now

if TYPE_CHECKING:
    from deepvm.calibrate.compute.devices import TrainingDevice

MOST_PER_CORE = 4
Tick = Callable[[str, int, int], None]
_BATCH = {"resnet18": 32, "tiny": 32}  # of each worker; others 1


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
    on: str = "local"  # or ssh:HOST,HOST: machines of one kind, each of which runs one worker
    remote_python: str = PYTHON  # that the hosts have deepvm in
    cores_per_worker: int | None = None  # an equal share for as many workers as the machine has cores for
    instance: str | None = None
    output: Path | None = None
    again: bool = False
    repeats: int = 20
    limit_s: float = 8.0
    most_workers: int | None = None  # that the next point may have

    def __post_init__(self) -> None:
        hosts = parse_hosts(self.on)
        if hosts and self.cores_per_worker is not None:
            raise UsageError("--cores-per-worker is for workers of this machine: a host of --on ssh: runs one worker")
        if hosts and self.workers and max(self.workers) > len(hosts):
            raise UsageError(f"{max(self.workers)} workers need as many hosts, --on names {len(hosts)}")
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
    """Measure data-parallel steps with several workers. Points that the output file has are not measured again."""
    try:
        import torch

        from deepvm.calibrate.compute.devices import check_precision, pick_device
        from deepvm.calibrate.workloads import build
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtra("calibrating", "train") from None
    build(settings.workload)  # refuses an unknown name
    names = parse_hosts(settings.on)
    if names:
        progress(f"asking {len(names)} hosts", 0, len(names))
        place = _elsewhere(settings, examine(names, python=settings.remote_python, device=settings.device))
    else:
        place = _here(settings, pick_device(settings.device), warn)
    check_precision(settings.precision, torch.device(place.device))
    file = ProfileFile.open(
        settings.output, workload=settings.title, precision=settings.precision, provenance=place.provenance
    )
    if settings.again:
        file.forget("scaling")
    batch = settings.batch or _BATCH.get(settings.workload, 1)
    done = {p.workers for p in file.profile.scaling if (p.batch, p.cores_per_worker) == (batch, place.share)}
    todo = [count for count in settings.counts if count not in done]
    for i, count in enumerate(todo):
        what = f"{settings.title}, {count} worker{'s' if count > 1 else ''}"
        progress(what, i, len(todo))
        point, notes = _measure(settings, place, count, batch)
        file.add(point, notes=notes)
        progress(what, i + 1, len(todo))
    choice = choose_scaling(
        [p for p in file.profile.scaling if (p.batch, p.cores_per_worker) == (batch, place.share)],
        most_workers=settings.most_workers or max(place.most_workers, settings.counts[-1]),
    )
    return ScalingCalibration(profile=file.profile, choice=choice, measured=len(todo))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Where workers run: on the cores or the GPUs of this machine, or one on each host."""

    provenance: Provenance
    device: str
    most_workers: int
    share: int | None = None  # cores of each worker of this machine
    cores: tuple[int, ...] = ()
    hosts: Hosts | None = None


def _here(settings: ScalingSettings, device: TrainingDevice, warn: Callable[[str], None]) -> _Place:
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    gpus = device.count if device.torch.type == "cuda" else None
    if device.torch.type == "mps" and settings.counts[-1] > 1:
        raise UsageError("an Apple GPU cannot be shared by several workers: say --device cpu")
    warning = check_counts(settings.counts, len(cores), gpus)
    if warning is not None:
        warn(warning)
    share = settings.cores_per_worker or default_share(settings.counts, len(cores))
    if not 1 <= share <= len(cores):
        raise UsageError(f"--cores-per-worker is {share}: this machine has {len(cores)} cores")
    now = here_and_now()
    return _Place(
        provenance=_as_instance(replace(now, machine=device.on(now.machine)), settings.instance),
        device=device.torch.type,
        most_workers=len(cores) if gpus is None else gpus,
        share=share,
        cores=tuple(cores),
    )


def _elsewhere(settings: ScalingSettings, hosts: Hosts) -> _Place:
    now = replace(hosts.provenance, date=here_and_now().date)
    return _Place(
        provenance=_as_instance(now, settings.instance),
        device=hosts.device,
        most_workers=len(hosts.names),
        hosts=hosts,
    )


def _as_instance(provenance: Provenance, instance: str | None) -> Provenance:
    if instance is None:
        return provenance
    return replace(provenance, machine=replace(provenance.machine, instance=instance))


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


def _measure(settings: ScalingSettings, place: _Place, count: int, batch: int) -> tuple[ScalingPoint, tuple[str, ...]]:
    from deepvm.calibrate.compute.steady import doubts
    from deepvm.calibrate.scaling.processes import cores_of_ranks, run_group

    load = os.getloadavg()[0] if hasattr(os, "getloadavg") and count == 1 and place.hosts is None else None
    task = {
        "workload": settings.workload, "width": settings.width, "depth": settings.depth, "batch": batch,
        "precision": settings.precision, "device": place.device, "repeats": settings.repeats,
        "limit_s": settings.limit_s,
    }  # fmt: skip
    cores = None if place.share is None else cores_of_ranks(count, place.share, place.cores)
    answer = run_group(task, workers=count, cores=cores, hosts=place.hosts)
    samples = Samples(tuple(float(s) for s in answer["seconds"]))
    point = ScalingPoint(
        workers=count,
        batch=batch,
        step_s=samples,
        gradient_bytes=int(answer["gradient_bytes"]),
        cores_per_worker=place.share,
    )
    named = f"scaling with {count} worker{'s' if count > 1 else ''}"
    notes = doubts(named, samples, load=load, cores=len(place.cores), settled=bool(answer["settled"]))
    if place.share is not None and count * place.share > len(place.cores) and place.device == "cpu":
        notes = (*notes, f"{named}: they shared {len(place.cores)} cores")
    return point, notes
