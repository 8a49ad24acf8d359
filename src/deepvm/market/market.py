"""One spot market: the traces of several zones in, capacity and prices on one clock out. The simulator replays it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from deepvm.catalog.clouds.traffic import between_regions_usd_per_gb, between_zones_usd_per_gb, cloud_of_zone
from deepvm.errors import UsageError
from deepvm.market.trace import Counts, Floats, Trace, TraceKind, region_of

MOST_TICKS = 5_000_000


@dataclass(frozen=True, kw_only=True)
class Market:
    """Machines of one type in several zones. ``capacity`` and ``price`` are [zone, tick]."""

    zones: tuple[str, ...]
    tick_s: float
    capacity: Counts  # machines that can be had, or are still up
    price: Floats  # USD an hour of one spot machine
    on_demand_usd: Floats  # USD an hour of one on-demand machine, by zone
    kind: TraceKind = TraceKind.LAUNCH
    name: str = ""
    accelerator: str | None = None
    start_s: float | None = None  # of the first tick, in seconds since 1970
    priced: bool = True  # False if prices were not in the data

    def __post_init__(self) -> None:
        shape = (len(self.zones), self.capacity.shape[1] if self.capacity.ndim == 2 else -1)
        if self.capacity.shape != shape or self.price.shape != shape or not self.zones or not shape[1]:
            raise UsageError(f"a market of {len(self.zones)} zones has capacities of shape {self.capacity.shape}")
        if not np.isfinite(self.price).all() or (self.price < 0).any():
            raise UsageError("a market's prices must be finite and not negative")
        if self.on_demand_usd.shape != (len(self.zones),) or not (self.on_demand_usd >= 0).all():
            raise UsageError("a market needs one on-demand price for each zone, not negative")

    @property
    def ticks(self) -> int:
        return int(self.capacity.shape[1])

    @property
    def tick_h(self) -> float:
        return self.tick_s / 3600

    @property
    def hours(self) -> float:
        return self.ticks * self.tick_h

    @cached_property
    def move_usd_per_gb(self) -> Floats:
        """[from, to]: what a gigabyte between two zones costs."""
        return np.array([[move_usd_per_gb(old, new) for new in self.zones] for old in self.zones])

    @cached_property
    def paid(self) -> Floats:
        """[zone, tick + 1]: USD that one machine costs from the beginning to the start of a tick."""
        sums = np.zeros((len(self.zones), self.ticks + 1))
        np.cumsum(self.price * self.tick_h, axis=1, out=sums[:, 1:])
        return sums

    @cached_property
    def first_day_usd(self) -> float:
        """One spot machine in the cheapest zone, over the first day: by this, a budget decides the size of gangs."""
        day = max(1, round(24 / self.tick_h))
        return float(self.price[:, :day].mean(axis=1).min())

    def only(self, zones: Sequence[int]) -> Market:
        """Return the market of these zones alone."""
        chosen = list(zones)
        return replace(
            self,
            zones=tuple(self.zones[z] for z in chosen),
            capacity=self.capacity[chosen],
            price=self.price[chosen],
            on_demand_usd=self.on_demand_usd[chosen],
        )

    def between(self, first: int, last: int) -> Market:
        """Return the ticks from ``first`` up to ``last``, such as the history before a start."""
        if not 0 <= first < last <= self.ticks:
            raise UsageError(f"ticks {first} to {last} are outside of a market of {self.ticks} ticks")
        start_s = None if self.start_s is None else self.start_s + first * self.tick_s
        return replace(self, capacity=self.capacity[:, first:last], price=self.price[:, first:last], start_s=start_s)

    def repeated(self, least_h: float) -> Market:
        """Return the market followed by itself until it lasts ``least_h`` hours, so that late runs can end."""
        copies = max(1, math.ceil(least_h / self.hours - 1e-9))
        if copies * self.ticks > MOST_TICKS:
            raise UsageError(
                f"a market of {self.hours:g} h cannot last {least_h:g} h: that is over {MOST_TICKS:,} ticks"
            )
        return replace(self, capacity=np.tile(self.capacity, copies), price=np.tile(self.price, copies))


def move_usd_per_gb(old: str | None, new: str | None) -> float:
    """Return what a gigabyte from one zone to another costs, by their names. Unknown zones are in different regions."""
    if old is not None and old == new:
        return 0.0
    cloud = cloud_of_zone(old)
    if old is not None and new is not None and region_of(old) == region_of(new):
        return between_zones_usd_per_gb(cloud)
    return between_regions_usd_per_gb(cloud)


def market_of(
    traces: Sequence[Trace],
    *,
    name: str = "",
    on_demand_usd: float | Mapping[str, float] | None = None,
    spot_usd: float | Mapping[str, float] | None = None,
) -> Market:
    """Put the traces of several zones on one clock: that of the finest ticks, cut to the time that all of them have.

    On a finer clock, a trace holds what it last saw. ``spot_usd`` is used where a trace has no prices. Refused by name:
    two traces of one zone, traces of different kinds, and traces that do not overlap in time.
    """
    if not traces:
        raise UsageError("a market needs at least one trace")
    for earlier, later in pairwise(sorted(traces, key=lambda t: t.zone)):
        if earlier.zone == later.zone:
            raise UsageError(f"{earlier.zone} has two traces: give one for each zone")
    kinds = {trace.kind for trace in traces}
    if len(kinds) > 1:
        raise UsageError("traces of launches and of held machines cannot be one market: give them separately")
    tick_s = min(trace.gap_s for trace in traces)
    firsts, lasts = _common_time(traces, tick_s)
    columns, prices, priced = [], [], True
    for trace, first, last in zip(traces, firsts, lasts, strict=True):
        at = np.minimum((np.arange(first, last) * tick_s / trace.gap_s + 1e-9).astype(np.int64), len(trace.up) - 1)
        columns.append(trace.up[at])
        usd = _price(trace, spot_usd)
        priced = priced and trace.prices is not None
        prices.append(usd[at] if isinstance(usd, np.ndarray) else np.full(len(at), usd))
    start = next((t.start.timestamp() + f * tick_s for t, f in zip(traces, firsts, strict=True) if t.start), None)
    return Market(
        zones=tuple(trace.zone for trace in traces),
        tick_s=tick_s,
        capacity=np.stack(columns).astype(np.int32),
        price=np.stack(prices),
        on_demand_usd=np.array([_on_demand(trace, on_demand_usd) for trace in traces]),
        kind=next(iter(kinds)),
        name=name,
        accelerator=traces[0].accelerator,
        start_s=start,
        priced=priced,
    )


def _common_time(traces: Sequence[Trace], tick_s: float) -> tuple[list[int], list[int]]:
    """Return each trace's first and last tick of the common clock, in ticks of that clock."""
    dated = [trace.start.timestamp() for trace in traces if trace.start is not None]
    if dated and len(dated) < len(traces):
        missing = next(trace.zone for trace in traces if trace.start is None)
        raise UsageError(f"{missing} has no start_time and others have: they cannot be put on one clock")
    begins = dated or [trace.first_s for trace in traces]
    latest = max(begins)
    lengths = [len(trace.up) * trace.gap_s for trace in traces]
    earliest_end = min(begin + length for begin, length in zip(begins, lengths, strict=True))
    ticks = int((earliest_end - latest) / tick_s + 1e-9)
    if ticks < 1:
        raise UsageError("the traces do not overlap in time: give traces of one period")
    if ticks > MOST_TICKS:
        raise UsageError(f"the traces have {ticks} common ticks, at most {MOST_TICKS} are allowed: cut them")
    firsts = [round((latest - begin) / tick_s) for begin in begins]
    return firsts, [first + ticks for first in firsts]


def _price(trace: Trace, spot_usd: float | Mapping[str, float] | None) -> Floats | float:
    if trace.prices is not None:
        known = np.isfinite(trace.prices)
        if not known.any():
            raise UsageError(
                f"the trace of {trace.zone} has no price at all: leave the column out, or give --spot-price"
            )
        filled = np.where(known, np.arange(len(known)), 0)
        return np.asarray(trace.prices[np.maximum(np.maximum.accumulate(filled), int(np.argmax(known)))])
    usd = spot_usd.get(trace.zone) if isinstance(spot_usd, Mapping) else spot_usd
    if usd is None:
        raise UsageError(f"the trace of {trace.zone} has no prices: give spot_usd")
    return float(usd)


def _on_demand(trace: Trace, given: float | Mapping[str, float] | None) -> float:
    usd = given.get(trace.zone) if isinstance(given, Mapping) else given
    if usd is None:
        raise UsageError(f"no on-demand price is known for {trace.zone}: give --on-demand-price")
    return float(usd)
