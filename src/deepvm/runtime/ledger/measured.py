"""A run's events and report -> a profile of what it measured: steps, saves, restores, recoveries. Pure.

``deepvm run`` writes it into the run's folder, re-plans read it, and so does ``deepvm plan --profile``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from deepvm.events import Event
from deepvm.performance.measured import Provenance, Samples
from deepvm.performance.profile import OverheadPoint, Profile, ScalingPoint
from deepvm.runtime.ledger.bill import number
from deepvm.runtime.ledger.report import Report

MOST_SAMPLES = 1000  # of one point: more do not change a median
_PARTS = {
    "detect_s": "detection",
    "regroup_s": "regroup",
    "start_s": "start",
    "first_step_s": "first_step",
}


def measured_profile(
    events: Iterable[Event], report: Report, *, workload: str, provenance: Provenance
) -> Profile | None:
    """Return the profile of a run; None if it measured nothing."""
    steps: dict[int, list[float]] = {}
    overheads: dict[tuple[str, int], list[float]] = {}
    sizes: dict[int, int] = {}  # of saved steps
    fresh = True  # the next step is the first of a group, which is not typical
    state_bytes: int | None = None

    for event in events:
        seconds = _seconds(event.data.get("seconds"))
        if event.kind in ("restored", "group", "run-started"):
            fresh = True
        elif event.kind == "step":
            if not fresh and seconds is not None:
                steps.setdefault(int(number(event.data.get("world_size")) or 1), []).append(seconds)
            fresh = False
        elif event.kind == "save" and event.data.get("rank", 0) == 0:
            size, step, state = (event.data.get(name) for name in ("bytes", "step", "state"))
            if type(size) is not int or size <= 0 or type(step) is not int or seconds is None:
                continue
            if state in ("remote", "durable"):
                sizes[step] = state_bytes = size
                overheads.setdefault((f"save_{state}", size), []).append(seconds)
            stall_s = _seconds(event.data.get("stall_s"))
            if state == "remote" and stall_s is not None:
                overheads.setdefault(("save_stall", size), []).append(stall_s)
    for name, size, seconds in _recovered(report, sizes, state_bytes):
        overheads.setdefault((name, size), []).append(seconds)
    if not steps and not overheads:
        return None
    return Profile(
        workload=workload[:200] or "run",
        provenance=provenance,
        scaling=tuple(
            ScalingPoint(workers=workers, batch=None, step_s=_samples(found))
            for workers, found in sorted(steps.items())
        ),
        overheads=tuple(
            OverheadPoint(name=name, state_bytes=size, seconds=_samples(found))
            for (name, size), found in sorted(overheads.items())
        ),
        notes=(f"measured by deepvm run {report.run}",),
    )


def _recovered(report: Report, sizes: Mapping[int, int], state_bytes: int | None) -> Iterable[tuple[str, int, float]]:
    """Yield the stages of recoveries, with the state's size. Without a save, its size is not known."""
    if state_bytes is None:
        return
    for restore in report.restores:
        if restore.seconds is not None and restore.step is not None and restore.seconds >= 0:
            yield "restore", sizes.get(restore.step, state_bytes), restore.seconds
    for pause in report.pauses:
        for part, name in _PARTS.items():
            seconds = pause.parts.get(part)
            if pause.recovered and seconds is not None and seconds >= 0:
                yield name, state_bytes, seconds


def _seconds(value: object) -> float | None:
    found = number(value)
    return found if found is not None and 0 <= found < 1e9 else None


def _samples(seconds: Sequence[float]) -> Samples:
    """Keep at most MOST_SAMPLES, evenly spread over the run."""
    stride = -(-len(seconds) // MOST_SAMPLES)
    return Samples(tuple(seconds[::stride]))
