"""A run's machine events -> what the market did to it, as traces of the machines that it held. Pure.

A trace begins when the run asks for spot machines of a type in a zone, and ends when it moves away or ends. A machine
is up from the request that was granted until the market takes it. A tick counts the machines that are up at its end and
were not taken in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import groupby
from typing import Any

import numpy as np

from deepvm.errors import UsageError
from deepvm.events import Event
from deepvm.market.trace import Counts, Floats, Trace, TraceKind
from deepvm.runtime.cluster import Cluster
from deepvm.runtime.ledger.bill import number

MARKET = ("machine-asked", "machine-refused", "machine-up", "machine-down")
TAKEN = ("preempted", "lost", "left")  # by the market; a machine whose workers fail is not
ENDED = ("ended", "stopped")  # by the run
UNKNOWN_PLACE = "unknown"
_MOST_TICKS = 5_000_000
_TICKS_S = ((3600.0, 1.0), (86400.0, 10.0))  # for records up to the first; 60 s beyond

Place = tuple[str, str]  # instance and zone


@dataclass(slots=True)
class _Holding:
    """Machines of one type in one zone, from the first request until the last of them is given up."""

    place: Place
    began_s: float
    names: set[str] = field(default_factory=set)  # all that were ever wanted there
    wanted: set[str] = field(default_factory=set)
    changes: list[tuple[float, str, bool]] = field(default_factory=list)  # when, which machine, True if it is up then
    prices: list[tuple[float, float]] = field(default_factory=list)
    ended_s: float | None = None


class MarketRecord:
    """Observes events in the order of the ledger. ``traces`` returns what they say of the market."""

    def __init__(self, cluster: Cluster) -> None:
        rows = cluster.plan.get("instances", ())
        self._accelerators = {str(row.get("instance")): row.get("accelerator") for row in rows}
        self._machines = {machine.name: machine for machine in cluster.machines}
        self._open: dict[Place, _Holding] = {}
        self._place: dict[str, Place] = {}  # of each machine that is wanted
        self._holdings: list[_Holding] = []
        self._until_s = 0.0  # the last event that shows the run at work

    def observe(self, event: Event) -> None:
        if event.kind == "run-started":  # what happened since the last session is not known
            for place in list(self._open):
                self._close(place, self._until_s)
        name = event.machine
        if event.kind in MARKET and name is not None:
            if self._market(name, event.data) == "spot":
                self._observe_machine(name, event)
            elif name in self._place:  # it is on demand from now on
                self._give_up(name, event.at_s)
        if event.kind in ("step", "save", "restored") or (event.kind in MARKET and event.data.get("why") not in ENDED):
            self._until_s = max(self._until_s, event.at_s)

    def _observe_machine(self, name: str, event: Event) -> None:
        at_s, why = event.at_s, event.data.get("why")
        if event.kind == "machine-down":
            place = self._place.get(name)
            if place is not None and why in TAKEN:
                self._open[place].changes.append((at_s, name, False))
            elif place is not None and why in ENDED:
                self._give_up(name, at_s)
            return
        place = self._place_of(name, event.data)
        if event.kind == "machine-refused":
            if self._place.get(name) not in (None, place):  # only tried there
                return
        elif self._place.get(name) not in (None, place):
            self._give_up(name, at_s)
        holding = self._open.setdefault(place, _Holding(place=place, began_s=at_s))
        self._place[name] = place
        holding.names.add(name)
        holding.wanted.add(name)
        holding.changes.append((at_s, name, event.kind != "machine-refused"))
        usd = number(event.data.get("usd_per_hour"))
        if usd is not None:
            holding.prices.append((at_s, usd))

    def _give_up(self, name: str, at_s: float) -> None:
        place = self._place.pop(name)
        holding = self._open[place]
        holding.wanted.discard(name)
        if not holding.wanted:
            self._close(place, at_s)

    def _close(self, place: Place, at_s: float) -> None:
        holding = self._open.pop(place)
        holding.ended_s = at_s
        self._holdings.append(holding)
        self._place = {name: where for name, where in self._place.items() if where != place}

    def _market(self, name: str, data: Mapping[str, Any]) -> Any:
        planned = self._machines.get(name)
        return data.get("market", planned.market if planned is not None else None)

    def _place_of(self, name: str, data: Mapping[str, Any]) -> Place:
        planned = self._machines.get(name)
        instance = data.get("instance") or (planned.instance if planned is not None else "machine")
        return str(instance), str(data.get("zone") or data.get("region") or UNKNOWN_PLACE)

    def traces(self, tick_s: float | None = None) -> list[Trace]:
        """Return a trace of every holding that had a machine, in the order of time."""
        if tick_s is not None and not tick_s > 0:
            raise UsageError(f"ticks of {tick_s:g} s: they must be above zero")
        ends = [(holding, min(holding.ended_s or self._until_s, self._until_s)) for holding in self._all()]
        return [
            self._trace(holding, until_s, tick_s)
            for holding, until_s in sorted(ends, key=lambda pair: pair[0].began_s)
            if until_s > holding.began_s and any(up for _, _, up in holding.changes)
        ]

    def _all(self) -> list[_Holding]:
        return [*self._holdings, *self._open.values()]

    def _trace(self, holding: _Holding, until_s: float, tick_s: float | None) -> Trace:
        lasted_s = until_s - holding.began_s
        gap_s = tick_s or next((gap for most, gap in _TICKS_S if lasted_s <= most), 60.0)
        ticks = max(1, int(lasted_s / gap_s))
        if ticks > _MOST_TICKS:
            raise UsageError(
                f"{lasted_s:.0f} s in ticks of {gap_s:g} s are more than {_MOST_TICKS:,} ticks: give longer"
            )
        instance, zone = holding.place
        accelerator = self._accelerators.get(instance)
        return Trace(
            zone=zone,
            machines=len(holding.names),
            gap_s=gap_s,
            up=_up_by_tick(holding.changes, holding.began_s, gap_s, ticks),
            kind=TraceKind.HELD,
            start=datetime.fromtimestamp(holding.began_s, tz=timezone.utc),
            prices=_last_by_tick(holding.prices, holding.began_s, gap_s, ticks) if holding.prices else None,
            accelerator=str(accelerator or instance),
        )


def market_traces(events: Iterable[Event], cluster: Cluster, tick_s: float | None = None) -> list[Trace]:
    """Return what the market did to a run, as traces."""
    record = MarketRecord(cluster)
    for event in events:
        record.observe(event)
    return record.traces(tick_s)


def _up_by_tick(changes: list[tuple[float, str, bool]], began_s: float, gap_s: float, ticks: int) -> Counts:
    """Return how many machines are up at the end of each tick and were not taken in it."""
    counts = np.zeros(ticks, dtype=np.int32)
    up: set[str] = set()
    done = 0
    for tick, group in groupby(changes, key=lambda change: int((change[0] - began_s) / gap_s)):
        if tick >= ticks:
            break
        counts[done:tick] = len(up)
        taken: set[str] = set()
        for _, name, is_up in group:
            (up.add if is_up else up.discard)(name)
            if not is_up:
                taken.add(name)
        counts[tick] = len(up - taken)
        done = tick + 1
    counts[done:] = len(up)
    return counts


def _last_by_tick(prices: list[tuple[float, float]], began_s: float, gap_s: float, ticks: int) -> Floats:
    usd = np.full(ticks, np.nan)
    for at_s, price in prices:
        usd[max(0, int((at_s - began_s) / gap_s)) :] = price
    return usd
