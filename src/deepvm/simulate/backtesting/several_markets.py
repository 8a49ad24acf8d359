"""Backtests of one job on every market of a folder of traces, or on a market that is drawn from built-in figures."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepvm.errors import Infeasible, UsageError
from deepvm.market.builtin import builtin_history, builtin_market
from deepvm.market.history import PriceHistory
from deepvm.market.reference_prices import SPOT_SHARE, SPOT_SHARE_SOURCE
from deepvm.market.reference_prices import on_demand_usd as listed_usd
from deepvm.simulate.backtesting.one_market import backtest, check_starts, window_h
from deepvm.simulate.backtesting.result import Backtests
from deepvm.simulate.inputs.trace_sets import load_markets
from deepvm.simulate.job import GangJob
from deepvm.simulate.notices import counted_on
from deepvm.simulate.strategies import Rates
from deepvm.units import format_count

MOST_ZONES = 27
REGIONS = ("east", "west", "central")


def backtests(
    folder: Path,
    job: GangJob,
    *,
    meaning: str | None,
    starts: int = 300,
    spot_usd: float | None = None,
    on_demand_usd: float | None = None,
    prices: PriceHistory | None = None,
    budget_usd: float | None = None,
    fill_budget: bool = False,
    plan_prices: Collection[str] = (),
    rates: Rates | None = None,
    **settings: Any,
) -> Backtests:
    """Run ``backtest`` on every market of a folder of traces; the starts are shared out among them.

    ``prices`` are used where traces have none. With ``fill_budget``, each market's gang has as many machines as the
    budget pays there on its first day, instead of the job's. ``plan_prices`` says whether ``spot_usd`` ("spot") and
    ``on_demand_usd`` ("on-demand") are a plan's."""
    check_starts(starts)
    rates = rates or Rates()
    found = load_markets(
        folder, job, meaning=meaning, least_hours=window_h(job), spot_usd=spot_usd, on_demand=on_demand_usd,
        prices=prices, budget_usd=budget_usd if fill_budget else None, keeper_usd=_keeper_usd(rates, job),
        plan_prices=plan_prices,
    )  # fmt: skip
    share = max(1, round(starts / len(found.markets)))
    done, left_out = [], dict(found.left_out)
    for market, machines in zip(found.markets, found.machines, strict=True):
        gang = replace(job, machines=machines)
        try:
            done.append(backtest(market, gang, starts=share, rates=rates, budget_usd=budget_usd, **settings))
        except Infeasible as error:
            left_out[market.name] = str(error)
    if not done:
        raise Infeasible("; ".join(dict.fromkeys(left_out[market.name] for market in found.markets)))
    notes = (*found.notes, *counted_on(rates.notices, rates.notice_s))
    return Backtests(job=done[0].job, markets=tuple(done), notes=notes, left_out=left_out)


def simulate(
    job: GangJob,
    *,
    accelerator: str | None = None,
    zones: int = 5,
    days: float = 30.0,
    spot_usd: float | None = None,
    on_demand_usd: float | None = None,
    starts: int = 300,
    seed: int = 0,
    rates: Rates | None = None,
    **settings: Any,
) -> Backtests:
    """Run ``backtest`` on a market that is drawn from built-in figures of an accelerator."""
    if not 1 <= zones <= MOST_ZONES:
        raise UsageError(f"zones is {zones}: it must be from 1 to {MOST_ZONES}")
    names = [f"us-{REGIONS[z // 3 % len(REGIONS)]}-{1 + z // 9}{'abc'[z % 3]}" for z in range(zones)]
    usd = listed_usd(accelerator, 1, names[0]) if on_demand_usd is None else on_demand_usd
    if usd is None:
        raise UsageError(f"no on-demand price is known for {accelerator or 'the machines'}: give --on-demand-price")
    history = builtin_history(accelerator)
    market = builtin_market(
        accelerator, names, seed=seed, days=days, machines=max(job.machines, 16), on_demand_usd=usd,
        spot_usd=SPOT_SHARE * usd if spot_usd is None else spot_usd,
    )  # fmt: skip
    over = f"{format_count(zones, 'zone')}, {format_count(days, 'day')}"
    market = replace(market, name=f"a drawn market of {accelerator or 'spot machines'}, {over}")
    rates = rates or Rates()
    note = (
        f"market drawn from figures of {history.origin}, {history.days:.0f} days, {format_count(history.zones, 'zone')}"
    )
    assumed = (
        []
        if spot_usd is not None
        else [f"spot at {SPOT_SHARE:.0%} of the on-demand price, {SPOT_SHARE_SOURCE} (--spot-price)"]
    )
    return Backtests(
        job=job,
        markets=(backtest(market, job, starts=starts, seed=seed, rates=rates, **settings),),
        notes=(note, *assumed, *counted_on(rates.notices, rates.notice_s)),
        left_out={},
    )


def _keeper_usd(rates: Rates, job: GangJob) -> float:
    return rates.memory_nodes(job.checkpoint_bytes) * rates.memory_node_usd
