"""Measured overheads -> the figures of a forecast: profiles and a state's size in, seconds and a RestorePath out. Pure.

Between two measured sizes a time is interpolated linearly. Beyond them, times that grow with the state (saves,
restores) follow the nearest two sizes, and all others are constant. What was not measured has a default.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from deepvm.errors import UnknownName, UsageError
from deepvm.json_fields import json_fields
from deepvm.performance.checks import check_number
from deepvm.performance.profile import OVERHEADS, Profile
from deepvm.performance.restore import DETECTION_S, IMPORT_S, MODEL_S, RENDEZVOUS_S, RestorePath

How = Literal["measured", "interpolated", "extrapolated", "default"]

# Seconds, and seconds a byte, where nothing was measured.
DEFAULTS: dict[str, tuple[float, float]] = {
    "save_stall": (0.01, 0.0),  # live parameters are read in place: the trainer waits for bookkeeping alone
    "save_remote": (0.02, 1 / 0.625e9),  # a link of 5 Gbit/s
    "save_durable": (0.1, 1 / 0.2e9),  # a disk that writes 200 MB/s
    "detection": (DETECTION_S, 0.0),
    "regroup": (RENDEZVOUS_S, 0.0),
    "start": (IMPORT_S + MODEL_S, 0.0),
    "restore": (0.02, 1 / 0.625e9),
    "first_step": (0.0, 0.0),  # the step itself, which the caller knows
}
GROWING = ("save_remote", "save_durable", "restore")


@dataclass(frozen=True, kw_only=True, slots=True)
class Overhead:
    """One overhead at one size of the state."""

    name: str
    seconds: float
    how: How

    def to_json(self) -> dict[str, Any]:
        return json_fields(self, "name seconds how")


def overhead(profiles: Sequence[Profile], name: str, state_bytes: float) -> Overhead:
    """Return an overhead by what the profiles measured, at this size of the state."""
    if name not in OVERHEADS:
        raise UnknownName("overhead", name, OVERHEADS)
    check_number("state_bytes", state_bytes, at_least=0)
    measured = _measured(profiles, name)
    if not measured:
        constant_s, per_byte_s = DEFAULTS[name]
        return Overhead(name=name, seconds=constant_s + per_byte_s * state_bytes, how="default")
    sizes = [size for size, _ in measured]
    if state_bytes in sizes:
        return Overhead(name=name, seconds=dict(measured)[int(state_bytes)], how="measured")
    if sizes[0] < state_bytes < sizes[-1]:
        above = next(i for i, size in enumerate(sizes) if size > state_bytes)
        return Overhead(
            name=name, seconds=_on_line(measured[above - 1], measured[above], state_bytes), how="interpolated"
        )
    return Overhead(name=name, seconds=_beyond(measured, name, state_bytes), how="extrapolated")


def _measured(profiles: Sequence[Profile], name: str) -> list[tuple[int, float]]:
    """Return sizes and medians, by size."""
    by_size: dict[int, list[float]] = {}
    for profile in profiles:
        for point in profile.overheads:
            if point.name == name:
                by_size.setdefault(point.state_bytes, []).extend(point.seconds.seconds)
    return sorted((size, statistics.median(found)) for size, found in by_size.items())


def _beyond(measured: Sequence[tuple[int, float]], name: str, state_bytes: float) -> float:
    nearest = measured[0] if state_bytes < measured[0][0] else measured[-1]
    if name not in GROWING:
        return nearest[1]
    if len(measured) == 1:  # in proportion, but never faster than the default would be at no bytes
        size, seconds = nearest
        constant_s = min(DEFAULTS[name][0], seconds)
        return constant_s + (seconds - constant_s) * (state_bytes / size if size else 1.0)
    pair = measured[:2] if nearest == measured[0] else measured[-2:]
    if pair[1][1] <= pair[0][1]:  # noise: a larger state does not arrive sooner
        return nearest[1]
    return max(0.0, _on_line(pair[0], pair[1], state_bytes))


def _on_line(first: tuple[int, float], second: tuple[int, float], at: float) -> float:
    (x0, y0), (x1, y1) = first, second
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


def restore_path(
    profiles: Sequence[Profile], path: RestorePath, *, instance: str | None = None
) -> tuple[RestorePath, tuple[str, ...]]:
    """Return a path with measured figures instead of defaults, and their names.

    Profiles of this ``instance`` count alone if there are any. Detection, regrouping and start are properties of the
    software, so those of another machine still serve; a first step is not, and is used of the same instance only.
    A measured restore bounds what one worker can take in, beside the links of the plan."""
    if any(not isinstance(profile, Profile) for profile in profiles):
        raise UsageError("profiles are what deepvm.performance.read_profile returns")
    own = [p for p in profiles if instance is not None and p.provenance.machine.instance == instance]
    size, used = path.state_bytes, []
    found: dict[str, float] = {}

    def take(name: str, field: str, among: Sequence[Profile]) -> None:
        if any(point.name == name for profile in among for point in profile.overheads):
            found[field] = overhead(among, name, size).seconds
            used.append(name)

    def sources(name: str) -> Sequence[Profile]:
        here = [p for p in own if any(point.name == name for point in p.overheads)]
        return here or profiles

    take("detection", "detection_s", sources("detection"))
    take("regroup", "rendezvous_s", sources("regroup"))
    take("start", "import_s", sources("start"))
    if "import_s" in found:  # the start of a run includes building the model
        found["model_s"] = 0.0
        found["template_s"] = min(path.template_s, found["import_s"])
    take("first_step", "first_step_s", own)
    rate = _taken_in_bytes_per_s(_measured(sources("restore"), "restore"))
    if rate is not None:
        found["checksum_bytes_per_s"] = rate
        used.append("restore")
    return (replace(path, **found) if found else path), tuple(used)  # type: ignore[arg-type]


def _taken_in_bytes_per_s(measured: Sequence[tuple[int, float]]) -> float | None:
    """Return the rate between the smallest and the largest state that was restored; None if it is not known."""
    if not measured:
        return None
    (low_bytes, low_s), (high_bytes, high_s) = measured[0], measured[-1]
    if high_bytes > low_bytes and high_s > low_s:
        return (high_bytes - low_bytes) / (high_s - low_s)
    return high_bytes / high_s if high_bytes and high_s else None
