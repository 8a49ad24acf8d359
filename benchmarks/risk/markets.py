"""Random markets of H100 machines: a seed in; a catalogue, days to plan with and later days to judge by out.

How machines come and go is drawn from the built-in hazards, or is that of recorded zones. Prices are always drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from deepvm.catalog import Catalog, Instance, Prices
from deepvm.catalog import Market as Side
from deepvm.market.builtin import builtin_market
from deepvm.market.market import Market
from deepvm.market.trace import Trace, TraceKind, load_traces
from deepvm.plan.risk.replays import Judged, Replays
from deepvm.plan.risk.spot import TypeMarket
from deepvm.plan.risk.trial import Trial

ZONES = ("us-east-1a", "us-east-1b", "us-west-2a", "us-west-2b")
ON_DEMAND_USD = 6.88  # p5.4xlarge, us-east-1, 2026-08-22
SPOT_SHARE = (0.25, 0.6)  # of that, by zone: the dearest is 2.4 times the cheapest at most
PLANNED_DAYS, LATER_DAYS = 14.0, 28.0
MACHINES = 16
STARTS = 300
_DAY = 739_850  # an ordinal; ages play no part


@dataclass(frozen=True, kw_only=True)
class RandomMarket:
    catalog: Catalog
    traces: dict[str, tuple[Trace, ...]]
    later: Market

    def judge(self, trial: Trial, *, lost: bool = True) -> Judged:
        """Replay a trial on the later days; ``lost=False`` as if no machine were ever lost."""
        assert trial.market is not None
        names = [column.zone for column in trial.market.columns]
        capacity = self.later.capacity[[self.later.zones.index(name or "") for name in names]]
        later: TypeMarket = replace(trial.market, capacity=capacity, machines=MACHINES)
        return Replays(lambda _: later if lost else later.always_up(), STARTS).judge(trial)


def drawn_market(seed: int) -> RandomMarket:
    """Draw four zones in two regions from the built-in hazards of H100 machines."""
    chance = np.random.default_rng([seed, 20])
    usd = _prices(chance)
    days = PLANNED_DAYS + LATER_DAYS
    market = builtin_market(
        "H100", ZONES, seed=seed, days=days, machines=MACHINES, spot_usd=usd, on_demand_usd=ON_DEMAND_USD
    )
    return _cut(market, usd, round(market.ticks * PLANNED_DAYS / days))


def recorded_zones(folder: Path, meaning: str) -> list[Trace]:
    """Return the H100 zones with enough machines of all sets below a folder, cut to the time that all of them have."""
    traces = [trace for found in load_traces(folder, meaning=meaning).values() for trace in found]
    kept = [trace for trace in traces if (trace.accelerator or "").upper() == "H100" and trace.machines >= MACHINES]
    ticks = min((len(trace.up) for trace in kept), default=0)
    return [replace(trace, up=trace.up[:ticks], prices=None) for trace in kept]


def recorded_market(zones: Sequence[Trace], seed: int) -> RandomMarket:
    """Choose four recorded zones, and draw their prices: the first half to plan with, the second to judge by."""
    chance = np.random.default_rng([seed, 21])
    usd = _prices(chance)
    chosen = [zones[i] for i in chance.choice(len(zones), len(ZONES), replace=False)]
    capacity = np.stack([trace.up for trace in chosen])
    market = Market(
        zones=ZONES, tick_s=chosen[0].gap_s, capacity=capacity,
        price=np.repeat(np.array([[usd[zone]] for zone in ZONES]), capacity.shape[1], axis=1),
        on_demand_usd=np.full(len(ZONES), ON_DEMAND_USD),
    )  # fmt: skip
    return _cut(market, usd, market.ticks // 2)


def _prices(chance: np.random.Generator) -> dict[str, float]:
    return {zone: float(ON_DEMAND_USD * chance.uniform(*SPOT_SHARE)) for zone in ZONES}


def _cut(market: Market, usd: dict[str, float], planned: int) -> RandomMarket:
    traces = tuple(
        Trace(
            zone=zone, machines=MACHINES, gap_s=market.tick_s, up=up, kind=TraceKind.LAUNCH, accelerator="H100"
        )
        for zone, up in zip(market.zones, market.between(0, planned).capacity, strict=True)
    )  # fmt: skip
    return RandomMarket(catalog=_catalog(usd), traces={"random": traces}, later=market.between(planned, market.ticks))


def _catalog(usd: dict[str, float]) -> Catalog:
    worker = Instance(
        name="h100", family="P", vcpus=16, memory_gib=256.0, accelerator="H100", accelerator_count=1,
        accelerator_memory_gib=80.0, eflops=4758.0, sustained_gbps=25.0,
    )  # fmt: skip
    node = Instance(name="node", family="C", vcpus=4, memory_gib=32.0, sustained_gbps=12.5)
    at = range(len(ZONES))
    spot = [(0, p, usd[ZONES[p]], _DAY) for p in at]
    on_demand = [(0, p, ON_DEMAND_USD, _DAY) for p in at] + [(1, p, 0.25, _DAY) for p in at]
    return Catalog(
        name="random", provider="aws", description="", instances=(worker, node),
        places=tuple((zone[:-1], zone) for zone in ZONES),
        prices={Side.SPOT: Prices.from_rows(spot), Side.ON_DEMAND: Prices.from_rows(on_demand)},
    )  # fmt: skip
