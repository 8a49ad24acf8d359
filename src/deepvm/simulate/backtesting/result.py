"""What a backtest found: rows of strategies in; shares, regret, promises and remarks out, as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepvm.market.builtin import LEAST_DAYS, LEAST_ZONES, History
from deepvm.simulate.choice import Promise
from deepvm.simulate.job import GangJob
from deepvm.simulate.outcome import Outcomes, spread, summary
from deepvm.units import format_hours_up

Floats = NDArray[np.float64]
NOT_ENOUGH = f"not enough history: {LEAST_DAYS:g} days and {LEAST_ZONES} zones are needed"
_ALIKE = 0.005  # shares of missed deadlines that differ by less are the same


@dataclass(frozen=True, kw_only=True)
class Row:
    """One strategy over all starts. The oracle has costs alone."""

    name: str
    cost_usd: Floats
    outcomes: Outcomes | None
    regret: float | None  # None where no run ended, or the bound is zero, as machines cost nothing

    def to_json(self, deadline_h: float | None) -> dict[str, Any]:
        if self.outcomes is None:
            unknown = dict.fromkeys(("hours", "missed", "lost_hours", "moves"))
            return {"name": self.name, "cost_usd": spread(self.cost_usd), **unknown, "regret": self.regret}
        return {"name": self.name, **summary(self.outcomes, deadline_h), "regret": self.regret}


def regret_of(cost_usd: Floats, finished: NDArray[np.bool_], bound_usd: Floats) -> float | None:
    """Return the mean cost over the mean lower bound, minus 1, of the runs that ended: others are not yet paid."""
    bound = float(bound_usd[finished].sum())
    return float(cost_usd[finished].sum()) / bound - 1 if bound > 0 else None


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What ``planned`` promised, and what came, over the starts that had enough history."""

    cost_usd: Floats
    hours: Floats
    finished: NDArray[np.bool_]
    promised: tuple[Promise, ...]

    @property
    def coverage(self) -> float | None:
        """The share of starts that ended, with cost and time both within the promise; None without enough history."""
        if not self.promised:
            return None
        cheap = self.cost_usd <= [p.most_usd for p in self.promised]
        soon = self.hours <= [p.most_h for p in self.promised]
        return float((cheap & soon & self.finished).mean())

    def to_json(self) -> dict[str, Any] | None:
        if not self.promised:
            return None
        figures = {
            "cost_usd": (self.cost_usd, "mean_usd", "most_usd"),
            "hours": (self.hours, "mean_h", "most_h"),
        }
        document: dict[str, Any] = {"starts": len(self.promised), "confidence": self.promised[0].confidence}
        for name, (real, mean, most) in figures.items():
            document[name] = {
                "promised_mean": float(np.mean([getattr(p, mean) for p in self.promised])),
                "real_mean": float(real.mean()),
                "promised_most": float(np.mean([getattr(p, most) for p in self.promised])),
                "real_p95": float(np.percentile(real, 95)),
            }
        return document


@dataclass(frozen=True, kw_only=True)
class Backtest:
    market: str
    job: GangJob
    rows: tuple[Row, ...]
    starts_h: Floats
    promises: tuple[Promise, ...]  # one for each start; none without ``planned``, or if a plan's conduct is that
    bound_usd: Floats  # the oracle's
    bounded: NDArray[np.int64]  # the starts that these are of
    history_h: float
    zones: int
    nearest_h: float | None = None  # the nearest deadline that a strategy keeps, if none kept the job's
    unpaid: str | None = None  # why on-demand machines are left out
    rests_on: History | None = None  # of a plan's conduct

    @property
    def kept(self) -> Kept:
        outcomes = next((row.outcomes for row in self.rows if row.name == "planned"), None)
        if outcomes is None or not self.promises:
            return Kept(cost_usd=np.zeros(0), hours=np.zeros(0), finished=np.zeros(0, bool), promised=())
        enough = np.array([promise.enough for promise in self.promises])
        return Kept(
            cost_usd=outcomes.cost_usd[enough],
            hours=outcomes.hours[enough],
            finished=outcomes.finished[enough],
            promised=tuple(promise for promise in self.promises if promise.enough),
        )

    @property
    def coverage(self) -> float | None:
        return self.kept.coverage

    def to_json(self) -> dict[str, Any]:
        coverage = self.coverage
        return {
            "market": self.market,
            "machines": self.job.machines,
            "strategies": [row.to_json(self.job.deadline_h) for row in self.rows],
            "starts": len(self.starts_h),
            "coverage": coverage,
            "promise": self.kept.to_json(),
            "history": _history(self.history_h, self.zones, self.promises, coverage, self.rests_on),
        }


@dataclass(frozen=True, kw_only=True)
class Backtests:
    """The same job on several markets, and all of their starts together. Gangs may differ in size by market."""

    job: GangJob
    markets: tuple[Backtest, ...]
    notes: tuple[str, ...]
    left_out: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        kept = [market.kept for market in self.markets]
        everything = Kept(
            cost_usd=np.concatenate([k.cost_usd for k in kept]),
            hours=np.concatenate([k.hours for k in kept]),
            finished=np.concatenate([k.finished for k in kept]),
            promised=tuple(promise for k in kept for promise in k.promised),
        )
        coverage, rows = everything.coverage, self.joined()
        history_h, zones = min(m.history_h for m in self.markets), min(m.zones for m in self.markets)
        return {
            "strategies": [row.to_json(self.job.deadline_h) for row in rows],
            "starts": sum(len(m.starts_h) for m in self.markets),
            "coverage": coverage,
            "promise": everything.to_json(),
            "history": _history(
                history_h,
                zones,
                [p for m in self.markets for p in m.promises],
                coverage,
                self.markets[0].rests_on,
            ),
            "worse_than": worse_than(rows, self.job.deadline_h),
            "markets": [m.to_json() for m in self.markets],
            "notes": [*self.notes, *self._unpaid(), *self._late()],
            "left_out": dict(self.left_out),
        }

    def joined(self) -> list[Row]:
        """Return each strategy over all markets that have it. Regret is weighed by cost."""
        joined = []
        for name in self._names():
            found = [(m, row) for m in self.markets for row in m.rows if row.name == name]
            cost = np.concatenate([row.cost_usd for _, row in found])
            parts = [row.outcomes for _, row in found if row.outcomes is not None]
            if not parts:
                joined.append(Row(name=name, cost_usd=cost, outcomes=None, regret=0.0))
                continue
            bounded = [(row.cost_usd, row.outcomes.finished, m) for m, row in found if row.outcomes is not None]
            regret = regret_of(
                np.concatenate([usd[m.bounded] for usd, _, m in bounded]),
                np.concatenate([ended[m.bounded] for _, ended, m in bounded]),
                np.concatenate([m.bound_usd for _, _, m in bounded]),
            )
            joined.append(Row(name=name, cost_usd=cost, outcomes=Outcomes.joined(parts), regret=regret))
        return joined

    def _names(self) -> list[str]:
        """Return the strategies, in the order of the market that has most of them."""
        return [row.name for row in max(self.markets, key=lambda m: len(m.rows)).rows]

    def _unpaid(self) -> list[str]:
        return [f"{m.market}: on-demand is left out: {m.unpaid}" for m in self.markets if m.unpaid is not None]

    def _late(self) -> list[str]:
        return [
            f"{m.market}: no strategy keeps the deadline of {self.job.deadline_h:g} h with this confidence: "
            f"the nearest that can be kept is {format_hours_up(m.nearest_h)} h"
            for m in self.markets
            if m.nearest_h is not None
        ]


def _history(
    hours: float, zones: int, promises: Sequence[Promise], coverage: float | None, rests_on: History | None
) -> dict[str, Any]:
    """``known_hours`` is what plans knew of the market when they were made, in the median."""
    if rests_on is not None:
        assumed = str(rests_on) if rests_on.zones else rests_on.origin  # no zones: a plan without spot machines
        note = None if rests_on.enough else assumed
        return {"hours": hours, "zones": zones, "known_hours": None, "enough": rests_on.enough, "note": note}
    if not promises:  # nothing was promised, as ``planned`` was not asked for
        enough = hours >= LEAST_DAYS * 24 and zones >= LEAST_ZONES
        return {"hours": hours, "zones": zones, "known_hours": None, "enough": enough, "note": None}
    enough = coverage is not None
    known = float(np.median([promise.past_h for promise in promises]))
    note = None if enough else NOT_ENOUGH
    return {"hours": hours, "zones": zones, "known_hours": known, "enough": enough, "note": note}


def worse_than(rows: Sequence[Row], deadline_h: float | None) -> list[str]:
    """Say where the planned strategy loses: which others cost less, and how many deadlines these miss."""
    planned = next((row for row in rows if row.name == "planned"), None)
    if planned is None or planned.outcomes is None:
        return []
    found, own = [], float(planned.outcomes.missed(deadline_h).mean())
    for row in rows:
        if row.outcomes is None or row is planned or row.cost_usd.mean() >= planned.cost_usd.mean():
            continue
        missed = float(row.outcomes.missed(deadline_h).mean())
        late = f", and misses {missed:.0%} of the deadlines instead of {own:.0%}" if missed > own + _ALIKE else ""
        found.append(
            f"{row.name} is cheaper than planned on average{late}: "
            f"${row.cost_usd.mean():,.2f}, ${planned.cost_usd.mean():,.2f}"
        )
    return found
