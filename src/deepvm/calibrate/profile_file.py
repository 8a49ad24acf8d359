"""The -o file of a calibration: finished points in, a profile that an interrupted calibration continues out.

Each point is written when it is measured, and the file is replaced as a whole. Calibrations of one machine may share
one file.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepvm.errors import UsageError
from deepvm.performance.measured import Machine, Provenance
from deepvm.performance.profile import (
    ComputePoint,
    NetworkPoint,
    OverheadPoint,
    Profile,
    ScalingPoint,
    read_profile,
)
from deepvm.runtime.this_machine import here_and_now

ANY_WORKLOAD = "checkpoints"  # of network and overheads, which do not depend on one

Point = ComputePoint | ScalingPoint | NetworkPoint | OverheadPoint
_KINDS: dict[type[Any], str] = {
    ComputePoint: "compute",
    ScalingPoint: "scaling",
    NetworkPoint: "network",
    OverheadPoint: "overheads",
}


class ProfileFile:
    """Made by ``open``. Without a path, points are kept in memory only."""

    def __init__(self, path: Path | None, profile: Profile) -> None:
        self.path, self.profile = path, profile

    @staticmethod
    def open(
        path: Path | None,
        *,
        workload: str = ANY_WORKLOAD,
        precision: str = "fp32",
        provenance: Provenance | None = None,
    ) -> ProfileFile:
        """Read the file if it exists: it must be of this machine and workload. Refuse a path that cannot be written."""
        new = Profile(workload=workload, precision=precision, provenance=provenance or here_and_now())
        if path is None:
            return ProfileFile(None, new)
        if path.is_dir():
            raise UsageError(f"{path} cannot be written: it is a folder")
        if not path.parent.is_dir():
            raise UsageError(f"{path} cannot be written: {path.parent} is not a folder")
        return ProfileFile(path, _continued(path, read_profile(path), new) if path.exists() else new)

    def forget(self, kind: str) -> None:
        """Leave out the points of a kind, and the notes about them: they are measured again."""
        notes = tuple(note for note in self.profile.notes if not note.startswith(f"{kind} "))
        left: dict[str, Any] = {kind: ()}
        self.profile = replace(self.profile, notes=notes, **left)

    def add(self, *points: Point, notes: Sequence[str] = ()) -> None:
        """Add points and write the file at once. A point that is there already is replaced."""
        profile = self.profile
        for point in points:
            kind = _KINDS[type(point)]
            others = [each for each in getattr(profile, kind) if point_key(each) != point_key(point)]
            added: dict[str, Any] = {kind: (*others, point)}
            profile = replace(profile, **added)
        self.profile = replace(
            profile,
            notes=tuple(dict.fromkeys((*profile.notes, *notes))),
            provenance=replace(profile.provenance, date=here_and_now().date),
        )
        if self.path is not None:
            self.profile.write(self.path)


def point_key(point: Point) -> tuple[Hashable, ...]:
    """Return what was measured, without the samples."""
    if isinstance(point, ComputePoint):
        return (point.batch,)
    if isinstance(point, ScalingPoint):
        return point.workers, point.batch, point.cores_per_worker
    if isinstance(point, NetworkPoint):
        return point.workers, point.memory_nodes, point.link_gbps, point.checkpoint_bytes
    return point.name, point.state_bytes


def identity(machine: Machine) -> tuple[object, ...]:
    """Return what tells machines apart. Memory differs by a few pages from one boot to the next."""
    gib = None if machine.memory_bytes is None else round(machine.memory_bytes / 2**30)
    return machine.cpu, machine.cores, gib, machine.accelerator, machine.accelerator_count


def _continued(path: Path, found: Profile, new: Profile) -> Profile:
    """Return what the file has, for the new workload. UsageError if the two cannot be one profile."""
    machine = found.provenance.machine
    if identity(machine) != identity(new.provenance.machine):
        raise UsageError(
            f"{path} was measured on another machine ({machine.cpu}, {machine.title}): "
            "choose another -o file, and give deepvm plan both with --profile"
        )
    if new.workload == ANY_WORKLOAD:
        return found
    if found.workload == ANY_WORKLOAD:
        return replace(found, workload=new.workload, precision=new.precision)
    if (found.workload, found.precision) != (new.workload, new.precision):
        raise UsageError(
            f"{path} is a profile of {found.workload} in {found.precision}, not of {new.workload} in "
            f"{new.precision}: choose another -o file"
        )
    before, now = found.provenance.versions.get("torch"), new.provenance.versions.get("torch")
    if before != now and (found.compute or found.scaling):
        raise UsageError(f"{path} was measured with torch {before}, this is torch {now}: choose another -o file")
    return found
