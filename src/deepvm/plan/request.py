"""Stage 1, the user's request: a budget an hour, a job, and what the cluster may be made of."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal

from deepvm.catalog import Quota
from deepvm.errors import UnknownName, UsageError

OBJECTIVES = ("throughput", "flopp", "cost", "time")
POLICIES = ("deepvm", "noscale", "cost-first", "performance-first")
PAPER_ARCHITECTURES = ("tiering", "single-anchor")

# What 300 MB of checkpoint most often is, where nothing else is said: a model trained with Adam in FP32,
# whose gradients are a third of it (weights and two moments are kept).
CHECKPOINT_OVER_GRADIENTS = 3

# What must be above zero, as users say it.
_SPOKEN = {
    "checkpoint_every_s": "the time between checkpoints, in seconds,",
    "step_s": "the time of a step, in seconds,",
    "work_eflops_h": "the job's size, in eFLOPS hours,",
    "deadline_s": "the deadline, in seconds from the start,",
    "min_gpu_memory_gb": "the least GPU memory, in GB,",
}

Names = str | tuple[str, ...] | None  # one, several, or whatever there is


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What is wanted. Every field is checked when the value is made."""

    budget_usd: float
    objective: str = "throughput"
    policy: str = "deepvm"
    top: int = 3

    checkpoint_bytes: int = 300_000_000
    buffers: int = 2
    checkpoint_every_s: float = 60.0
    gradient_bytes: int | None = None  # of one step; a third of the checkpoint where it is not given
    step_s: float = 0.5  # compute of one step on one T4; others by their eFLOPS, with batches that fill their memory
    work_eflops_h: float | None = None  # the whole job, for the objectives cost and time
    deadline_s: float | None = None

    architectures: tuple[str, ...] = PAPER_ARCHITECTURES
    mixed: bool = False
    region: Names = None
    zone: Names = None
    gpu: Names = None
    min_gpu_memory_gb: float | None = None  # as GPUs are sold: an A10G or an L4 has 24
    cpu: Literal["x86_64", "arm64", "any"] = "x86_64"
    fractional_gpus: bool = False
    max_nodes: int = 255
    memory_in: Literal["zone", "region"] = "zone"  # where memory nodes may be, seen from the workers
    quotas: tuple[Quota, ...] | None = None  # instead of the catalogue's
    curve: Literal["auto", "all-reduce"] = "auto"
    saturation: Literal["auto", "table", "bandwidth"] = "auto"

    def __post_init__(self) -> None:
        for what in ("region", "zone", "gpu"):
            object.__setattr__(self, what, _plainly(getattr(self, what)))
        _choice("objective", self.objective, OBJECTIVES)
        _choice("policy", self.policy, POLICIES)
        _choice("CPU architecture", self.cpu, ("x86_64", "arm64", "any"))
        _choice("place for memory nodes", self.memory_in, ("zone", "region"))
        _choice("speedup curve", self.curve, ("auto", "all-reduce"))
        _choice("saturation model", self.saturation, ("auto", "table", "bandwidth"))
        if not math.isfinite(self.budget_usd) or self.budget_usd < 0:
            raise UsageError(f"the budget is {self.budget_usd}: it must be a finite number of dollars, zero or more")
        for what, least in (("top", 1), ("checkpoint_bytes", 0), ("buffers", 1), ("max_nodes", 1)):
            if getattr(self, what) < least:
                raise UsageError(f"{what} is {getattr(self, what)}: it must be {least} or more")
        if self.gradient_bytes is not None and self.gradient_bytes < 0:
            raise UsageError(f"gradient_bytes is {self.gradient_bytes}: it must be zero or more")
        for what in _SPOKEN:
            value = getattr(self, what)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise UsageError(f"{_SPOKEN[what]} is {value:g}: it must be a finite number above zero")
        if self.objective in ("cost", "time") and self.work_eflops_h is None:
            raise UsageError(
                f"the objective {self.objective} needs the job's size: --work 40h@g4dn.xlarge, or in eFLOPS hours"
            )
        if self.deadline_s is not None and self.work_eflops_h is None:
            raise UsageError("a deadline needs the job's size: --work 40h@g4dn.xlarge, or in eFLOPS hours")
        if not self.architectures:
            raise UsageError("no architecture is allowed: name at least one")
        if self.mixed and (self.policy != "deepvm" or self.objective != "throughput"):
            raise UsageError("clusters of several GPU types are planned for throughput under the policy deepvm only")

    @property
    def regions(self) -> tuple[str, ...]:
        """The regions asked for; empty where any will do."""
        return names_of(self.region)

    @property
    def zones(self) -> tuple[str, ...]:
        return names_of(self.zone)

    @property
    def gpus(self) -> tuple[str, ...]:
        return names_of(self.gpu)

    @property
    def published(self) -> bool:
        """Whether the method is the paper's as it was run: its objective, its bounds, its memory rule."""
        return self.objective == "flopp"

    @property
    def gradient_bytes_per_step(self) -> float:
        if self.gradient_bytes is not None:
            return float(self.gradient_bytes)
        return self.checkpoint_bytes / CHECKPOINT_OVER_GRADIENTS

    @property
    def least_performance(self) -> float:
        """The eFLOPS below which the deadline is missed."""
        if self.deadline_s is None or self.work_eflops_h is None:
            return 0.0
        return self.work_eflops_h * 3600 / self.deadline_s

    def to_json(self) -> dict[str, Any]:
        document = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in ("architectures", "region", "zone", "gpu"):
            if isinstance(document[name], tuple):
                document[name] = list(document[name])
        if self.quotas is not None:
            document["quotas"] = [
                {"families": list(q.families), "market": q.market.value, "vcpus": q.vcpus, "region": q.region}
                for q in self.quotas
            ]
        return document


def names_of(names: Names) -> tuple[str, ...]:
    return () if names is None else (names,) if isinstance(names, str) else names


def _plainly(names: Names) -> Names:
    """One name as itself, several once each, none as None."""
    several = tuple(dict.fromkeys(names_of(names)))
    return several if len(several) > 1 else several[0] if several else None


def _choice(kind: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise UnknownName(kind, value, known)
