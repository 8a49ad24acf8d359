"""The values of a catalogue: what can be rented, where, in which market, and at what price.

Missing data is ``None`` (NaN in columns) and stays so; nothing here turns it into a zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepvm.errors import UnknownName, UsageError

STALE_DAYS = 31  # spot prices move by tens of percent in a month


class Market(str, Enum):
    ON_DEMAND = "on-demand"
    SPOT = "spot"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, kw_only=True, slots=True)
class Instance:
    """One machine type. Bandwidth is in Gbit/s; ``sustained`` is what remains when a burst is used up."""

    name: str
    family: str | None = None  # the letters that vCPU quotas go by: G, P, C ...
    vcpus: float | None = None
    memory_gib: float | None = None
    accelerator: str | None = None
    accelerator_count: float = 0.0  # fractional where a machine has a slice of a GPU
    accelerator_memory_gib: float | None = None  # of each
    architecture: str | None = None  # x86_64 or arm64
    burst_gbps: float | None = None
    sustained_gbps: float | None = None
    interruption_percent: tuple[float, float] | None = None  # of spot machines in a month: from, to
    eflops: float | None = None  # measured; an estimate is never stored here
    speedup: Mapping[str, Any] | None = None  # a measured curve, as deepvm.performance.curve_from_spec reads it

    def __post_init__(self) -> None:
        if not self.name:
            raise UsageError("an instance type has no name")
        for what in (
            "vcpus",
            "memory_gib",
            "accelerator_memory_gib",
            "burst_gbps",
            "sustained_gbps",
            "eflops",
        ):
            value = getattr(self, what)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise UsageError(f"{self.name}: {what} is {value}, it must be above zero or absent")
        if (self.accelerator is None) != (self.accelerator_count == 0):
            raise UsageError(f"{self.name}: an accelerator needs a count, and a count an accelerator")
        if not (math.isfinite(self.accelerator_count) and self.accelerator_count >= 0):
            raise UsageError(f"{self.name}: accelerator_count is {self.accelerator_count}")
        if self.architecture not in (None, "x86_64", "arm64"):
            raise UsageError(f"{self.name}: architecture is {self.architecture!r}, not x86_64 or arm64")

    @property
    def gbps(self) -> float | None:
        """The bandwidth to plan with: sustained where it is known."""
        return self.sustained_gbps if self.sustained_gbps is not None else self.burst_gbps


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """An instance in one place and market. ``zone`` is None where a price holds for a whole region."""

    instance: Instance
    region: str
    zone: str | None
    market: Market
    usd_per_hour: float
    usd_low: float | None  # the range over the zones, where one price stands for a region
    usd_high: float | None
    seen: date


@dataclass(frozen=True, kw_only=True, slots=True)
class Quota:
    """How many vCPUs of these families may run at once in a market; in one region, or in any."""

    families: tuple[str, ...]
    market: Market
    vcpus: float
    region: str | None = None

    def __post_init__(self) -> None:
        if not self.families or not (math.isfinite(self.vcpus) and self.vcpus >= 0):
            raise UsageError(f"a quota needs families and vCPUs of zero or more, not {self}")

    @property
    def name(self) -> str:
        where = f" in {self.region}" if self.region else ""
        return f"{'/'.join(self.families)} {self.market}{where}"

    def closeness(self, instance: Instance) -> int:
        """How exactly the families name an instance's: 0 not at all. ``P`` covers p4d and p5en, ``P5`` both p5 and p5en
        and more exactly, ``P5EN`` the latter alone and most exactly."""
        return max(_closeness(family.upper(), instance) for family in self.families)


def _closeness(family: str, instance: Instance) -> int:
    own = (instance.family or "").upper()
    if not own:
        return 0
    series = instance.name.upper().partition(".")[0]
    if family in (own, series):
        return 2 * len(family) + (family == series)
    more_exact = family[-1:].isdigit() and series.startswith(family) and not series[len(family) :][:1].isdigit()
    wider = own.startswith(family) and own[len(family) :].isdigit()
    return 2 * len(family) if more_exact or wider else 0


def binding_quotas(quotas: Sequence[Quota], instance: Instance, market: Market, region: str) -> tuple[Quota, ...]:
    """The quotas that count a machine: of those for its market and region, the ones that name it most exactly.

    AWS counts P5 apart from the other P types where it has a quota for P5, and with them where it has none."""
    here = [(q.closeness(instance), q) for q in quotas if q.market is market and q.region in (None, region)]
    closest = max((close for close, _ in here), default=0)
    return tuple(q for close, q in here if close == closest > 0)


FloatColumn = NDArray[np.float64]
IndexColumn = NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class Prices:
    """The offers of one market as columns. ``instance`` and ``place`` index the catalogue's tuples."""

    instance: IndexColumn
    place: IndexColumn
    usd_per_hour: FloatColumn
    usd_low: FloatColumn | None = None
    usd_high: FloatColumn | None = None
    seen: IndexColumn  # proleptic days (date.toordinal)

    def __len__(self) -> int:
        return len(self.instance)


Place = tuple[str, str | None]


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """Instances and their offers. ``saturation`` names the model of the network that its figures belong to."""

    name: str
    provider: str
    description: str
    instances: tuple[Instance, ...]
    places: tuple[Place, ...]
    prices: Mapping[Market, Prices]
    quotas: tuple[Quota, ...] = ()
    saturation: str = "bandwidth"
    notes: Sequence[str] = field(default=())

    @cached_property
    def index_by_name(self) -> Mapping[str, int]:
        return {instance.name: i for i, instance in enumerate(self.instances)}

    def instance(self, name: str) -> Instance:
        index = self.index_by_name.get(name)
        if index is None:
            raise UnknownName("instance type", name, self.index_by_name)
        return self.instances[index]

    @property
    def regions(self) -> list[str]:
        return sorted({region for region, _ in self.places})

    @property
    def zones(self) -> list[str]:
        return sorted({zone for _, zone in self.places if zone is not None})

    def offers(self, instance: str | None = None) -> Iterator[Offer]:
        """The offers one by one, of one instance type or all. For reading; searching uses the columns."""
        wanted = None if instance is None else self.index_by_name[self.instance(instance).name]
        for market, prices in self.prices.items():
            rows = range(len(prices)) if wanted is None else np.flatnonzero(prices.instance == wanted).tolist()
            for row in rows:
                region, zone = self.places[prices.place[row]]
                yield Offer(
                    instance=self.instances[prices.instance[row]],
                    region=region,
                    zone=zone,
                    market=market,
                    usd_per_hour=float(prices.usd_per_hour[row]),
                    usd_low=None if prices.usd_low is None else _known(prices.usd_low[row]),
                    usd_high=None if prices.usd_high is None else _known(prices.usd_high[row]),
                    seen=date.fromordinal(int(prices.seen[row])),
                )

    @property
    def prices_seen(self) -> tuple[date, date] | None:
        """The oldest and the newest day on which a price was seen."""
        columns = [p.seen for p in self.prices.values() if len(p)]
        if not columns:
            return None
        return (
            date.fromordinal(min(int(c.min()) for c in columns)),
            date.fromordinal(max(int(c.max()) for c in columns)),
        )


def _known(value: float) -> float | None:
    return None if math.isnan(value) else float(value)
