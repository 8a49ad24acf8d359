"""Check a catalogue: a catalogue and today's date in, findings out. Problems of a kind are one finding with examples.

Updates refuse a catalogue with errors; ``deepvm catalog check`` shows all findings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from deepvm.catalog import accelerators
from deepvm.catalog.model import STALE_DAYS, Catalog, IndexColumn, Instance, Market, Prices

_EXAMPLES = 3
# Per hour and 16-bit TFLOPS. The cheapest spot GPUs ever offered cost twice as much ($0.05 for a V100). Files of
# providers with auctions have the lowest admitted bid ($0.08 for eight A100) instead of a price.
BID_FLOOR_USD = 0.0002
# AWS charges at least a tenth of on-demand for spot machines: without a market, a price is exactly this floor.
FLOOR_OF_ON_DEMAND = 0.1


class Severity(str, Enum):
    ERROR = "error"  # a plan from this would be wrong
    WARNING = "warning"  # a plan may be worse than it could be
    NOTE = "note"  # correct, and worth knowing

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    severity: Severity
    subject: str
    problem: str
    count: int = 1


def check(catalog: Catalog, today: date) -> list[Finding]:
    """Return all findings, errors first. The ages of prices count from ``today``."""
    findings = [
        *_empty(catalog),
        *_instances(catalog),
        *(f for market, prices in catalog.prices.items() for f in _offers(catalog, market, prices, today)),
        *_spot_against_on_demand(catalog),
        *_quotas(catalog),
    ]
    return sorted(findings, key=lambda f: list(Severity).index(f.severity))


def _finding(severity: Severity, problem: str, subjects: Sequence[str]) -> list[Finding]:
    names = list(dict.fromkeys(subjects))
    if not names:
        return []
    more = len(names) - _EXAMPLES
    subject = ", ".join(names[:_EXAMPLES]) + (f" and {more:,} more" if more > 0 else "")
    return [Finding(severity=severity, subject=subject, problem=problem, count=len(subjects))]


def _empty(catalog: Catalog) -> list[Finding]:
    if not any(len(prices) for prices in catalog.prices.values()):
        return _finding(Severity.ERROR, "no prices at all", [catalog.name])
    offered = {int(i) for prices in catalog.prices.values() for i in np.unique(prices.instance)}
    unoffered = [instance.name for i, instance in enumerate(catalog.instances) if i not in offered]
    return _finding(Severity.WARNING, "no price in any market", unoffered)


def _instances(catalog: Catalog) -> list[Finding]:
    def find(severity: Severity, problem: str, wrong: Callable[[Instance], bool]) -> list[Finding]:
        return _finding(severity, problem, [i.name for i in catalog.instances if wrong(i)])

    listed = Counter(i.name for i in catalog.instances)
    twice = [name for name, times in listed.items() if times > 1]
    return [
        *_finding(Severity.ERROR, "listed twice", twice),
        *find(Severity.ERROR, "sustained bandwidth above burst", _sustained_above_burst),
        *find(Severity.ERROR, "interruption range upside down or outside 0 to 100 %", _wrong_interruptions),
        *find(Severity.WARNING, "accelerator unknown and no measured eFLOPS", _speed_unknown),
        *find(Severity.WARNING, "GPU memory disagrees with the table of accelerators", _memory_disagrees),
        *find(Severity.WARNING, "vCPUs unknown", lambda i: i.vcpus is None),
        *find(Severity.WARNING, "memory unknown", lambda i: i.memory_gib is None and i.accelerator is None),
        *find(Severity.WARNING, "bandwidth unknown", lambda i: i.gbps is None),
        *find(Severity.NOTE, "a fraction of an accelerator", lambda i: i.accelerator_count % 1 != 0),
    ]


def _sustained_above_burst(instance: Instance) -> bool:
    burst, sustained = instance.burst_gbps, instance.sustained_gbps
    return burst is not None and sustained is not None and sustained > burst


def _wrong_interruptions(instance: Instance) -> bool:
    bucket = instance.interruption_percent
    return bucket is not None and not (len(bucket) == 2 and 0 <= bucket[0] <= bucket[1] <= 100)


def _speed_unknown(instance: Instance) -> bool:
    known = instance.accelerator is None or accelerators.find(instance.accelerator) is not None
    return not known and instance.eflops is None


def _memory_disagrees(instance: Instance) -> bool:
    gpu = None if instance.accelerator is None else accelerators.find(instance.accelerator)
    if gpu is None or instance.accelerator_memory_gib is None:
        return False
    part = min(1.0, instance.accelerator_count)  # a slice has its share of the memory
    return not accelerators.agrees(gpu.memory_gib * part, instance.accelerator_memory_gib)


def _offers(catalog: Catalog, market: Market, prices: Prices, today: date) -> list[Finding]:
    def find(severity: Severity, problem: str, wrong: NDArray[np.bool_]) -> list[Finding]:
        return _finding(severity, f"{market}: {problem}", _names(catalog, prices.instance[wrong]))

    usd, age_days = prices.usd_per_hour, today.toordinal() - prices.seen
    key = prices.instance.astype(np.int64) * max(1, len(catalog.places)) + prices.place
    _, first = np.unique(key, return_index=True)
    again = np.ones(len(prices), dtype=bool)
    again[first] = False
    outside = np.zeros(len(prices), dtype=bool)
    if prices.usd_low is not None:
        outside |= prices.usd_low > usd
    if prices.usd_high is not None:
        outside |= prices.usd_high < usd
    tflops = np.array([_tflops(instance) for instance in catalog.instances])[prices.instance]
    stale = age_days > STALE_DAYS
    oldest = int(age_days.max()) if len(prices) else 0
    return [
        *find(Severity.ERROR, "two offers in the same place", again),
        *find(Severity.ERROR, "price not above zero", ~(np.isfinite(usd) & (usd > 0))),
        *find(Severity.ERROR, "price outside its own range", outside),
        *find(Severity.ERROR, "price seen in the future", age_days < -1),  # time zones differ by a day
        *find(Severity.WARNING, "bid floor, not a price: too low for these GPUs", usd < tflops * BID_FLOOR_USD),
        *find(Severity.WARNING, f"prices older than {STALE_DAYS} days (up to {oldest} days)", stale),
    ]


def is_bid_floor(instance: Instance, usd_per_hour: float) -> bool:
    """True if a price is too low for its accelerators: it is the lowest admitted bid, not a market price."""
    return usd_per_hour < bid_floor_usd(instance)


def bid_floor_usd(instance: Instance) -> float:
    """Return the price below which nobody rents out its accelerators; zero if they are unknown."""
    return _tflops(instance) * BID_FLOOR_USD


def _tflops(instance: Instance) -> float:
    """Sum over all accelerators; zero if unknown."""
    gpu = None if instance.accelerator is None else accelerators.find(instance.accelerator)
    return 0.0 if gpu is None else gpu.tflops_16bit * instance.accelerator_count


def _spot_against_on_demand(catalog: Catalog) -> list[Finding]:
    spot, on_demand = catalog.prices.get(Market.SPOT), catalog.prices.get(Market.ON_DEMAND)
    if spot is None or on_demand is None or not len(spot) or not len(on_demand):
        return []
    spot_usd, usd = spot.usd_per_hour, _same_place(catalog, spot, on_demand)
    floor = usd * FLOOR_OF_ON_DEMAND
    # Equal but for the rounding to four digits, which is half a percent for the lowest prices.
    at_floor = np.abs(spot_usd - floor) <= np.minimum(5.1e-5, 0.005 * floor)
    floor_problem = "spot at exactly 10 % of on-demand: the provider's floor, not a market price"
    return [
        *_finding(Severity.WARNING, "spot above on-demand", _names(catalog, spot.instance[spot_usd > usd])),
        *_finding(Severity.NOTE, "spot as expensive as on-demand", _names(catalog, spot.instance[spot_usd == usd])),
        *_finding(Severity.WARNING, floor_problem, _names(catalog, spot.instance[at_floor])),
    ]


def _same_place(catalog: Catalog, spot: Prices, on_demand: Prices) -> NDArray[np.float64]:
    """Return for each spot offer the on-demand price in its zone, else in its region, else NaN."""
    places = len(catalog.places)
    region_wide = {region: i for i, (region, zone) in enumerate(catalog.places) if zone is None}
    in_region = np.array([region_wide.get(region, i) for i, (region, _) in enumerate(catalog.places)])
    table = np.full(len(catalog.instances) * places, np.nan)
    table[on_demand.instance.astype(np.int64) * places + on_demand.place] = on_demand.usd_per_hour
    rows = spot.instance.astype(np.int64) * places
    in_zone: NDArray[np.float64] = table[rows + spot.place]
    return np.where(np.isnan(in_zone), table[rows + in_region[spot.place]], in_zone)


def _quotas(catalog: Catalog) -> list[Finding]:
    unused = [q.name for q in catalog.quotas if not any(q.closeness(instance) for instance in catalog.instances)]
    known = set(catalog.regions)
    elsewhere = [quota.name for quota in catalog.quotas if quota.region is not None and quota.region not in known]
    pairs = Counter((f, q.market, q.region) for q in catalog.quotas for f in q.families)
    twice = [f"{family} {market}" for (family, market, _), times in pairs.items() if times > 1]
    return [
        *_finding(Severity.NOTE, "quota for families without a type", unused),
        *_finding(Severity.WARNING, "quota for a region without offers", elsewhere),
        *_finding(Severity.ERROR, "two quotas for one family, market and region", twice),
    ]


def _names(catalog: Catalog, column: IndexColumn) -> list[str]:
    return [catalog.instances[i].name for i in column.tolist()]
