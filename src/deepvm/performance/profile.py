"""Measurements of machines: ``deepvm calibrate`` and ``deepvm run`` write them, ``deepvm plan --profile`` reads them.

A profile has the machine, the versions, the workload, the date and raw samples; fits are made from these when they are
needed, so that a better model can use an old profile. Profiles of the same machine and workload merge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from deepvm import strict_json as strict
from deepvm.errors import MalformedFile, UsageError
from deepvm.json_fields import json_fields
from deepvm.performance.measured import Provenance, Samples, check_format, optional, write_document

FORMAT = "deepvm-profile/1"
MOST_BYTES = 64 * 2**20
MOST_POINTS = 10_000
_NAME = 200  # characters

OVERHEADS = (
    "save_stall",  # how long a save delays training
    "save_remote",  # from save() to the memory node
    "save_durable",  # from save() to the durable store
    "detection",  # from a loss to its detection
    "regroup",  # from the detection to a new group of workers
    "start",  # a fresh worker process with its imports
    "restore",  # a checkpoint from the memory nodes into a worker
    "first_step",  # the first step after a restore
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputePoint:
    """Steps of one worker alone on the machine."""

    batch: int
    step_s: Samples
    flops_per_step: float | None = None
    traffic_bytes_per_step: float | None = None
    operations_per_step: int | None = None  # that the framework starts
    watts: float | None = None

    def to_json(self) -> dict[str, Any]:
        return json_fields(self, "batch step_s flops_per_step traffic_bytes_per_step operations_per_step watts")

    @classmethod
    def from_json(cls, document: Any) -> ComputePoint:
        row = strict.table(document, "a point of compute")
        return cls(
            batch=strict.integer(strict.member(row, "batch"), "batch", 1, 2**40),
            step_s=Samples.from_json(strict.member(row, "step_s"), "step_s"),
            flops_per_step=optional(strict.number, row.get("flops_per_step"), "flops_per_step", 0, 1e30),
            traffic_bytes_per_step=optional(
                strict.number, row.get("traffic_bytes_per_step"), "traffic_bytes_per_step", 0, 1e24
            ),
            operations_per_step=optional(
                strict.integer, row.get("operations_per_step"), "operations_per_step", 0, 2**40
            ),
            watts=optional(strict.number, row.get("watts"), "watts", 0, 1e6),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingPoint:
    """Steps of data-parallel training on this many workers, each with ``batch`` samples."""

    workers: int
    batch: int | None  # None for a script of the user's own: its ledger does not have it
    step_s: Samples
    gradient_bytes: int | None = None
    cores_per_worker: int | None = None  # of workers that share one machine; points with other shares do not compare

    def to_json(self) -> dict[str, Any]:
        return json_fields(self, "workers batch step_s gradient_bytes cores_per_worker")

    @classmethod
    def from_json(cls, document: Any) -> ScalingPoint:
        row = strict.table(document, "a point of scaling")
        return cls(
            workers=strict.integer(strict.member(row, "workers"), "workers", 1, 1_000_000),
            batch=optional(strict.integer, row.get("batch"), "batch", 1, 2**40),
            step_s=Samples.from_json(strict.member(row, "step_s"), "step_s"),
            gradient_bytes=optional(strict.integer, row.get("gradient_bytes"), "gradient_bytes", 0, 2**60),
            cores_per_worker=optional(strict.integer, row.get("cores_per_worker"), "cores_per_worker", 1, 1_000_000),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkPoint:
    """Checkpoints of ``checkpoint_bytes`` each, sent by all workers at once to the memory nodes: time until remote."""

    workers: int
    memory_nodes: int
    link_gbps: float | None  # of every machine; None where nothing limited it
    checkpoint_bytes: int
    remote_s: Samples
    step_s: Samples | None = None  # of the training beside it

    def to_json(self) -> dict[str, Any]:
        return json_fields(self, "workers memory_nodes link_gbps checkpoint_bytes remote_s step_s")

    @classmethod
    def from_json(cls, document: Any) -> NetworkPoint:
        row = strict.table(document, "a point of network")
        return cls(
            workers=strict.integer(strict.member(row, "workers"), "workers", 1, 1_000_000),
            memory_nodes=strict.integer(strict.member(row, "memory_nodes"), "memory_nodes", 1, 1_000_000),
            link_gbps=optional(strict.number, row.get("link_gbps"), "link_gbps", 1e-6, 1e6),
            checkpoint_bytes=strict.integer(strict.member(row, "checkpoint_bytes"), "checkpoint_bytes", 0, 2**60),
            remote_s=Samples.from_json(strict.member(row, "remote_s"), "remote_s"),
            step_s=None if row.get("step_s") is None else Samples.from_json(row["step_s"], "step_s"),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class OverheadPoint:
    """One overhead of OVERHEADS at one size of the state."""

    name: str
    state_bytes: int
    seconds: Samples

    def to_json(self) -> dict[str, Any]:
        return json_fields(self, "name state_bytes seconds")

    @classmethod
    def from_json(cls, document: Any) -> OverheadPoint:
        row = strict.table(document, "an overhead")
        name = strict.member(row, "name")
        if name not in OVERHEADS:
            raise strict.MalformedJson(f"an overhead is {strict.brief(name)}, not one of {', '.join(OVERHEADS)}")
        return cls(
            name=name,
            state_bytes=strict.integer(strict.member(row, "state_bytes"), "state_bytes", 0, 2**60),
            seconds=Samples.from_json(strict.member(row, "seconds"), name),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    workload: str
    provenance: Provenance
    precision: str = "fp32"
    compute: tuple[ComputePoint, ...] = ()
    scaling: tuple[ScalingPoint, ...] = ()
    network: tuple[NetworkPoint, ...] = ()
    overheads: tuple[OverheadPoint, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        parts = "workload precision provenance compute scaling network overheads notes"
        return {"format": FORMAT, **json_fields(self, parts)}

    def write(self, path: Path, *, private: bool = False) -> None:
        """Write the file completely or not at all; if ``private``, for its owner only. UsageError if it cannot be."""
        write_document(path, self.to_json(), private=private)


def read_profile(path: Path | str) -> Profile:
    """Read a profile. MalformedFile if the file is something else."""
    document = strict.read_file(path, most_bytes=MOST_BYTES, hint="make one with: deepvm calibrate compute")
    try:
        return profile_of(document)
    except (strict.MalformedJson, UsageError) as error:
        raise MalformedFile(path, f"not a valid profile: {error}") from None


def profile_of(document: Any) -> Profile:
    """Make a profile of its JSON form."""
    table = check_format(document, FORMAT, "deepvm calibrate")

    def rows(name: str) -> list[Any]:
        return strict.array(table.get(name, []), name, MOST_POINTS)

    return Profile(
        workload=strict.text(strict.member(table, "workload"), "workload", _NAME),
        precision=strict.text(table.get("precision", "fp32"), "precision", 20),
        provenance=Provenance.from_json(strict.member(table, "provenance")),
        compute=tuple(ComputePoint.from_json(row) for row in rows("compute")),
        scaling=tuple(ScalingPoint.from_json(row) for row in rows("scaling")),
        network=tuple(NetworkPoint.from_json(row) for row in rows("network")),
        overheads=tuple(OverheadPoint.from_json(row) for row in rows("overheads")),
        notes=tuple(strict.text(row, "a note", 2000) for row in rows("notes")),
    )


def merge(profiles: Sequence[Profile]) -> tuple[Profile, ...]:
    """Join profiles of the same machine, workload and precision; a point measured twice keeps the samples of both."""
    merged: dict[tuple[Any, ...], Profile] = {}
    for profile in profiles:
        key = (profile.provenance.machine, profile.workload, profile.precision)
        before = merged.get(key)
        merged[key] = profile if before is None else _join(before, profile)
    return tuple(merged.values())


def _join(older: Profile, newer: Profile) -> Profile:
    return replace(
        newer,
        compute=_points(older.compute, newer.compute, "step_s"),
        scaling=_points(older.scaling, newer.scaling, "step_s"),
        network=_points(older.network, newer.network, "remote_s"),
        overheads=_points(older.overheads, newer.overheads, "seconds"),
        notes=tuple(dict.fromkeys((*older.notes, *newer.notes))),
    )


def _points(older: tuple[Any, ...], newer: tuple[Any, ...], samples: str) -> tuple[Any, ...]:
    joined: dict[Any, Any] = {}
    for point in (*older, *newer):
        key = replace(point, **{samples: _ANY})
        before = joined.get(key)
        if before is not None:
            both = (*getattr(before, samples).seconds, *getattr(point, samples).seconds)
            point = replace(point, **{samples: Samples(both)})
        joined[key] = point
    return tuple(joined.values())


_ANY = Samples((0.0,))  # in the place of a point's samples, so that points compare by what was measured
