"""Folders of traces -> markets that a gang can be replayed on, and why others cannot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deepvm.errors import UsageError
from deepvm.market.market import Market, market_of
from deepvm.market.reference_prices import SPOT_SHARE, on_demand_usd
from deepvm.market.trace import Meaning, Trace, load_traces


@dataclass(frozen=True, kw_only=True)
class TraceSets:
    """Markets by the folder of their traces. ``notes`` say what was assumed, ``left_out`` what could not be used."""

    markets: tuple[Market, ...]
    notes: tuple[str, ...]
    left_out: Mapping[str, str]


def load_markets(
    folder: Path,
    *,
    meaning: Meaning,
    machines: int,
    least_hours: float,
    spot_usd: float | None = None,
    on_demand: float | None = None,
) -> TraceSets:
    """Read every set below the folder that can show a gang of this size for this long. UsageError if none can."""
    markets, notes, left_out = list[Market](), dict[str, None](), dict[str, str]()
    for name, traces in load_traces(folder, meaning=meaning).items():
        for accelerator, alike in _by_accelerator(traces).items():
            title = name if len(_by_accelerator(traces)) == 1 else f"{name} ({accelerator})"
            try:
                market, assumed = _market(title, alike, machines, spot_usd, on_demand)
                if market.hours <= least_hours:
                    raise UsageError(f"it has {market.hours:.1f} h, more than {least_hours:g} h are needed")
            except UsageError as error:
                left_out[title] = str(error)
                continue
            markets.append(market)
            notes.update(dict.fromkeys(assumed))
    if not markets:
        reasons = "; ".join(f"{name}: {why}" for name, why in list(left_out.items())[:3])
        raise UsageError(f"no set of traces in {folder} can be replayed ({reasons})")
    return TraceSets(markets=tuple(markets), notes=tuple(notes), left_out=left_out)


def _by_accelerator(traces: Sequence[Trace]) -> dict[str, list[Trace]]:
    """Group by machine type: zones of different types are not one market."""
    found: dict[str, list[Trace]] = {}
    for trace in traces:
        found.setdefault(f"{trace.accelerator_count} × {trace.accelerator or '?'}", []).append(trace)
    return found


def _market(
    title: str, traces: Sequence[Trace], machines: int, spot_usd: float | None, given_usd: float | None
) -> tuple[Market, list[str]]:
    notes, on_demand, spot = [], {}, {}
    for trace in traces:
        usd = given_usd
        if usd is None:
            usd = on_demand_usd(trace.accelerator, trace.accelerator_count, trace.zone)
            notes.append(f"{trace.accelerator}: on-demand at the list price; --on-demand-price replaces it")
        if usd is None:
            raise UsageError(f"no on-demand price is known for {trace.accelerator}: give --on-demand-price")
        on_demand[trace.zone] = usd
        if trace.prices is None and spot_usd is None:
            notes.append(f"{title} has no spot prices: {SPOT_SHARE:.0%} of on-demand is assumed (--spot-price)")
        spot[trace.zone] = SPOT_SHARE * usd if spot_usd is None else spot_usd
    market = market_of(traces, name=title, on_demand_usd=on_demand, spot_usd=spot)
    if all(trace.machines == 1 for trace in traces) and machines > 1:
        notes.append(
            f"{title} shows one machine in each zone: a gang of {machines} counts as up when it is (machines come and "
            "go in bulk)"
        )
        market = replace(market, capacity=market.capacity * machines)
    if market.capacity.max() < machines:
        most = int(market.capacity.max())
        raise UsageError(f"it never has {machines} machines at once, at most {most}")
    return market, notes
