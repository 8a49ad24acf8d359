"""A price history and a trace in; the prices of its zone by tick, and how old they were, out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime, timezone

import numpy as np
from numpy.typing import NDArray

from deepvm.market.history import Key, PriceHistory
from deepvm.market.reference_prices import machine_types, zone_id_region
from deepvm.market.trace import Trace, region_of

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
_DAY_S = 86_400
_DATED_SET = re.compile(r"(?<!\d)(\d\d)-(\d\d)-(\d{4})(?!\d)")  # public sets are named by month, day and year


@dataclass(frozen=True, kw_only=True, slots=True)
class ZonePrices:
    """Prices of one machine of one zone. ``age_days`` is the oldest that a price was; below zero: it is from later."""

    spot: Floats  # USD an hour by tick of the trace
    on_demand_usd: float | None
    age_days: int
    where: str  # whose prices these are
    bridged_days: int  # on which a zone was not offered by the file: its last price counts

    @property
    def note(self) -> str:
        days = "1 day" if self.bridged_days == 1 else f"{self.bridged_days} days"
        gaps = f"; on {days} without a price, the last one counts" if self.bridged_days else ""
        if self.age_days < 0:
            return f"prices of {self.where}, from {-self.age_days} days after the trace began{gaps}"
        return f"prices of {self.where}, at most {self.age_days} days old{gaps}"


def zone_prices(history: PriceHistory, trace: Trace, title: str) -> ZonePrices | None:
    """Return the prices of a trace's machines; None if the history has none, or the trace no date.

    Prices of the same zone are taken, or else the median of its region: AWS's histories name zones by IDs that differ
    from the names in traces."""
    types, begin = machine_types(trace.accelerator, trace.accelerator_count, trace.zone), _begin(trace, title)
    if not types or begin is None:
        return None
    days = _days(begin, trace)
    parts = [_spot(history, type_, trace.zone, days) for type_ in types]
    if not parts or any(part is None for part in parts):
        return None
    found = [part for part in parts if part is not None]
    first, last = int(history.seen[0]), int(history.seen[-1])
    age = int(days[0]) - first if days[0] < first else max(0, int(days[-1]) - last)
    if first <= days[0] and days[-1] <= last:
        seen = history.seen[np.searchsorted(history.seen, days, side="right") - 1]
        age = int((days - seen).max())
    return ZonePrices(
        spot=np.asarray(sum(spot for spot, _, _ in found)),
        on_demand_usd=_on_demand(history, types, trace.zone, days),
        age_days=age,
        where=f"{' + '.join(types)} in {found[0][1]}",
        bridged_days=len(np.unique(days[np.any([gaps for _, _, gaps in found], axis=0)])),
    )


def _begin(trace: Trace, title: str) -> datetime | None:
    """Return the time of the first tick: the trace's own, or by the date in the name of its set."""
    if trace.start is not None or (named := _DATED_SET.search(title)) is None:
        return trace.start
    try:
        begin = datetime(int(named[3]), int(named[1]), int(named[2]), tzinfo=timezone.utc)
    except ValueError:
        return None
    return datetime.fromtimestamp(begin.timestamp() + trace.first_s, tz=timezone.utc)


def _days(begin: datetime, trace: Trace) -> NDArray[np.int64]:
    seconds = begin.timestamp() + np.arange(len(trace.up)) * trace.gap_s
    return np.asarray(np.floor(seconds / _DAY_S).astype(np.int64) + date(1970, 1, 1).toordinal())


def _spot(history: PriceHistory, type_: str, zone: str, days: NDArray[np.int64]) -> tuple[Floats, str, Flags] | None:
    """Return prices by tick, of which place they are, and where some of them are bridged."""
    keys, where = _keys(history, type_, zone)
    priced = [(row, key) for row, key in ((_by_day(history, key, days), key) for key in keys) if row is not None]
    if not priced:
        return None
    gaps = np.any([_not_offered(history, key, days) for _, key in priced], axis=0)
    return np.median(np.stack([row for row, _ in priced]), axis=0), where, gaps


def _keys(history: PriceHistory, type_: str, zone: str) -> tuple[Sequence[Key], str]:
    if (own := history.key(type_, zone, "spot")) is not None:
        return [own], own[2]
    region = region_of(zone)
    names = (zone_id_region(region), region)
    keys = [key for key in history.keys_of(type_, "spot") if region_of(key[2]) in names]
    return keys, f"{region}, the median of its {len(keys)} zones"


def _by_day(history: PriceHistory, key: Key, days: NDArray[np.int64]) -> Floats | None:
    """Return the price known on each day; before the first one, that one. Gaps keep the last price."""
    changed, usd = history.changes[key]
    known = np.isfinite(usd)
    if not known.any():
        return None
    at = np.searchsorted(changed[known], days, side="right") - 1
    return np.asarray(usd[known][np.maximum(at, 0)])


def _not_offered(history: PriceHistory, key: Key, days: NDArray[np.int64]) -> Flags:
    """Return the days on which the price is empty. A trace with machines of such a day shows that they were there."""
    changed, usd = history.changes[key]
    at = np.searchsorted(changed, days, side="right") - 1
    return np.asarray((at >= 0) & np.isnan(usd[np.maximum(at, 0)]))


def _on_demand(history: PriceHistory, types: Sequence[str], zone: str, days: NDArray[np.int64]) -> float | None:
    keys = [history.key(type_, zone, "on-demand") for type_ in types]
    rows = [None if key is None else _by_day(history, key, days[:1]) for key in keys]
    return None if any(row is None for row in rows) else sum(float(row[0]) for row in rows if row is not None)
