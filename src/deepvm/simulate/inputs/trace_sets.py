"""Folders of traces -> markets that a gang can be replayed on, and why others cannot."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from deepvm.errors import Infeasible, UsageError, listed
from deepvm.market.history import PriceHistory
from deepvm.market.market import Market, market_of
from deepvm.market.reference_prices import SPOT_SHARE, SPOT_SHARE_SOURCE, on_demand_usd
from deepvm.market.trace import Trace, load_traces
from deepvm.simulate.inputs.dated_prices import ZonePrices, zone_prices
from deepvm.simulate.job import GangJob

MOST_MACHINES = 255  # of a gang whose size a budget decides: the planner's own limit of one role


@dataclass(frozen=True, kw_only=True)
class TraceSets:
    """Markets by the folder of their traces, and how many machines a gang has in each.

    ``notes`` say what was assumed, ``left_out`` what could not be used."""

    markets: tuple[Market, ...]
    machines: tuple[int, ...]
    notes: tuple[str, ...]
    left_out: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class _Prices:
    """Where prices come from if the traces have none: a given one first."""

    spot_usd: float | None
    on_demand_usd: float | None
    history: PriceHistory | None
    of_plan: Collection[str]  # "spot" and "on-demand", where the given one is a plan's

    def spot(self) -> str:
        return f"spot at ${self.spot_usd:g}/h, {self._origin('spot')}"

    def on_demand(self) -> str:
        return f"on-demand at ${self.on_demand_usd:g}/h, {self._origin('on-demand')}"

    def _origin(self, side: str) -> str:
        return "the plan's price" if side in self.of_plan else "as given"


def load_markets(
    folder: Path,
    job: GangJob,
    *,
    meaning: str | None,
    least_hours: float,
    spot_usd: float | None = None,
    on_demand: float | None = None,
    prices: PriceHistory | None = None,
    budget_usd: float | None = None,
    keeper_usd: float = 0.0,
    plan_prices: Collection[str] = (),
) -> TraceSets:
    """Read every set below the folder that can show the job's gang for this long. Infeasible if none can; UsageError
    if all lack something that an option gives.

    With a budget, a gang has as many machines as it pays beside ``keeper_usd``."""
    found, notes, left_out = list[tuple[Market, int]](), dict[str, None](), dict[str, str]()
    unclear = True  # all sets lack something that an option gives
    given = _Prices(spot_usd=spot_usd, on_demand_usd=on_demand, history=prices, of_plan=plan_prices)
    for name, traces in load_traces(folder, meaning=meaning).items():
        groups = _by_accelerator(traces)
        for accelerator, alike in groups.items():
            title = name if len(groups) == 1 else f"{name} ({accelerator})"
            try:
                market, assumed = _market(title, alike, given)
                machines = job.machines if budget_usd is None else _paid_by(budget_usd - keeper_usd, market, alike)
                market, more = _sized(market, alike, machines)
                if market.hours <= least_hours:
                    raise Infeasible(f"it has {market.hours:.1f} h, more than {least_hours:g} h are needed")
            except (UsageError, Infeasible) as error:
                left_out[title] = str(error)
                unclear = unclear and isinstance(error, UsageError)
                continue
            found.append((market, machines))
            notes.update(dict.fromkeys([*assumed, *more]))
    if not found:
        reasons = listed([f"{name}: {why}" for name, why in left_out.items()], most=3)
        raise (UsageError if unclear else Infeasible)(f"no set of traces in {folder} can be replayed ({reasons})")
    return TraceSets(
        markets=tuple(market for market, _ in found),
        machines=tuple(machines for _, machines in found),
        notes=tuple(notes),
        left_out=left_out,
    )


def _by_accelerator(traces: Sequence[Trace]) -> dict[str, list[Trace]]:
    """Group by machine type: zones of different types are not one market."""
    found: dict[str, list[Trace]] = {}
    for trace in traces:
        found.setdefault(f"{trace.accelerator_count} × {trace.accelerator or '?'}", []).append(trace)
    return found


def _market(title: str, traces: Sequence[Trace], given: _Prices) -> tuple[Market, list[str]]:
    """Return the market with a price of every tick, and what was assumed of prices."""
    notes, on_demand, priced = dict[str, None](), dict[str, float](), list[Trace]()
    origins = dict[str, list[str]]()
    for trace in traces:
        dated = None if given.history is None else zone_prices(given.history, trace, title)
        usd, origin = _on_demand(trace, given, dated)
        origins.setdefault(origin, []).append(trace.zone)
        on_demand[trace.zone] = usd
        priced.append(trace)
        if trace.prices is None and given.spot_usd is not None:
            notes[f"{title}: {given.spot()}"] = None
            priced[-1] = replace(trace, prices=np.full(len(trace.up), given.spot_usd))
        elif trace.prices is None and dated is not None:
            notes[f"{title}: spot {dated.note}"] = None
            priced[-1] = replace(trace, prices=dated.spot)
        elif trace.prices is None:
            why = "" if given.history is None else ", as the price file has none for it"
            assumed = f"{SPOT_SHARE:.0%} of on-demand is assumed, {SPOT_SHARE_SOURCE}{why}"
            notes[f"{title} has no spot prices: {assumed} (--spot-price)"] = None
            priced[-1] = replace(trace, prices=np.full(len(trace.up), SPOT_SHARE * usd))
    what = title if given.history is not None else traces[0].accelerator or title
    for origin, zones in origins.items():
        where = "" if len(origins) == 1 else f" in {listed(zones, ', ')}"
        notes[origin if given.on_demand_usd is not None else f"{what}: {origin}{where}"] = None
    market = market_of(priced, name=title, on_demand_usd=on_demand)
    own = all(trace.prices is not None for trace in traces)
    if own and given.history is not None:
        notes[f"{title} has its own spot prices: those of the price file are not used"] = None
    return replace(market, priced=own), list(notes)


def _on_demand(trace: Trace, given: _Prices, dated: ZonePrices | None) -> tuple[float, str]:
    """Return the price of an on-demand machine, and where it is from."""
    if given.on_demand_usd is not None:
        return given.on_demand_usd, given.on_demand()
    if dated is not None and dated.on_demand_usd is not None:
        return dated.on_demand_usd, "on-demand prices of the price file"
    usd = on_demand_usd(trace.accelerator, trace.accelerator_count, trace.zone)
    if usd is not None:
        return usd, "on-demand at the list price (--on-demand-price replaces it)"
    if trace.prices is not None and np.nanmean(trace.prices) > 0:
        usd = float(np.nanmean(trace.prices)) / SPOT_SHARE
        return usd, f"on-demand at ${usd:.2f}/h, assumed from spot prices (--on-demand-price)"
    raise UsageError(f"no on-demand price is known for {trace.accelerator or trace.zone}: give --on-demand-price")


def _paid_by(budget_usd: float, market: Market, traces: Sequence[Trace]) -> int:
    """Return how many machines a budget pays in the cheapest zone on the first day, at most what the market had."""
    usd = market.first_day_usd
    if budget_usd < usd:
        raise Infeasible(f"one machine costs ${usd:.2f}/h, the budget leaves ${max(0.0, budget_usd):.2f}/h: raise it")
    paid = int(budget_usd / usd + 1e-9) if usd else MOST_MACHINES
    alone = all(trace.machines == 1 for trace in traces)
    return min(paid, MOST_MACHINES if alone else int(market.capacity.max()) or 1)


def _sized(market: Market, traces: Sequence[Trace], machines: int) -> tuple[Market, list[str]]:
    """Return the market for a gang of this size. Infeasible if it never has that number of machines."""
    notes = []
    if all(trace.machines == 1 for trace in traces) and machines > 1:
        notes.append(
            f"{market.name} shows one machine in each zone: a gang of {machines} counts as up when it is (machines "
            "come and go in bulk)"
        )
        market = replace(market, capacity=market.capacity * machines)
    most = int(market.capacity.max())
    if most < machines:
        raise Infeasible(
            f"it never has {machines} machines at once, at most {most}" if most else "it never has a machine"
        )
    return market, notes
