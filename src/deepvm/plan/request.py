"""Stage 1, the request: a budget, a job and constraints in, one checked value out. All stages read it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from deepvm.catalog import Catalog, Quota
from deepvm.catalog.accelerators import makers
from deepvm.errors import UnknownName, UsageError
from deepvm.json_fields import json_fields
from deepvm.market.seeds import check_seed
from deepvm.performance.job import Job
from deepvm.performance.profile import Profile
from deepvm.plan.job_facts import JobFacts, check_job, job_fields
from deepvm.plan.profiles import Ratings

OBJECTIVES = ("throughput", "flopp", "cost", "time")
POLICIES = ("deepvm", "noscale", "cost-first", "performance-first")
ANY_VENDOR = "any"
PAPER_ARCHITECTURES = ("tiering", "single-anchor")
MARKET_ARCHITECTURES = (*PAPER_ARCHITECTURES, "all-spot", "all-on-demand")
MARKETS = ("auto", "built-in", "none")

# The default assumes Adam in FP32: a checkpoint has weights and two moments, gradients are a third of it.
CHECKPOINT_OVER_GRADIENTS = 3

# In public traces, gangs of 16 spot machines lost most or all of them about every two hours.
LOSSES_PER_H = 0.5

MOST_SAMPLES = 2**40  # in a step, as in job.json
MOST_DEADLINE_H = 100_000.0  # eleven years

# What must be above zero, in words for messages.
_ABOVE_ZERO = {
    "checkpoint_every_s": "the time between checkpoints, in seconds,",
    "step_s": "the time of a step, in seconds,",
    "work_eflops_h": "the job's size, in eFLOPS hours,",
    "deadline_s": "the deadline, in seconds from the start,",
    "min_gpu_memory_gb": "the least GPU memory, in GB,",
}

Names = str | tuple[str, ...] | None  # one, several, or any


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What the user wants. All fields are checked at construction."""

    budget_usd: float
    objective: str = "throughput"
    policy: str = "deepvm"
    top: int = 3

    checkpoint_bytes: int = 300_000_000
    buffers: int = 2
    checkpoint_every_s: float = 60.0
    gradient_bytes: int | None = None  # of one step; a third of the checkpoint by default
    step_s: float = 0.5  # compute of one step on one T4; other GPUs by eFLOPS, with batches that fill their memory
    batch: int | None = None  # samples of that step on the T4; a limit of the global batch needs it
    global_batch: int | None = None  # most samples of one step over all GPUs; None for batches that fill all memories
    work_eflops_h: float | None = None  # the whole job, for the objectives cost and time
    deadline_s: float | None = None
    confidence: float = 0.95  # with which the deadline is kept, under a market
    usd_per_hour_of_waiting: float = 0.0  # what an hour until the end is worth, for the objective cost
    market: Literal["auto", "built-in", "none"] = "auto"  # of spot machines; none: they stay
    seed: int = 0  # of the built-in market's draws
    notices: float = 0.0  # share of the losses that the cloud announces in time; nobody promises any
    job: JobFacts | None = None  # its GPU memory, and the origins of the figures above

    architectures: tuple[str, ...] | None = None  # None for the usual ones, which architectures_of names
    mixed: bool = False
    region: Names = None
    zone: Names = None
    gpu: Names = None
    min_gpu_memory_gb: float | None = None  # as GPUs are sold: an A10G or an L4 has 24
    cpu: Literal["x86_64", "arm64", "any"] = "x86_64"
    fractional_gpus: bool = False
    max_nodes: int = 255
    memory_in: Literal["zone", "region"] = "zone"  # memory nodes in the workers' zone or region
    vendor: Names = None  # of GPUs, "any" for all; None for nvidia, and for all under the paper's rules
    local_zones: bool = False  # zones near cities, with few machines
    market_gpus: int | None = None  # most of one type in a place and market; None for 64, or the paper's no limit
    losses_per_h: float = LOSSES_PER_H  # of all spot machines at once: what the time of a restore costs
    quotas: tuple[Quota, ...] | None = None  # replace the catalogue's
    curve: Literal["auto", "all-reduce"] = "auto"
    saturation: Literal["auto", "table", "bandwidth"] = "auto"
    profiles: tuple[Profile, ...] = ()  # measurements that replace defaults
    ratings: Ratings | None = None  # by measured profiles

    def __post_init__(self) -> None:
        for what in ("region", "zone", "gpu", "vendor"):
            object.__setattr__(self, what, _simplest(getattr(self, what)))
        for kind, value, known in (
            ("objective", self.objective, OBJECTIVES),
            ("policy", self.policy, POLICIES),
            ("CPU architecture", self.cpu, ("x86_64", "arm64", "any")),
            ("place for memory nodes", self.memory_in, ("zone", "region")),
            ("speedup curve", self.curve, ("auto", "all-reduce")),
            ("saturation model", self.saturation, ("auto", "table", "bandwidth")),
            ("market", self.market, MARKETS),
        ):
            if value not in known:
                raise UnknownName(kind, value, known)
        if self.min_gpu_memory_gb is not None and self.job is not None:
            object.__setattr__(self, "job", self.job.with_given_memory())
        for name in self.vendors:
            if name not in (ANY_VENDOR, *makers()):
                raise UnknownName("vendor of GPUs", name, (ANY_VENDOR, *makers()))
        if not math.isfinite(self.budget_usd) or self.budget_usd < 0:
            raise UsageError(f"the budget is {self.budget_usd}: it must be a finite number of dollars, zero or more")
        least_of = {"top": 1, "checkpoint_bytes": 0, "gradient_bytes": 0, "buffers": 1, "max_nodes": 1}
        least_of |= {"batch": 1, "global_batch": 1, "market_gpus": 1}
        for what, least in least_of.items():
            count = getattr(self, what)
            if count is not None and count < least:
                raise UsageError(f"{what} is {count}: it must be {least} or more")
        for what in ("batch", "global_batch"):
            count = getattr(self, what)
            if count is not None and count > MOST_SAMPLES:
                raise UsageError(f"{what} is above {MOST_SAMPLES}, the most samples that a step can have")
        for what in _ABOVE_ZERO:
            value = getattr(self, what)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise UsageError(f"{_ABOVE_ZERO[what]} is {value:g}: it must be a finite number above zero")
        if not (math.isfinite(self.losses_per_h) and self.losses_per_h >= 0):
            raise UsageError(f"losses_per_h is {self.losses_per_h:g}: it must be a finite number of zero or more")
        if self.objective in ("cost", "time") and self.work_eflops_h is None:
            raise UsageError(
                f"the objective {self.objective} needs the job's size: --work 40h@g4dn.xlarge, or in eFLOPS hours"
            )
        if self.deadline_s is not None and self.work_eflops_h is None:
            raise UsageError("a deadline needs the job's size: --work 40h@g4dn.xlarge, or in eFLOPS hours")
        if self.deadline_s is not None and self.deadline_s > MOST_DEADLINE_H * 3600:
            raise UsageError(
                f"the deadline is {self.deadline_s / 3600:g} h: it must be {MOST_DEADLINE_H:,.0f} h at most; "
                "leave it out if time does not matter"
            )
        check_seed(self.seed)
        if not 0 < self.confidence < 1:
            raise UsageError(f"the confidence is {self.confidence:g}: it must be between 0 and 1, such as 0.95")
        if not 0 <= self.notices <= 1:
            raise UsageError(f"notices is {self.notices:g}: it is a share of the losses, from 0 to 1")
        if not (math.isfinite(self.usd_per_hour_of_waiting) and self.usd_per_hour_of_waiting >= 0):
            raise UsageError(
                f"an hour of waiting is worth {self.usd_per_hour_of_waiting:g} dollars: "
                "it must be a finite number, zero or more"
            )
        if self.usd_per_hour_of_waiting and self.objective != "cost":
            raise UsageError("a price of waiting needs the objective cost: --objective cost")
        if self.market == "built-in" and not self._may_have_a_market:
            raise UsageError(
                "a spot market needs --work, the objective throughput, cost or time, the policy deepvm, and not --mixed"
            )
        if self.global_batch is not None and self.batch is None:
            raise UsageError("--global-batch needs --batch too: the samples in one step of --step-time, on one T4")
        if self.global_batch is not None and self.mixed:
            raise UsageError("--mixed and --global-batch cannot be combined: limits are modelled for one GPU type")
        if self.architectures is not None and not self.architectures:
            raise UsageError("architectures is empty: name at least one")
        if self.mixed and (self.policy != "deepvm" or self.objective != "throughput"):
            raise UsageError("--mixed needs the objective throughput and the policy deepvm")

    @property
    def regions(self) -> tuple[str, ...]:
        """The regions asked for; empty for any."""
        return names_of(self.region)

    @property
    def zones(self) -> tuple[str, ...]:
        return names_of(self.zone)

    @property
    def gpus(self) -> tuple[str, ...]:
        return names_of(self.gpu)

    @property
    def vendors(self) -> tuple[str, ...]:
        return names_of(self.vendor)

    @property
    def published(self) -> bool:
        """True for the paper's method as it was run: its objective, its bounds, its memory rule."""
        return self.objective == "flopp"

    @property
    def _may_have_a_market(self) -> bool:
        plain = self.policy == "deepvm" and not self.mixed and not self.published
        return plain and self.work_eflops_h is not None

    def under_market(self, catalog: Catalog) -> bool:
        """True if plans are replayed on a spot market. The paper's catalogues have none unless it is asked for."""
        if self.market == "auto":
            return self._may_have_a_market and catalog.saturation != "table"
        return self.market == "built-in"

    @property
    def gradient_bytes_per_step(self) -> float:
        if self.gradient_bytes is not None:
            return float(self.gradient_bytes)
        return self.checkpoint_bytes / CHECKPOINT_OVER_GRADIENTS

    @property
    def least_performance(self) -> float:
        """The least eFLOPS that meet the deadline."""
        if self.deadline_s is None or self.work_eflops_h is None:
            return 0.0
        return self.work_eflops_h * 3600 / self.deadline_s

    def architectures_of(self, catalog: Catalog) -> tuple[str, ...]:
        """Return the shapes that are allowed: those asked for, else all under a market, else the paper's.

        Some of several clouds have no spot market, so they add all-on-demand to the paper's."""
        if self.architectures is not None:
            return self.architectures
        if self.under_market(catalog):
            return MARKET_ARCHITECTURES
        return (*PAPER_ARCHITECTURES, "all-on-demand") if catalog.clouds else PAPER_ARCHITECTURES

    def quotas_of(self, catalog: Catalog) -> tuple[Quota, ...]:
        return catalog.quotas if self.quotas is None else self.quotas

    def without_checkpoints(self) -> Request:
        """Return the same job with checkpoints of no bytes."""
        return replace(self, checkpoint_bytes=0, gradient_bytes=round(self.gradient_bytes_per_step))

    @classmethod
    def for_job(cls, job: Job, **given: Any) -> Request:
        """Make a request for a job that was profiled. Figures that are given win over the job's."""
        check_job(job)
        return cls(**job_fields(job, given))

    def to_json(self) -> dict[str, Any]:
        return json_fields(self, " ".join(f.name for f in fields(self)))


def names_of(names: Names) -> tuple[str, ...]:
    return () if names is None else (names,) if isinstance(names, str) else names


def _simplest(names: Names) -> Names:
    """Return one name as itself, several once each, none as None."""
    several = tuple(dict.fromkeys(names_of(names)))
    return several if len(several) > 1 else several[0] if several else None
