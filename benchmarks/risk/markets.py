"""A random market of H100 machines: a seed in; a catalogue, days to plan with and later days to judge by out."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from deepvm.catalog import Catalog, Instance, Prices
from deepvm.catalog import Market as Side
from deepvm.market.builtin import builtin_market
from deepvm.market.market import Market
from deepvm.market.trace import Trace, TraceKind
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

    def judge(self, trial: Trial) -> Judged:
        """Replay a trial on the later days."""
        assert trial.market is not None
        names = [column.zone for column in trial.market.columns]
        capacity = self.later.capacity[[self.later.zones.index(name or "") for name in names]]
        later: TypeMarket = replace(trial.market, capacity=capacity, machines=MACHINES)
        return Replays(lambda _: later, STARTS).judge(trial)


def random_market(seed: int) -> RandomMarket:
    chance = np.random.default_rng([seed, 20])
    usd = {zone: float(ON_DEMAND_USD * chance.uniform(*SPOT_SHARE)) for zone in ZONES}
    days = PLANNED_DAYS + LATER_DAYS
    market = builtin_market(
        "H100", ZONES, seed=seed, days=days, machines=MACHINES, spot_usd=usd, on_demand_usd=ON_DEMAND_USD
    )
    planned = round(market.ticks * PLANNED_DAYS / days)
    traces = tuple(
        Trace(
            zone=zone, machines=MACHINES, gap_s=market.tick_s, up=up, kind=TraceKind.LAUNCH, accelerator="H100"
        )
        for zone, up in zip(ZONES, market.between(0, planned).capacity, strict=True)
    )  # fmt: skip
    return RandomMarket(catalog=_catalog(usd), traces={"drawn": traces}, later=market.between(planned, market.ticks))


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
