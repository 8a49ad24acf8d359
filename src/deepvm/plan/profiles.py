"""Measured profiles for the planner: profiles and a catalogue in; eFLOPS and speedup curves of its machines out.

Machines that were measured get their own figures. All others are estimated by a roofline fitted to the measured ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deepvm import strict_json as strict
from deepvm.catalog import Catalog, Instance
from deepvm.catalog.accelerators import Accelerator, find
from deepvm.errors import UsageError, listed
from deepvm.json_fields import json_fields
from deepvm.performance.crossvalidate import CurveChoice, choose_curve
from deepvm.performance.curves import curve_from_spec
from deepvm.performance.eflops import T4_EFLOPS
from deepvm.performance.measured import Machine, optional
from deepvm.performance.profile import ComputePoint, Profile, ScalingPoint, merge
from deepvm.performance.roofline import (
    Load,
    Peaks,
    Prediction,
    Roofline,
    RooflinePoint,
    accelerator_peaks,
    fit_roofline,
    reference_roofline,
)

_PEAK_OF = {"fp16": 1.0, "bf16": 1.0, "tf32": 0.5}  # of the table's 16-bit figure; it has no FP32


@dataclass(frozen=True, kw_only=True, slots=True)
class PointRating:
    """A point of compute as users read it. What cannot be known is None."""

    point: ComputePoint
    samples_per_s: float
    flops_per_s: float | None
    mfu: float | None  # of the data sheet's peak
    eflops: float | None  # of the machine, all its accelerators at work
    eflops_low: float | None
    eflops_high: float | None

    def to_json(self) -> dict[str, Any]:
        point = self.point
        figures = json_fields(self, "samples_per_s flops_per_s mfu eflops eflops_low eflops_high")
        return {"batch": point.batch, "step_s": point.step_s.median_s, "spread": point.step_s.spread, **figures,
                "watts": point.watts}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredMachine:
    """An instance type of the catalogue that a profile was measured on."""

    instance: str
    eflops: float | None
    date: str
    curve: Mapping[str, Any] | None = None  # as curve_from_spec reads it
    curve_name: str | None = None
    curve_error: float | None = None  # in time, of points left out; None if none could be

    def to_json(self) -> dict[str, Any]:
        return json_fields(self, "instance eflops date curve curve_name curve_error")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Ratings:
    """What profiles say about the machines of a catalogue. A Request carries it."""

    workload: str
    precision: str
    machines: Mapping[str, MeasuredMachine]  # by instance
    roofline: Roofline | None  # None if no profile has steps of one worker
    load: Load | None  # of the step that rates all machines
    t4_step_s: float | None
    notes: tuple[str, ...]

    def eflops_of(self, instance: Instance) -> tuple[float, bool] | None:
        """Return a machine's eFLOPS, and True if they are an estimate; None if the profiles do not tell."""
        measured = self.machines.get(instance.name)
        if measured is not None and measured.eflops is not None:
            return measured.eflops, False
        gpu = None if instance.accelerator is None else find(instance.accelerator)
        if gpu is None or instance.eflops is not None:
            return None
        step = self.step_s(gpu)
        if step is None or self.t4_step_s is None:
            return None
        return T4_EFLOPS * self.t4_step_s / step.seconds * instance.accelerator_count, True

    def step_s(self, gpu: Accelerator) -> Prediction | None:
        """Predict the step of the profiles' workload on one accelerator."""
        if self.roofline is None or self.load is None:
            return None
        return self.roofline.predict(self.load, accelerator_peaks(gpu, self.precision))

    def curve_spec(self, instance: str) -> Mapping[str, Any] | None:
        measured = self.machines.get(instance)
        return None if measured is None else measured.curve

    def to_json(self) -> dict[str, Any]:
        return {
            **json_fields(self, "workload precision"),
            "machines": [machine.to_json() for machine in self.machines.values()],
            **json_fields(self, "roofline load t4_step_s notes"),
        }

    @classmethod
    def from_json(cls, document: Any) -> Ratings:
        """Read what a plan has kept of its profiles. MalformedJson if it is something else."""
        table = strict.table(document, "ratings")
        machines = [_machine_of(row) for row in strict.array(strict.member(table, "machines"), "machines", 10_000)]
        roofline, load = table.get("roofline"), table.get("load")
        return cls(
            workload=strict.text(strict.member(table, "workload"), "workload", 200),
            precision=strict.text(strict.member(table, "precision"), "precision", 20),
            machines={machine.instance: machine for machine in machines},
            roofline=None if roofline is None else Roofline.from_json(roofline),
            load=None if load is None else Load.from_json(load),
            t4_step_s=optional(strict.number, table.get("t4_step_s"), "t4_step_s", 0, 1e9),
            notes=tuple(
                strict.text(row, "a note", 2000) for row in strict.array(table.get("notes", []), "notes", 1000)
            ),
        )


def _machine_of(document: Any) -> MeasuredMachine:
    row = strict.table(document, "a measured machine")
    curve = row.get("curve")
    if curve is not None:
        curve_from_spec(strict.table(curve, "a curve"))  # refuses what is not one
    return MeasuredMachine(
        instance=strict.text(strict.member(row, "instance"), "instance", 200),
        eflops=optional(strict.number, row.get("eflops"), "eflops", 0, 1e12),
        date=strict.text(strict.member(row, "date"), "date", 40),
        curve=curve,
        curve_name=optional(strict.text, row.get("curve_name"), "curve_name", 200),
        curve_error=optional(strict.number, row.get("curve_error"), "curve_error", 0, 1e9),
    )


def rate_point(profile: Profile, point: ComputePoint, roofline: Roofline | None = None) -> PointRating:
    """Rate one point: 377 eFLOPS × the predicted step of a T4 over the measured one."""
    machine, step_s = profile.provenance.machine, point.step_s.median_s
    rates = {"samples_per_s": point.batch / step_s if step_s else 0.0}
    load, gpu = load_of_point(point), _accelerator(machine)
    flops = None if point.flops_per_step is None or not step_s else point.flops_per_step / step_s
    peak = None if gpu is None else _PEAK_OF.get(profile.precision, 0.0) * gpu.tflops_16bit * 1e12
    mfu = flops / peak if flops is not None and peak else None
    if load is None or not step_s:
        return PointRating(
            point=point, **rates, flops_per_s=flops, mfu=mfu, eflops=None, eflops_low=None, eflops_high=None
        )
    t4 = (roofline or reference_roofline()).predict(load, _t4_peaks(profile.precision))
    count = max(machine.accelerator_count, 1) * T4_EFLOPS / step_s
    return PointRating(
        point=point, **rates, flops_per_s=flops, mfu=mfu,
        eflops=t4.seconds * count, eflops_low=t4.low_s * count, eflops_high=t4.high_s * count,
    )  # fmt: skip


def rate_machines(catalog: Catalog, profiles: Sequence[Profile]) -> Ratings:
    """Rate the machines of a catalogue by profiles. UsageError if none of them says anything for a plan."""
    useful: list[Profile] = []
    notes: list[str] = []
    for profile in merge(profiles):
        if not profile.compute and not profile.scaling:
            continue
        problem = _unusable(catalog, profile)
        if problem is None:
            useful.append(profile)
        else:
            notes.append(problem)
    if not useful:
        if not any(profile.overheads for profile in profiles):  # these forecast restores on any machine
            raise UsageError(notes[0] if notes else "the profiles have no points of compute, scaling or overheads: "
                             "measure some with deepvm calibrate compute")  # fmt: skip
        return Ratings(
            workload=profiles[0].workload, precision=profiles[0].precision, machines={}, roofline=None, load=None,
            t4_step_s=None, notes=tuple(notes),
        )  # fmt: skip
    jobs = list(dict.fromkeys(f"{p.workload} in {p.precision}" for p in useful))
    if len(jobs) > 1:
        raise UsageError(f"the profiles are of several workloads ({listed(jobs, ', ')}): a plan is for one job")
    points = [(p, point) for p in useful for point in p.compute if load_of_point(point) is not None]
    roofline = _roofline(points)
    t4_step_s = load = None
    if roofline is not None:
        load = load_of_point(max((point for _, point in points), key=lambda point: point.batch))
        t4_step_s = None if load is None else roofline.seconds(load, _t4_peaks(useful[0].precision))
    machines: dict[str, MeasuredMachine] = {}
    for profile in useful:
        found = _matching(catalog, profile.provenance.machine)
        if not found:
            title = profile.provenance.machine.title
            notes.append(f"{catalog.name} has no machine like {title}: its measurements only rate others")
        curve, why_not = _curve(profile)
        notes += [why_not] if why_not else []
        eflops = _measured_eflops(profile, useful, roofline)
        for instance in found:
            machines[instance.name] = MeasuredMachine(
                instance=instance.name,
                eflops=eflops,
                date=profile.provenance.date,
                curve=None if curve is None else curve.best.curve.to_spec(),
                curve_name=None if curve is None else curve.best.name,
                curve_error=None if curve is None else curve.best.error,
            )
    return Ratings(
        workload=useful[0].workload,
        precision=useful[0].precision,
        machines=machines,
        roofline=roofline,
        load=load,
        t4_step_s=t4_step_s,
        notes=tuple(dict.fromkeys(notes)),
    )


def load_of_point(point: ComputePoint) -> Load | None:
    """Return what a point's step asked for; None if it was not counted."""
    if not point.flops_per_step or point.traffic_bytes_per_step is None:
        return None
    return Load(flops=point.flops_per_step, traffic_bytes=point.traffic_bytes_per_step)


def choose_scaling(points: Sequence[ScalingPoint], *, most_workers: int | None = None) -> CurveChoice | None:
    """Choose the curve of the largest set of comparable points; None without one worker and one more."""
    groups: dict[tuple[int | None, int | None], list[ScalingPoint]] = {}
    for point in points:
        groups.setdefault((point.batch, point.cores_per_worker), []).append(point)
    usable = [g for g in groups.values() if len({p.workers for p in g}) > 1 and any(p.workers == 1 for p in g)]
    if not usable:
        return None
    chosen = {p.workers: p for p in max(usable, key=len)}  # measured twice: the later one
    counts = sorted(chosen)
    gradients = [p.gradient_bytes for p in chosen.values() if p.gradient_bytes]
    return choose_curve(
        counts,
        [max(chosen[n].step_s.median_s, 1e-9) / n for n in counts],
        gradient_bytes=gradients[0] if gradients else None,
        noise=max(_standard_error(chosen[n]) for n in counts),
        most_nodes=most_workers,
    )


def _standard_error(point: ScalingPoint) -> float:
    """Return the relative uncertainty of a median: the spread holds nine of ten samples."""
    return point.step_s.spread / 3.3 * 1.25 / math.sqrt(len(point.step_s.seconds))


def _unusable(catalog: Catalog, profile: Profile) -> str | None:
    machine = profile.provenance.machine
    if machine.accelerator is None:
        return (
            f"the profile of {profile.workload} on {machine.cpu} ({machine.title}) has no accelerator: it says nothing "
            f"about the GPU machines of {catalog.name}; calibrate on one of them"
        )
    if _accelerator(machine) is None:
        return (
            f"the profile of {profile.workload} is of {machine.accelerator!r}, which the accelerator table does not "
            "have: it cannot rate other machines"
        )
    return None


def _accelerator(machine: Machine) -> Accelerator | None:
    return None if machine.accelerator is None else find(machine.accelerator)


def _t4_peaks(precision: str) -> Peaks:
    t4 = find("T4")
    if t4 is None:
        raise AssertionError("the accelerator table has no T4")
    return accelerator_peaks(t4, precision)


def _roofline(points: Sequence[tuple[Profile, ComputePoint]]) -> Roofline | None:
    """Fit all measured types, near the published ones. One type alone has their error for others."""
    rows = []
    for profile, point in points:
        load, gpu = load_of_point(point), _accelerator(profile.provenance.machine)
        if load is not None and gpu is not None and point.step_s.median_s > 0:
            peaks = accelerator_peaks(gpu, profile.precision)
            rows.append(RooflinePoint(peaks=peaks, load=load, step_s=point.step_s.median_s))
    if not rows:
        return None
    fitted = fit_roofline(rows, near=reference_roofline())
    if len(fitted.devices) == 1:
        fitted = replace(fitted, leave_one_out=reference_roofline().leave_one_out)
    return fitted


def _matching(catalog: Catalog, machine: Machine) -> list[Instance]:
    named = [i for i in catalog.instances if i.name == machine.instance]
    if named:
        return named
    gpu = _accelerator(machine)
    return [
        i
        for i in catalog.instances
        if i.accelerator is not None and find(i.accelerator) is gpu and i.accelerator_count == machine.accelerator_count
    ]


def _measured_eflops(profile: Profile, all_profiles: Sequence[Profile], roofline: Roofline | None) -> float | None:
    """Return the eFLOPS of a machine at its fastest point, beside a T4 that was measured or is predicted."""
    points = [p for p in profile.compute if load_of_point(p) is not None and p.step_s.median_s > 0]
    if not points:
        return None
    fastest = max(points, key=lambda point: point.batch / point.step_s.median_s)
    machine = profile.provenance.machine
    t4 = [
        point.step_s.median_s
        for other in all_profiles
        if _accelerator(other.provenance.machine) is find("T4")
        for point in other.compute
        if point.batch == fastest.batch
    ]
    if t4:
        return T4_EFLOPS * t4[0] / fastest.step_s.median_s * max(machine.accelerator_count, 1)
    return rate_point(profile, fastest, roofline).eflops


def _curve(profile: Profile) -> tuple[CurveChoice | None, str | None]:
    """Choose the curve of several machines; workers that shared one machine tell nothing about it."""
    apart = [p for p in profile.scaling if p.cores_per_worker is None]
    if profile.scaling and not apart:
        title = profile.provenance.machine.title
        return None, f"the scaling of {title} was measured within one machine: that is not a curve of several"
    return choose_scaling(apart), None
