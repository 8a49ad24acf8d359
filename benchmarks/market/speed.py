"""How long simulations take on one core, in CPU seconds: rows of a result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from benchmarks import Measurement, measurement
from deepvm.market import Market, builtin_market
from deepvm.policy.placement import CheapestUp, Stay
from deepvm.simulate import GangJob, Maker, Rates, SafetyNet, Strategy, replay, risk_of, risks_of

ZONES = tuple(f"us-{region}-1{zone}" for region in ("east", "west", "central") for zone in "abc")
RUNS = 1000


def market(days: float, zones: int) -> Market:
    """Nine zones with prices of their own, so that gangs move."""
    drawn = builtin_market("V100", ZONES[:zones], seed=1, days=days, spot_usd=1.0, on_demand_usd=3.06)
    dearer = 1 + 0.3 * np.random.default_rng(0).random((zones, 1))
    return replace(drawn, price=drawn.price * dearer)


def rows(rounds: int) -> Iterator[Measurement]:
    wide = market(45, 9)
    whole = GangJob(work_h=24.0 * 40, machines=8, checkpoint_bytes=6 * 10**9)  # most runs last to the market's end
    maker = Maker(job=whole, rates=Rates(), losses_per_h=0.3, on_demand_usd=3.06)
    moving = maker.tiering(CheapestUp())
    kinds: dict[str, tuple[Strategy, float]] = {
        "waiting": (maker.tiering(Stay(0)), 0.3),
        "moving": (moving, 0.3),
        "shrinking": (replace(moving, least=4), 2.0),
    }
    for kind, (strategy, below) in kinds.items():
        taken = cpu_s(lambda one=strategy: replay(wide, whole, one, np.zeros(RUNS)), rounds)  # type: ignore[misc]
        yield measurement(f"{RUNS:,} runs of 45 days on 9 zones, {kind}", taken, below=below, note="CPU time")
    month, day = market(30, 5), GangJob(work_h=24.0, machines=8, checkpoint_bytes=6 * 10**9, deadline_h=36.0)
    maker = replace(maker, job=day)
    one = maker.tiering(CheapestUp(), SafetyNet(tries=4))
    yield measurement(
        "risk of one plan, 200 starts", cpu_s(lambda: risk_of(month, day, one), rounds), below=0.05, note="CPU time"
    )
    many = candidates(maker)
    taken = cpu_s(lambda: list(risks_of(month, day, many)), max(1, rounds // 4))
    yield measurement(f"risk of {len(many)} candidates, 200 starts each", taken, below=5.0, note="CPU time")


def candidates(maker: Maker) -> list[Strategy]:
    return [
        replace(tier(CheapestUp(ceiling=ceiling, way_back=way_back), SafetyNet(tries=tries)), least=least)
        for ceiling in (1.5, 2.0, 3.0, 5.0, 10.0)
        for way_back in (None, 0.6, 0.7, 0.8, 0.9)
        for tier in (maker.tiering, maker.durable)
        for tries in (0, 4)
        for least in (None, 2, 4, 6, 7)
    ]


def cpu_s(work: Callable[[], object], runs: int) -> list[float]:
    """CPU time of each run; the first, which fills caches, is not counted."""
    work()
    taken = []
    for _ in range(runs):
        start = time.process_time()
        work()
        taken.append(time.process_time() - start)
    return taken
