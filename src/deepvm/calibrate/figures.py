"""Figures of calibrations: profiles in, one image with points, fitted curves and bands out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deepvm.drawing.canvas import BLUE, GREEN, INK, ORANGE, PURPLE, SKY, VERMILION, figure, headline
from deepvm.errors import UsageError
from deepvm.performance.crossvalidate import CurveChoice
from deepvm.performance.profile import Profile
from deepvm.performance.roofline import Load, Peaks, Roofline, RooflinePoint, fit_roofline
from deepvm.plan.profiles import choose_scaling, load_of_point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CURVES = {
    "all-reduce": BLUE,
    "universal-scalability": PURPLE,
    "amdahl": GREEN,
    "logistic": ORANGE,
    "measured": VERMILION,
}
_SURE = 1.64


def draw_profiles(profiles: Sequence[Profile], path: Path, *, choice: CurveChoice | None = None) -> None:
    """Draw a row for every profile: step times by batch, and speedup by workers, whichever it has.

    ``choice`` replaces the curves that are chosen from the points."""
    drawn_rows = [p for p in profiles if p.compute or p.scaling]
    if not drawn_rows:
        raise UsageError("the profiles have no points of compute or scaling to draw")
    columns = max(bool(p.compute) + bool(p.scaling) for p in drawn_rows)
    size: dict[str, Any] = {"width_in": 5.4 * columns + 0.6, "height_in": 3.7 * len(drawn_rows) + 0.8}
    with figure([path], **size) as drawn:
        panels = drawn.subplots(len(drawn_rows), columns, squeeze=False)
        machine = drawn_rows[0].provenance.machine
        headline(drawn, "Calibration", f"{machine.cpu}; bars and bands from the 5th to the 95th percentile.")
        for row, profile in zip(panels, drawn_rows, strict=True):
            axes = iter(row)
            if profile.compute:
                _draw_compute(next(axes), profile)
            if profile.scaling:
                _draw_scaling(next(axes), profile, choice or choose_scaling(profile.scaling))
            for empty in axes:
                empty.set_axis_off()


def fit_here(profile: Profile) -> Roofline | None:
    """Fit a roofline of this device alone: arithmetic, and the start of operations. None with fewer than two points."""
    points = []
    for point in profile.compute:
        load = load_of_point(point)
        if load is not None and point.step_s.median_s > 0:
            alone = Load(flops=load.flops, traffic_bytes=0.0, operations=point.operations_per_step or 1)
            title = profile.provenance.machine.title
            points.append(RooflinePoint(peaks=Peaks(device=title), load=alone, step_s=point.step_s.median_s))
    return fit_roofline(points) if len(points) > 1 else None


def _draw_compute(axes: Axes, profile: Profile) -> None:
    points = sorted(profile.compute, key=lambda p: p.batch)
    x = np.array([p.batch for p in points], dtype=np.float64)
    _errorbars(axes, x, [p.step_s for p in points])
    fitted, known = fit_here(profile), [p for p in points if load_of_point(p) is not None]
    if fitted is not None and known:
        per_sample = known[-1].flops_per_step or 0.0
        operations = known[-1].operations_per_step or 1
        batches = np.linspace(0.5 * x.min(), 1.2 * x.max(), 60)
        alone = Peaks(device="")
        loads = [
            Load(flops=per_sample / known[-1].batch * b, traffic_bytes=0.0, operations=operations) for b in batches
        ]
        times = np.array([fitted.seconds(load, alone) for load in loads])
        label = "arithmetic + operations"
        if fitted.leave_one_out:
            factor = math.exp(_SURE * fitted.uncertainty)
            axes.fill_between(batches, times / factor, times * factor, color=SKY, alpha=0.25, linewidth=0)
            label += f" ({fitted.error:.1%} off)"
        axes.plot(batches, times, color=BLUE, linewidth=1.9, label=label)
        axes.legend(loc="upper left", fontsize=8.5)
    axes.set_title(f"Compute: {profile.workload}, {profile.provenance.machine.title}")
    axes.set_xlabel("batch")
    axes.set_ylabel("seconds a step")
    axes.set_ylim(bottom=0)


def _draw_scaling(axes: Axes, profile: Profile, choice: CurveChoice | None) -> None:
    axes.set_title(f"Scaling: {profile.workload}, {profile.provenance.machine.title}")
    axes.set_xlabel("workers")
    if choice is None:
        _errorbars(axes, np.array([p.workers for p in profile.scaling]), [p.step_s for p in profile.scaling])
        axes.set_ylabel("seconds a step")
        return
    last = max(choice.nodes[-1], choice.next_nodes or 0)
    counts = np.arange(1, last + 1)
    low, high = choice.band(counts)
    axes.fill_between(counts, low, high, color=SKY, alpha=0.25, linewidth=0)
    for candidate in reversed(choice.candidates):
        error = "untested" if candidate.error is None else f"{candidate.error:.1%}"
        best = candidate is choice.best
        axes.plot(
            counts, candidate.curve.speedup(counts), color=_CURVES.get(candidate.name, INK),
            linewidth=2.4 if best else 1.2, linestyle="-" if best else (0, (4, 2)),
            label=f"{candidate.name} ({error}){', the best' if best else ''}",
        )  # fmt: skip
    axes.scatter(choice.nodes, choice.seconds[0] / np.asarray(choice.seconds), s=34, color=INK, zorder=5)
    if choice.next_nodes is not None:
        axes.axvline(choice.next_nodes, color=INK, linewidth=0.8, linestyle=(0, (1, 2)))
        axes.annotate("measure next", xy=(choice.next_nodes, 0.02), xycoords=("data", "axes fraction"), fontsize=8,
                      ha="right", rotation=90, va="bottom")  # fmt: skip
    axes.set_ylabel("speedup over one worker")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left", fontsize=8)


def _errorbars(axes: Axes, x: Any, samples: Sequence[Any]) -> None:
    y = np.array([s.median_s for s in samples])
    ends = np.array([[s.median_s - s.quantile_s(0.05), s.quantile_s(0.95) - s.median_s] for s in samples]).T
    axes.errorbar(x, y, yerr=np.maximum(ends, 0), fmt="o", color=INK, markersize=5, capsize=3, zorder=5)
