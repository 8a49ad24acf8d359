"""Profiles as tables and JSON: profiles and fits in, what ``deepvm calibrate`` prints out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.markup import escape

from deepvm.cli.render import console, table
from deepvm.performance.crossvalidate import CurveChoice
from deepvm.performance.measured import Samples
from deepvm.performance.profile import Profile
from deepvm.plan.profiles import PointRating, choose_scaling, rate_point
from deepvm.units import format_bytes, format_seconds


def profile_document(profile: Profile) -> dict[str, Any]:
    """Return a profile with what follows from it."""
    choice = choose_scaling(profile.scaling)
    return {
        "profile": profile.to_json(),
        "compute": [rating.to_json() for rating in _ratings(profile)],
        "scaling": None if choice is None else choice.to_json(),
    }


def show_profile(profile: Profile) -> None:
    """Print all points of a profile."""
    if profile.compute:
        show_compute(profile, _ratings(profile), notes=False)
    if profile.scaling:
        show_choice(profile, choose_scaling(profile.scaling), notes=False)
    if profile.network:
        title = f"Network  {_title(profile)}"
        rows = table(title, ">workers", ">memory nodes", ">Gbit/s", ">checkpoint", ">remote", ">5 to 95 %")
        for n in sorted(profile.network, key=lambda n: (n.link_gbps or 0.0, n.workers, n.memory_nodes)):
            link = "-" if n.link_gbps is None else f"{n.link_gbps:g}"
            size = format_bytes(n.checkpoint_bytes)
            rows.add_row(str(n.workers), str(n.memory_nodes), link, size, *_times(n.remote_s))
        console.print(rows)
    if profile.overheads:
        rows = table(f"Overheads  {_title(profile)}", "what", ">state", ">time", ">5 to 95 %")
        for o in sorted(profile.overheads, key=lambda o: (o.name, o.state_bytes)):
            rows.add_row(o.name, format_bytes(o.state_bytes), *_times(o.seconds))
        console.print(rows)
    _show_notes(profile)


def show_compute(profile: Profile, ratings: Sequence[PointRating], *, notes: bool = True) -> None:
    title = f"Compute  {_title(profile)}"
    rows = table(
        title, ">batch", ">step", ">5 to 95 %", ">samples/s", ">GFLOP/s", ">MFU", ">W", ">eFLOPS", ">from", ">to"
    )
    for r in ratings:
        watts = r.point.watts
        rows.add_row(
            str(r.point.batch),
            *_times(r.point.step_s),
            f"{r.samples_per_s:,.4g}",
            "-" if r.flops_per_s is None else f"{r.flops_per_s / 1e9:,.4g}",
            "-" if r.mfu is None else f"{r.mfu:.0%}",
            "-" if watts is None else f"{watts:.0f}",
            *("-" if value is None else f"~{value:,.3g}" for value in (r.eflops, r.eflops_low, r.eflops_high)),
        )
    console.print(rows)
    console.print("eFLOPS: 377 × the step predicted for a T4 over the step measured here", style="dim")
    if notes:
        _show_notes(profile)


def show_choice(profile: Profile, choice: CurveChoice | None, *, notes: bool = True) -> None:
    """Print points of scaling, the curves by their errors, and the next point."""
    times = table(f"Scaling  {_title(profile)}", ">workers", ">batch each", ">cores each", ">step", ">5 to 95 %")
    for point in sorted(profile.scaling, key=lambda p: (p.batch or 0, p.cores_per_worker or 0, p.workers)):
        shares = ("-" if value is None else str(value) for value in (point.batch, point.cores_per_worker))
        times.add_row(str(point.workers), *shares, *_times(point.step_s))
    console.print(times)
    if choice is None:
        console.print("one worker and another count are needed for a curve", style="yellow")
    else:
        _show_curves(choice)
    if notes:
        _show_notes(profile)


def _show_curves(choice: CurveChoice) -> None:
    last = choice.nodes[-1]
    rows = table("\nCurves  the best first; errors in time, of points left out", "curve", ">error", ">worst",
                 f">speedup of {last}")  # fmt: skip
    for candidate in choice.candidates:
        figures = (candidate.error, candidate.worst_error)
        cells = ("untested" if value is None else f"{value:.1%}" for value in figures)
        rows.add_row(candidate.name, *cells, f"{float(candidate.curve.speedup([last])[0]):.2f}")
    console.print(rows)
    low, high = choice.band([last])
    console.print(escape(f"{choice.verdict}; {last} workers: {low[0]:.2f} to {high[0]:.2f} times one"), style="dim")
    if choice.next_nodes is not None and choice.disagreement is not None:
        text = f"measure next: {choice.next_nodes} workers, where the curves differ by {choice.disagreement:.0%}"
        console.print(escape(text), style="dim")


def _ratings(profile: Profile) -> list[PointRating]:
    return [rate_point(profile, point) for point in sorted(profile.compute, key=lambda p: p.batch)]


def _title(profile: Profile) -> str:
    where = profile.provenance
    return escape(f"{profile.workload} in {profile.precision} on {where.machine.title}, {where.date[:10]}")


def _times(samples: Samples) -> tuple[str, str]:
    ends = f"{format_seconds(samples.quantile_s(0.05))} to {format_seconds(samples.quantile_s(0.95))}"
    return format_seconds(samples.median_s), ends


def _show_notes(profile: Profile) -> None:
    for note in profile.notes:
        console.print(escape(note), style="yellow", soft_wrap=True)
