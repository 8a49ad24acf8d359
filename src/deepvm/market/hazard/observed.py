"""What was observed of one gang: traces or a market in; tick series and spells out. Models are fitted to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepvm.errors import UsageError
from deepvm.market.market import Market
from deepvm.market.trace import Counts, Trace

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Observed:
    """One zone: ``up[t]`` of ``machines`` machines were up during tick t."""

    zone: str
    up: Counts
    tick_s: float
    machines: int

    def __post_init__(self) -> None:
        if not self.up.size:
            raise UsageError(f"nothing was observed of {self.zone}: a hazard needs at least one tick")
        if self.up.min() < 0 or self.up.max() > self.machines or self.machines < 1:
            raise UsageError(
                f"{self.zone} had {self.up.min()} to {self.up.max()} machines up: it must be 0 to {self.machines}"
            )
        if not (np.isfinite(self.tick_s) and self.tick_s > 0):
            raise UsageError(f"{self.zone} has ticks of {self.tick_s:g} s: they must be above zero")

    @property
    def hours(self) -> float:
        return len(self.up) * self.tick_s / 3600

    def gang(self, machines: int) -> Flags:
        """By tick: True if a gang of this many machines was up."""
        if not 1 <= machines <= self.machines:
            raise UsageError(f"a gang of {machines} is outside of what {self.zone} has: 1 to {self.machines} machines")
        return self.up >= machines

    def split(self, share: float) -> tuple[Observed, Observed]:
        """Return the first ``share`` of the ticks and the rest, each with one tick at least."""
        if not 0 < share < 1 or len(self.up) < 2:
            raise UsageError(f"{len(self.up)} ticks of {self.zone} cannot be split at {share:g}")
        at = min(max(1, round(len(self.up) * share)), len(self.up) - 1)
        return self._cut(0, at), self._cut(at, len(self.up))

    def _cut(self, first: int, last: int) -> Observed:
        return Observed(zone=self.zone, up=self.up[first:last], tick_s=self.tick_s, machines=self.machines)


def observe(source: Trace | Market | Observed | Iterable[Trace | Observed]) -> tuple[Observed, ...]:
    """Return what a trace, a market or several traces observed, zone by zone."""
    if isinstance(source, Observed):
        return (source,)
    if isinstance(source, Trace):
        return (Observed(zone=source.zone, up=source.up, tick_s=source.gap_s, machines=source.machines),)
    if isinstance(source, Market):
        most = max(1, int(source.capacity.max()))
        rows = zip(source.zones, source.capacity, strict=True)
        return tuple(Observed(zone=zone, up=row, tick_s=source.tick_s, machines=most) for zone, row in rows)
    return tuple(one for part in source for one in observe(part))


@dataclass(frozen=True, kw_only=True)
class Spells:
    """Spells of one kind, up or down, as columns.

    A spell of k ticks was seen k times. ``began`` is False if it was under way at the first tick, ``ended`` is False if
    it was at the last one.
    """

    ticks: NDArray[np.int64]
    tick_h: Floats
    began: Flags
    ended: Flags
    weight: Floats

    def __len__(self) -> int:
        return len(self.ticks)

    @property
    def hours(self) -> Floats:
        return self.ticks * self.tick_h


def spells_of(observed: Sequence[Observed], machines: int, *, up: bool, half_life_h: float | None = None) -> Spells:
    """Extract the spells during which a gang of ``machines`` was up, or was not.

    With ``half_life_h``, a spell that ended this much earlier than its trace counts half.
    """
    columns: list[tuple[NDArray[np.int64], Floats, Flags, Flags, Floats]] = []
    for one in observed:
        levels = one.gang(machines)
        starts = np.concatenate([[0], np.flatnonzero(levels[1:] != levels[:-1]) + 1])
        ends = np.append(starts[1:], len(levels))
        kept = levels[starts] == up
        age_h = (len(levels) - ends) * one.tick_s / 3600
        weight = np.ones(len(ends)) if half_life_h is None else 0.5 ** (age_h / half_life_h)
        ended, began = ends < len(levels), starts > 0
        tick_h = np.full(len(ends), one.tick_s / 3600)
        columns.append(((ends - starts)[kept], tick_h[kept], began[kept], ended[kept], weight[kept]))
    joined = [np.concatenate(parts) for parts in zip(*columns, strict=True)] if columns else [np.zeros(0)] * 5
    return Spells(
        ticks=joined[0].astype(np.int64),
        tick_h=joined[1],
        began=joined[2].astype(bool),
        ended=joined[3].astype(bool),
        weight=joined[4],
    )
