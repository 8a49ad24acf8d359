"""A job in, what the planner asks of it out: sizes and times for a Request, memory of GPUs, and the origin of each.

Figures that the user gives win over the job's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from deepvm.catalog.accelerators import find
from deepvm.errors import UsageError
from deepvm.json_fields import json_fields
from deepvm.performance.job import Job
from deepvm.performance.measured import optional
from deepvm.performance.roofline import Prediction, Roofline, predict_step_s
from deepvm.plan.profiles import Ratings
from deepvm.strict_json import MalformedJson, brief, integer, member, number, table, text

ORIGINS = ("measured", "computed", "guessed", "given", "default")
FIGURES = ("checkpoint_bytes", "gradient_bytes", "step_s", "gpu_memory_bytes")
USABLE_GPU_MEMORY = 0.9  # the rest: the driver's context, workspaces of kernels, fragments

_LEAST_S = 0.002  # some hundred kernels have to be launched, however little they compute
_FIELDS = "name whole_bytes sharded_bytes step_low_s step_high_s"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFacts:
    """What a request knows of its job beside sizes and times. Memory is that of one GPU; None if it is unknown."""

    name: str
    whole_bytes: int | None = None  # on every GPU
    sharded_bytes: int = 0  # divided among all GPUs of the cluster, by FSDP
    step_low_s: float | None = None  # the interval of the step time
    step_high_s: float | None = None
    origins: Mapping[str, str]  # of FIGURES

    def least_gpus(self, memory_gib: float | None) -> float:
        """Return the fewest GPUs of this size, or slices of one, that hold the job; inf if no number of them does."""
        if self.whole_bytes is None:
            return 1.0
        if memory_gib is None:
            return math.inf
        room = memory_gib * 2**30 * USABLE_GPU_MEMORY - self.whole_bytes
        if room < 0 or (room == 0 and self.sharded_bytes):
            return math.inf
        return max(1.0, math.ceil(self.sharded_bytes / room)) if self.sharded_bytes else 1.0

    def with_given_memory(self) -> JobFacts:
        """Return the job with the memory that the user gave for each GPU, which wins over the job's own."""
        origins = {**self.origins, "gpu_memory_bytes": "given"}
        return replace(self, whole_bytes=None, sharded_bytes=0, origins=origins)

    @property
    def memory_bytes(self) -> int | None:
        return None if self.whole_bytes is None else self.whole_bytes + self.sharded_bytes

    def to_json(self) -> dict[str, Any]:
        return {**json_fields(self, _FIELDS), "origins": dict(self.origins)}

    @classmethod
    def from_json(cls, document: Any) -> JobFacts:
        """Read what a plan's request has. MalformedJson if it is something else."""
        found = table(document, "job")
        origins = table(found.get("origins", {}), "origins")
        for figure, origin in origins.items():
            if figure not in FIGURES or origin not in ORIGINS:
                raise MalformedJson(f"the origin of {brief(figure)} is {brief(origin)}")
        return cls(
            name=text(member(found, "name"), "name", 200),
            whole_bytes=optional(integer, found.get("whole_bytes"), "whole_bytes", 0, 2**60),
            sharded_bytes=integer(found.get("sharded_bytes", 0), "sharded_bytes", 0, 2**60),
            step_low_s=optional(number, found.get("step_low_s"), "step_low_s", 0, 1e9),
            step_high_s=optional(number, found.get("step_high_s"), "step_high_s", 0, 1e9),
            origins=origins,
        )


def job_fields(job: Job, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a Request for this job: what is ``given`` as it is, the job's figures for the rest."""
    fields, origins = dict(given), dict.fromkeys((f for f in FIGURES if f in given), "given")
    facts = JobFacts(name=job.name, origins=origins)
    if "checkpoint_bytes" not in given:
        fields["checkpoint_bytes"] = job.checkpoint_bytes
        origins["checkpoint_bytes"] = job.origins.get("components", "guessed")
    if given.get("gradient_bytes") is None:
        fields["gradient_bytes"] = job.gradient_bytes
        origins["gradient_bytes"] = job.origins.get("gradient_bytes", "guessed")
    if "step_s" not in given:
        ratings: Ratings | None = given.get("ratings")
        step = t4_step(job, None if ratings is None else ratings.roofline)
        if step is not None:
            fields["step_s"] = step.seconds
            facts = replace(facts, step_low_s=step.low_s, step_high_s=step.high_s)
        origins["step_s"] = "default" if step is None else step.origin
    if given.get("batch") is None and job.batch is not None:
        fields["batch"] = job.batch
    if given.get("min_gpu_memory_gb") is not None:
        origins["gpu_memory_bytes"] = "given"
    elif job.memory_bytes is not None:
        sharded = job.sharded_bytes
        facts = replace(facts, whole_bytes=job.memory_bytes - sharded, sharded_bytes=sharded)
        origins["gpu_memory_bytes"] = job.origins.get("memory_bytes", "guessed")
    fields["job"] = replace(facts, origins=origins)
    return fields


def t4_step(job: Job, roofline: Roofline | None = None) -> Prediction | None:
    """Return the time of a step on a T4; None if the job has neither a step that a GPU took nor FLOPs.

    It was measured there; or it is computed by a roofline, from the step on another GPU or from what profiles measured;
    or it is guessed by the roofline of published figures."""
    machine = None if job.provenance is None else job.provenance.machine
    on = find(machine.accelerator) if machine is not None and machine.accelerator else None
    counted = bool(job.flops_per_step)
    if job.step_s is None or not job.step_s.median_s or on is None:
        if not counted:
            return None
        on = None
    t4 = find("T4")
    assert t4 is not None  # noqa: S101 - the table has it
    step = predict_step_s(job, t4, roofline=roofline, measured_on=on)
    if step.origin == "measured":
        return step
    slower = max(1.0, _LEAST_S / step.seconds)
    known = counted and job.traffic_bytes_per_step is not None and (on is not None or roofline is not None)
    return replace(
        step, seconds=step.seconds * slower, low_s=step.low_s * slower, high_s=step.high_s * slower,
        origin="computed" if known else "guessed",
    )  # fmt: skip


def check_job(job: Job) -> None:
    """Raise UsageError if a plan for the job would be meaningless."""
    if job.checkpoint_bytes == 0 or job.parameters == 0:
        raise UsageError(f"job {job.name} has no parameters to save: make it again with deepvm profile")
