"""``deepvm calibrate compute``: settings in, a profile with step times by batch size and this machine's eFLOPS out."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepvm.calibrate.profile_file import ProfileFile
from deepvm.errors import MissingExtra, UsageError
from deepvm.performance.job import Job
from deepvm.performance.profile import ComputePoint, Profile
from deepvm.plan.profiles import PointRating, rate_point
from deepvm.runtime.this_machine import here_and_now
from deepvm.units import format_bytes

# Batches that take a second or less on two cores; a GPU starts where it has enough work.
BATCHES = {
    "cpu": {"resnet18": (16, 32, 64), "resnet50": (1, 2, 4), "efficientnet-v2-m": (1, 2), "gpt2": (1, 2)},
    "gpu": {"resnet18": (128, 256, 512), "resnet50": (32, 64, 128), "efficientnet-v2-m": (16, 32, 64), "gpt2": (4, 8)},
}
_OTHERWISE = (16, 32, 64)
_MOST_BATCH = 2**20
Tick = Callable[[str, int, int], None]  # what is measured, points done, all points


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeSettings:
    """What to measure. ``job`` names a built-in workload, or was itself measured on this machine."""

    workload: str = "resnet18"
    job: Job | None = None
    batches: tuple[int, ...] = ()  # the workload's own if empty
    precision: str = "fp32"
    device: str = "auto"
    instance: str | None = None  # the cloud's name of this machine, if it cannot be read
    output: Path | None = None
    again: bool = False  # measure points that the output already has
    repeats: int = 20
    limit_s: float = 8.0  # of the warm-up and of the timed steps of one point

    def __post_init__(self) -> None:
        for batch in self.batches:
            if not 1 <= batch <= _MOST_BATCH:
                raise UsageError(f"--batch is {batch}: it must be from 1 to {_MOST_BATCH}")
        if self.repeats < 1:
            raise UsageError(f"--repeats is {self.repeats}: it must be one or more")
        if not 0 < self.limit_s < 1e6:
            raise UsageError(f"--seconds is {self.limit_s:g}: it must be above zero")


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeCalibration:
    profile: Profile
    ratings: tuple[PointRating, ...]
    measured: int  # points of this call; the others were in the file

    def to_json(self) -> dict[str, Any]:
        return {
            "profile": self.profile.to_json(),
            "points": [rating.to_json() for rating in self.ratings],
            "measured_now": self.measured,
        }


def calibrate_compute(
    settings: ComputeSettings = ComputeSettings(),
    progress: Tick = lambda *_: None,
) -> ComputeCalibration:
    """Measure the steps of a workload on this machine. Points that the output file has are not measured again."""
    try:
        from deepvm.calibrate.compute.measuring import Measuring
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtra("calibrating", "train") from None
    from deepvm.calibrate.compute.devices import check_precision, pick_device

    device = pick_device(settings.device)
    precision = settings.precision if settings.job is None else settings.job.precision
    check_precision(precision, device.torch)
    now = here_and_now()
    machine = device.on(now.machine)
    if settings.instance is not None:
        machine = replace(machine, instance=settings.instance)
    now = replace(now, machine=machine)
    name = settings.workload if settings.job is None else settings.job.name
    work = Measuring.of(name, settings.job, machine)
    file = ProfileFile.open(settings.output, workload=name, precision=precision, provenance=now)
    if settings.again:
        file.forget("compute")
    done = {point.batch for point in file.profile.compute}
    if work is None:
        assert settings.job is not None  # noqa: S101 - Measuring.of refuses anything else
        todo = [] if settings.job.batch in done else [settings.job.batch or 1]
    else:
        todo = [batch for batch in _batches(settings, device.torch.type) if batch not in done]
    for i, batch in enumerate(todo):
        progress(f"{name}, batch {batch}", i, len(todo))
        if work is None:
            file.add(_point_of(settings.job))
        else:
            counts = work.count(batch, precision)
            _check_memory(name, batch, counts.activation_bytes + 2 * counts.gradient_bytes, machine.memory_bytes)
            load = os.getloadavg()[0] if i == 0 and hasattr(os, "getloadavg") else None
            point, notes = work.measure(
                batch,
                device,
                counts,
                precision=precision,
                repeats=settings.repeats,
                limit_s=settings.limit_s,
                load=load,
            )
            file.add(point, notes=notes)
        progress(f"{name}, batch {batch}", i + 1, len(todo))
    profile = file.profile
    if settings.output is not None and not settings.output.exists():
        profile.write(settings.output)
    ratings = tuple(rate_point(profile, point) for point in sorted(profile.compute, key=lambda p: p.batch))
    return ComputeCalibration(profile=profile, ratings=ratings, measured=len(todo))


def _batches(settings: ComputeSettings, device: str) -> tuple[int, ...]:
    if settings.batches:
        return tuple(dict.fromkeys(settings.batches))
    if settings.job is not None and settings.job.batch is not None:
        return (settings.job.batch,)
    return BATCHES["cpu" if device == "cpu" else "gpu"].get(settings.workload, _OTHERWISE)


def _check_memory(name: str, batch: int, needed: int, memory_bytes: int | None) -> None:
    """Refuse a batch that cannot fit: the system would kill the process, or swap."""
    if memory_bytes is not None and needed > memory_bytes:
        raise UsageError(
            f"{name} with a batch of {batch} needs more than {format_bytes(needed)}, this machine has "
            f"{format_bytes(memory_bytes)}: give a smaller --batch"
        )


def _point_of(job: Job | None) -> ComputePoint:
    """Make a point of what ``deepvm profile`` measured."""
    if job is None or job.step_s is None:
        raise UsageError("the job has no step time: measure it with deepvm profile -- train.py")
    return ComputePoint(
        batch=job.batch or 1,
        step_s=job.step_s,
        flops_per_step=job.flops_per_step,
        traffic_bytes_per_step=job.traffic_bytes_per_step,
    )
