"""The published method as it was run, in nested loops: a setting and a budget in, choices out.

It checks the planner, shares no code with it, and is the baseline of its benchmark. Its errors are kept: the objective
counts the price twice, and the search ends one machine before a quota.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from deepvm.catalog import Catalog, Market
from deepvm.errors import UnknownName, UsageError
from deepvm.units import USD_TOLERANCE

MOST_MACHINES = 255
# A memory node serves this many workers, by the smaller of the two bandwidths in Gbit/s.
SATURATION = {0.3: 2, 1.7: 12, 5.0: 16, 10.0: 20, 12.5: 24, 15.0: 24, 25.0: 28, 30.0: 32}


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuType:
    name: str
    spot_usd: float
    on_demand_usd: float
    gbps: float
    eflops: float
    a: float
    b: float
    c: float
    quota: int | None  # in machines

    def scaling_factor(self, n: int) -> float:
        if n <= self.b:
            return 1.0
        speedup = self.c / (1 + math.exp(-self.a * (n - self.b)))
        tangent = self.c * self.a / 4 * (n - self.b) + self.c / 2
        return speedup / tangent

    @property
    def end(self) -> int:
        """The exclusive end of the search, by the quota."""
        return MOST_MACHINES + 1 if self.quota is None else self.quota

    @property
    def cap(self) -> int:
        """The most machines of the baselines, which use the whole quota."""
        return MOST_MACHINES if self.quota is None else self.quota


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuType:
    name: str
    on_demand_usd: float
    gbps: float
    memory_gib: float
    quota: int | None

    @property
    def end(self) -> int:
        return MOST_MACHINES + 1 if self.quota is None else self.quota


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    gpus: tuple[GpuType, ...]
    cpus: tuple[CpuType, ...]
    memory_gib: float  # that every memory node needs: checkpoint × buffers


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    architecture: str
    instance: str
    count: int
    memory_instance: str | None
    memory_count: int
    hourly_usd: float
    performance: float  # by the paper's text: eFLOPS × n × ScalingFactor


Found = tuple[
    GpuType, int, CpuType | None, int, float
]  # type, machines that train, memory nodes and how many, USD an hour


def recommend(setting: Setting, budget_usd: float, policy: str, *, top: int = 1, prune: bool = False) -> list[Choice]:
    """Return what a policy recommends for a budget, best first; empty if nothing fits.

    ``prune`` ends a loop once the price exceeds the budget. The published run has no pruning."""
    policies: dict[str, Callable[[], list[Found]]] = {
        "deepvm": lambda: best(setting, budget_usd, flopp, top=top, prune=prune),
        "noscale": lambda: best(setting, budget_usd, flopp_without_scaling, top=top, prune=prune),
        "cost-first": lambda: _cost_first(setting, budget_usd),
        "performance-first": lambda: _performance_first(setting, budget_usd),
    }
    if policy not in policies:
        raise UnknownName("policy", policy, policies)
    return [choice(found) for found in policies[policy]()]


def flopp(v: GpuType, n: int) -> float:
    """Compute Z as it was run: without the on-demand term of the paper's Equation 2."""
    return v.eflops / v.spot_usd * n * v.scaling_factor(n)


def flopp_without_scaling(v: GpuType, n: int) -> float:
    return v.eflops / v.spot_usd * n


def performance(v: GpuType, n: int) -> float:
    """Compute performance by the paper's text."""
    return v.eflops * n * v.scaling_factor(n)


def best(
    setting: Setting, budget_usd: float, worth: Callable[[GpuType, int], float], *, top: int = 1, prune: bool = False
) -> list[Found]:
    """Return the clusters of the highest worth; of equals the cheaper, then the smaller.

    Values that differ by rounding are equal: 3 × 100/0.3 is 1 × 100/0.1, and the cheaper wins."""

    def order(found: Found) -> tuple[float, float, int]:
        v, n, _, _, usd = found
        return -_rounded(worth(v, n)), _rounded(usd), n

    return heapq.nsmallest(top, clusters(setting, budget_usd, prune=prune), key=order)


def _rounded(value: float) -> float:
    return float(f"{value:.12g}")


def clusters(setting: Setting, budget_usd: float, *, prune: bool = False) -> Iterator[Found]:
    """Yield every cluster of both architectures within the budget."""
    budget = budget_usd + USD_TOLERANCE
    for v in setting.gpus:  # Tiering
        for n in range(1, v.end):
            if prune and n * v.spot_usd > budget:
                break
            for w in setting.cpus:
                if w.memory_gib < setting.memory_gib:
                    continue
                served = SATURATION[min(v.gbps, w.gbps)]
                for m in range(1, w.end):
                    usd = n * v.spot_usd + m * w.on_demand_usd
                    if prune and usd > budget:
                        break
                    if n / m < served and usd <= budget:
                        yield v, n, w, m, usd
    for v in setting.gpus:  # Single Anchor
        for n in range(2, v.end):
            usd = (n - 1) * v.spot_usd + v.on_demand_usd
            if usd <= budget:
                yield v, n, None, 0, usd


def _single_anchors(setting: Setting, budget_usd: float) -> list[Found]:
    return [
        (v, n, None, 0, usd)
        for v in setting.gpus
        for n in range(2, v.cap + 1)
        if (usd := (n - 1) * v.spot_usd + v.on_demand_usd) <= budget_usd + USD_TOLERANCE
    ]


def _cost_first(setting: Setting, budget_usd: float) -> list[Found]:
    found = _single_anchors(setting, budget_usd)
    return sorted(found, key=lambda cluster: (-cluster[1], _rounded(cluster[4])))[:1]


def _performance_first(setting: Setting, budget_usd: float) -> list[Found]:
    found = _single_anchors(setting, budget_usd)
    return sorted(found, key=lambda cluster: (-cluster[0].eflops, -cluster[1], _rounded(cluster[4])))[:1]


def choice(found: Found) -> Choice:
    v, n, w, m, usd = found
    return Choice(
        architecture="single-anchor" if w is None else "tiering",
        instance=v.name,
        count=n,
        memory_instance=None if w is None else w.name,
        memory_count=m,
        hourly_usd=usd,
        performance=performance(v, n),
    )


def setting_of(catalog: Catalog, *, checkpoint_bytes: int, buffers: int) -> Setting:
    """Convert a catalogue like the paper's: one place, logistic curves, bandwidths of the saturation table."""
    usd = {(offer.instance.name, offer.market): offer.usd_per_hour for offer in catalog.offers()}
    quotas = {(family, quota.market): quota.vcpus for quota in catalog.quotas for family in quota.families}
    gpus, cpus = [], []
    for machine in catalog.instances:
        if machine.vcpus is None or machine.burst_gbps not in SATURATION:
            raise UsageError(
                f"{machine.name} has no vCPUs, or no bandwidth of the paper's table: use a catalogue of the paper"
            )

        def quota(market: Market, family: str | None = machine.family, vcpus: float = machine.vcpus) -> int | None:
            found = quotas.get((family or "", market))
            return None if found is None else int(found // vcpus)

        if machine.accelerator is None and machine.memory_gib is not None:
            cpus.append(
                CpuType(
                    name=machine.name,
                    on_demand_usd=usd[machine.name, Market.ON_DEMAND],
                    gbps=machine.burst_gbps,
                    memory_gib=machine.memory_gib,
                    quota=quota(Market.ON_DEMAND),
                )
            )
        elif machine.eflops is not None and machine.speedup is not None:
            gpus.append(
                GpuType(
                    name=machine.name,
                    spot_usd=usd[machine.name, Market.SPOT],
                    on_demand_usd=usd[machine.name, Market.ON_DEMAND],
                    gbps=machine.burst_gbps,
                    eflops=machine.eflops,
                    a=machine.speedup["a"],
                    b=machine.speedup["b"],
                    c=machine.speedup["c"],
                    quota=quota(Market.SPOT),
                )
            )
    return Setting(gpus=tuple(gpus), cpus=tuple(cpus), memory_gib=checkpoint_bytes * buffers / 2**30)
