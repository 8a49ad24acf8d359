"""Recorded capacity for a plan: traces in; for each accelerator the zones that stand for its market out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deepvm.catalog.accelerators import find
from deepvm.errors import UsageError, listed
from deepvm.market.builtin import History
from deepvm.market.market import market_of
from deepvm.market.trace import Trace, region_of

if TYPE_CHECKING:
    from deepvm.plan.risk.spot import Column


@dataclass(frozen=True, kw_only=True, eq=False)
class Recorded:
    """Traces of one accelerator on one clock, [zone, tick], of at most ``machines`` in a zone."""

    name: str
    zones: tuple[str, ...]
    capacity: NDArray[np.int32]
    machines: int
    tick_s: float

    @property
    def history(self) -> History:
        days = self.capacity.shape[1] * self.tick_s / 86400
        return History(days=days, zones=len(self.zones), origin=f"traces {self.name}")

    def placed(self, columns: Sequence[Column]) -> tuple[list[Column], NDArray[np.int32]]:
        """Return the plan's zones that have a trace, and their capacity.

        A trace belongs to its zone, else to its region. If none belongs to any, the traces stand for the plan's zones:
        in turn, so that no zone keeps the best one."""
        kept, rows = [], []
        left = dict(enumerate(self.zones))
        for column in columns:
            row = next((i for i, zone in left.items() if zone == column.zone), None)
            if row is None and column.zone is None:
                row = next((i for i, zone in left.items() if region_of(zone) == column.region), None)
            if row is not None:
                kept.append(column)
                rows.append(row)
                del left[row]
        if kept:
            return kept, self.capacity[rows]
        count, every = min(len(columns), len(self.zones)), len(self.zones)
        turns = [[(i + turn) % every for i in range(count)] for turn in range(every)]
        return list(columns[:count]), np.concatenate([self.capacity[turn] for turn in turns], axis=1)

    def notes(self, columns: Sequence[Column]) -> tuple[str, ...]:
        places = {column.zone for column in columns} | {column.region for column in columns}
        if places.isdisjoint({*self.zones, *map(region_of, self.zones)}):
            return (f"the traces {self.name} are of other places: they stand for the plan's zones",)
        return ()


def recorded_markets(accelerators: Iterable[str], traces: Mapping[str, Sequence[Trace]]) -> dict[str, Recorded]:
    """Find the traces of each accelerator: the set with the most hours of zones. UsageError if they fit no machine."""
    found: dict[str, Recorded] = {}
    unusable: list[str] = []
    for accelerator in sorted(set(accelerators)):
        fitting = [one for name, group in traces.items() for one in _sets(name, group, accelerator, unusable)]
        if fitting:
            found[accelerator] = max(fitting, key=lambda one: one.capacity.size * one.tick_s)
    if not found and unusable:
        raise UsageError(f"the traces cannot be replayed: {listed(unusable)}")
    if not found:
        known = sorted({trace.accelerator or "?" for group in traces.values() for trace in group})
        raise UsageError(
            f"the traces are of {listed(known, ', ')}, and no machine that may be planned has that: "
            "choose other traces or another catalogue, or leave --traces out"
        )
    return found


def _sets(name: str, traces: Sequence[Trace], accelerator: str, unusable: list[str]) -> list[Recorded]:
    """Return the traces of this accelerator by its number in a machine, each on one clock; add why others are not."""
    alike: dict[int, list[Trace]] = {}
    for trace in traces:
        if trace.accelerator is not None and _known(trace.accelerator) == _known(accelerator):
            alike.setdefault(trace.accelerator_count, []).append(trace)
    found = []
    for group in alike.values():
        try:
            market = market_of(group, name=name, on_demand_usd=0.0, spot_usd=0.0)
        except UsageError as error:
            unusable.append(f"{name}: {error}")
            continue
        machines = min(trace.machines for trace in group)
        found.append(
            Recorded(
                name=name,
                zones=market.zones,
                capacity=np.minimum(market.capacity, machines),
                machines=machines,
                tick_s=market.tick_s,
            )
        )
    return found


def _known(accelerator: str) -> str:
    gpu = find(accelerator)
    return accelerator.upper() if gpu is None else gpu.name.upper()
