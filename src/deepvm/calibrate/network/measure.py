"""Measure all combinations of a network calibration: settings in, points, a fitted model and saturation out."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepvm.calibrate.network.fleet import Fleet
from deepvm.calibrate.network.settings import NetworkSettings, free_memory_bytes, no_links_because
from deepvm.calibrate.profile_file import ProfileFile, point_key
from deepvm.calibrate.scratch import scratch_folder
from deepvm.performance.measured import Samples
from deepvm.performance.network.transmission import Saturation, TransmissionFit, fit_transmission, saturation_points
from deepvm.performance.profile import NetworkPoint, Profile

WARM_UP = 2  # saves: the first connects, and touches the nodes' memory
TRAINING_SHARE = 0.2  # of this host's cores, for all workers together
STEPS_KEPT = 200
Progress = Callable[[str, int, int], None]  # what is measured now, points done, all points


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkCalibration:
    """The profile with all points of this calibration, and what they say."""

    profile: Profile
    points: tuple[NetworkPoint, ...]
    fit: TransmissionFit | None  # None of a single point
    saturation: tuple[Saturation, ...]
    unlimited_because: str | None  # why links have no limit, if they have none
    measured: int  # points; the others were in the file already

    def to_json(self) -> dict[str, Any]:
        return {
            "points": [
                {**point.to_json(), "predicted_s": None if self.fit is None else self.fit.model.predicted_s(point),
                 "bound_by": None if self.fit is None else self.fit.model.bound_by(point)}
                for point in self.points
            ],
            "fit": None if self.fit is None else self.fit.to_json(),
            "saturation": [each.to_json() for each in self.saturation],
            "unlimited_because": self.unlimited_because,
            "measured": self.measured,
            "provenance": self.profile.provenance.to_json(),
        }  # fmt: skip


def calibrate_network(
    settings: NetworkSettings,
    output: Path | None = None,
    *,
    progress: Progress = lambda *_: None,
) -> NetworkCalibration:
    """Measure what ``output`` lacks, and write each point there as soon as it is measured."""
    settings.check_memory(free_memory_bytes())
    file = ProfileFile.open(output)
    because = no_links_because()
    links: tuple[float | None, ...] = settings.links_gbps if because is None else (None,)
    wanted = [
        (workers, nodes, link, settings.checkpoint_bytes)
        for nodes in settings.memory_nodes
        for link in links
        for workers in settings.workers
    ]
    known = {point_key(point) for point in file.profile.network}
    missing = [key for key in wanted if key not in known]
    if missing:
        with scratch_folder() as scratch, Fleet(settings, scratch, limited=because is None) as fleet:
            _measure(fleet, settings, missing, file, progress, already=len(wanted) - len(missing))
    points = tuple(point for point in file.profile.network if point_key(point) in set(wanted))
    fit = fit_transmission(points) if len(points) > 1 else None
    return NetworkCalibration(
        profile=file.profile,
        points=points,
        fit=fit,
        saturation=() if fit is None else saturation_points(points, fit.model),
        unlimited_because=because,
        measured=len(missing),
    )


def _measure(
    fleet: Fleet,
    settings: NetworkSettings,
    missing: list[tuple[int, int, float | None, int]],
    file: ProfileFile,
    progress: Progress,
    *,
    already: int,
) -> None:
    note = (
        f"network: all workers on one host; steps take {TRAINING_SHARE:.0%} of its cores, as beside GPUs that compute"
    )
    running, step = 0, 0
    for done, (workers, nodes, link, size) in enumerate(missing):
        speed = "without a limit" if link is None else f"{link:g} Gbit/s"
        what = f"{workers} worker{'s' * (workers > 1)} to {nodes} memory node{'s' * (nodes > 1)}, {speed}"
        progress(what, already + done, already + len(missing))
        if running != nodes:
            fleet.start_nodes(nodes)
            running = nodes
        fleet.limit(link)
        fleet.connect(workers, share=min(1.0, TRAINING_SHARE * _cores() / workers))
        remote_s: list[float] = []
        steps_s: list[float] = []
        for number in range(WARM_UP + settings.repeats):
            step += 1
            answers = fleet.save(workers, step)
            if number >= WARM_UP:
                remote_s.append(max(answer["remote_s"] for answer in answers))
                steps_s += [seconds for answer in answers for seconds in answer["steps_s"]]
        point = NetworkPoint(
            workers=workers,
            memory_nodes=nodes,
            link_gbps=link,
            checkpoint_bytes=size,
            remote_s=Samples(tuple(remote_s)),
            step_s=Samples(tuple(steps_s[:: max(1, len(steps_s) // STEPS_KEPT)])) if steps_s else None,
        )
        file.add(point, notes=[note])
    progress("done", already + len(missing), already + len(missing))


def _cores() -> int:
    with contextlib.suppress(AttributeError):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
