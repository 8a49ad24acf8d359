"""A training job as the planner sees it. ``deepvm profile`` writes job.json, ``deepvm plan --job`` reads it.

Each figure has an origin: measured on a machine, computed from the model, or guessed. A figure without an origin is
unknown and has the value None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

from deepvm import strict_json as strict
from deepvm.errors import MalformedFile, UsageError
from deepvm.json_fields import json_fields
from deepvm.performance.measured import Provenance, Samples, check_format, optional, write_document

FORMAT = "deepvm-job/1"
MOST_BYTES = 16 * 2**20
Origin = Literal["measured", "computed", "guessed"]
Parallel = Literal["ddp", "fsdp"]
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
SHARDED = ("weights", "gradients", "optimizer")  # the parts of a device's memory that FSDP divides among all GPUs
_NAME = 200  # characters
_MOST = 2**60


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """One part of a checkpoint, such as the model or the optimizer."""

    bytes: int
    changed_bytes: int | None = None  # of these, changed from one save to the next

    def to_json(self) -> dict[str, Any]:
        return json_fields(self, "bytes changed_bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Sizes, times and needs of one training job, for one worker process with ``batch`` samples in a step."""

    name: str
    parameters: int
    trainable_parameters: int
    components: Mapping[str, Component]
    gradient_bytes: int  # exchanged in a step
    batch: int | None = None
    step_s: Samples | None = None  # one step on ``provenance.machine``
    data_share: float | None = None  # of a step that waits for data
    flops_per_step: float | None = None  # forward, backward and optimizer
    traffic_bytes_per_step: float | None = None  # read and written in the device's memory
    memory_bytes: int | None = None  # of the device, at the peak, on one device alone
    memory_parts: Mapping[str, int] = field(default_factory=dict)  # of these: weights, gradients, optimizer ...
    host_memory_bytes: int | None = None  # of the process, at the peak
    precision: str = "fp32"
    parallel: Parallel = "ddp"
    provenance: Provenance | None = None  # None if nothing was measured
    origins: Mapping[str, Origin] = field(default_factory=dict)  # by the name of a figure above
    notes: tuple[str, ...] = ()  # for people

    def __post_init__(self) -> None:
        if self.parallel not in get_args(Parallel):
            raise UsageError(f"parallel is {self.parallel!r}: it must be ddp or fsdp")
        if self.precision not in PRECISIONS:
            raise UsageError(f"precision is {self.precision!r}: it must be one of {', '.join(PRECISIONS)}")

    @property
    def checkpoint_bytes(self) -> int:
        return sum(component.bytes for component in self.components.values())

    @property
    def sharded_bytes(self) -> int:
        """The part of ``memory_bytes`` that the GPUs of a cluster divide among them: none of it with DDP."""
        if self.parallel == "ddp" or self.memory_bytes is None:
            return 0
        return min(self.memory_bytes, sum(self.memory_parts.get(part, 0) for part in SHARDED))

    @property
    def achieved_flops_per_s(self) -> float | None:
        """What the machine of ``provenance`` achieved; None if either figure is unknown."""
        if self.flops_per_step is None or self.step_s is None or not self.step_s.median_s:
            return None
        return self.flops_per_step / self.step_s.median_s

    def to_json(self) -> dict[str, Any]:
        figures = "name parameters trainable_parameters checkpoint_bytes"
        return {
            "format": FORMAT,
            **json_fields(self, figures),
            "components": {name: component.to_json() for name, component in self.components.items()},
            **json_fields(self, "gradient_bytes batch step_s data_share flops_per_step traffic_bytes_per_step"),
            **json_fields(self, "achieved_flops_per_s memory_bytes"),
            "memory_parts": dict(self.memory_parts),
            **json_fields(self, "host_memory_bytes precision parallel provenance"),
            "origins": dict(self.origins),
            "notes": list(self.notes),
        }

    def write(self, path: Path) -> None:
        """Write job.json completely or not at all. UsageError if that is impossible."""
        write_document(path, self.to_json())


def read_job(path: Path | str) -> Job:
    """Read a file that ``deepvm profile`` wrote. MalformedFile if it is something else."""
    document = strict.read_file(path, most_bytes=MOST_BYTES, hint="make one with: deepvm profile -- train.py")
    try:
        return job_of(document)
    except (strict.MalformedJson, UsageError) as error:
        raise MalformedFile(path, f"not a valid job: {error}") from None


def job_of(document: Any) -> Job:
    """Make a job of its JSON form."""
    table = check_format(document, FORMAT, "deepvm profile -- train.py")
    components = {
        strict.text(name, "a component's name", _NAME): Component(
            bytes=strict.integer(strict.member(strict.table(row, name), "bytes"), f"bytes of {name}", 0, _MOST),
            changed_bytes=optional(strict.integer, row.get("changed_bytes"), f"changed_bytes of {name}", 0, _MOST),
        )
        for name, row in strict.table(strict.member(table, "components"), "components").items()
    }
    _check_sum(table, components)
    parts = strict.table(table.get("memory_parts", {}), "memory_parts")
    origins = strict.table(table.get("origins", {}), "origins")
    for name, origin in origins.items():
        if origin not in get_args(Origin):
            raise strict.MalformedJson(f"the origin of {strict.brief(name)} is {strict.brief(origin)}")
    return Job(
        name=strict.text(strict.member(table, "name"), "name", _NAME),
        parameters=strict.integer(strict.member(table, "parameters"), "parameters", 0, _MOST),
        trainable_parameters=strict.integer(
            strict.member(table, "trainable_parameters"), "trainable_parameters", 0, _MOST
        ),
        components=components,
        gradient_bytes=strict.integer(strict.member(table, "gradient_bytes"), "gradient_bytes", 0, _MOST),
        batch=optional(strict.integer, table.get("batch"), "batch", 1, 2**40),
        step_s=None if table.get("step_s") is None else Samples.from_json(table["step_s"], "step_s"),
        data_share=optional(strict.number, table.get("data_share"), "data_share", 0, 1),
        flops_per_step=optional(strict.number, table.get("flops_per_step"), "flops_per_step", 0, 1e30),
        traffic_bytes_per_step=optional(
            strict.number, table.get("traffic_bytes_per_step"), "traffic_bytes_per_step", 0, 1e24
        ),
        memory_bytes=optional(strict.integer, table.get("memory_bytes"), "memory_bytes", 0, _MOST),
        memory_parts={
            strict.text(name, "a part of the memory", _NAME): strict.integer(size, f"memory of {name}", 0, _MOST)
            for name, size in parts.items()
        },
        host_memory_bytes=optional(strict.integer, table.get("host_memory_bytes"), "host_memory_bytes", 0, _MOST),
        precision=strict.text(table.get("precision", "fp32"), "precision", 20),
        parallel=cast(Parallel, strict.text(table.get("parallel", "ddp"), "parallel", 20)),
        provenance=None if table.get("provenance") is None else Provenance.from_json(table["provenance"]),
        origins=cast(Mapping[str, Origin], origins),
        notes=tuple(strict.text(note, "a note", 2000) for note in strict.array(table.get("notes", []), "notes", 100)),
    )


def _check_sum(table: Mapping[str, Any], components: Mapping[str, Component]) -> None:
    """Check a figure that follows from the components: one that somebody changed would be ignored without a word."""
    found = optional(strict.integer, table.get("checkpoint_bytes"), "checkpoint_bytes", 0, _MOST)
    total = sum(component.bytes for component in components.values())
    if found not in (None, total):
        raise strict.MalformedJson(f"checkpoint_bytes is {found}, the components have {total}: let them agree")
