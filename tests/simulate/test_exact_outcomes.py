"""Every figure of replays, backtests and promises on small markets."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepvm.errors import UsageError
from deepvm.market.market import Market
from deepvm.policy.fallback import SafetyNet, UniformProgress
from deepvm.policy.placement import CheapestUp, Stay
from deepvm.simulate import GangJob, Rates, backtest, backtests, replay, risk_of, simulate
from deepvm.simulate.backtesting.result import Kept
from deepvm.simulate.by_age import age_waste, intervals_by_age, policy_by_age
from deepvm.simulate.choice import Promise, candidates, choose, weighted_quantile
from deepvm.simulate.oracle import lower_bound_usd
from deepvm.simulate.outcome import Outcomes, spread
from deepvm.simulate.saves import FixedInterval, IntervalsByAge, NeverSave
from deepvm.simulate.strategies import NAMES, Maker
from deepvm.simulate.strategy import Strategy
from tests.simulate.test_by_age import LAW, zones
from tests.support.documents import assert_document
from tests.support.simulate.markets import bulk_market, write_traces

DOCUMENTS = Path(__file__).with_name("documents")
JOB = GangJob(work_h=12.0, machines=8, checkpoint_bytes=6 * 10**9, deadline_h=18.0)
SAVES = FixedInterval(interval_h=0.31, stall_h=0.013, remote_h=0.007)


def market_of(*rows: str, usd: tuple[float, ...] = (1.0, 1.5, 0.8), tick_s: float = 3600.0) -> Market:
    """A market of machines by tick, as digits; the last tick repeats a hundred times."""
    capacity = np.array([[*map(int, row), *[int(row[-1])] * 100] for row in rows], np.int32)
    return Market(
        zones=tuple(f"us-east-1{'abc'[i]}" for i in range(len(rows))),
        tick_s=tick_s,
        capacity=capacity,
        price=np.array(usd[: len(rows)])[:, None] * np.linspace(1.0, 1.4, capacity.shape[1]),
        on_demand_usd=np.full(len(rows), 3.0),
    )


def columns(found: Outcomes) -> dict[str, list[Any]]:
    return {field.name: getattr(found, field.name).tolist() for field in fields(found)}


MARKET = market_of(
    "44440004444422220000444444440000", "00444444400000044444444440002222", "22222200002222222222000000444444"
)
WAYS: dict[str, dict[str, Any]] = {
    "stays": {"placement": Stay(1)},
    "moves": {"placement": CheapestUp(way_back=0.9)},
    "shrinks": {"placement": CheapestUp(ceiling=2.0), "least": 2, "speed": (0.0, 0.3, 0.55, 0.8, 1.0)},
    "never saves": {"saves": NeverSave(), "placement": Stay(0)},
    "net": {"placement": CheapestUp(), "fallback": SafetyNet()},
    "tries": {"placement": Stay(0), "fallback": SafetyNet(tries=2)},
    "line": {"placement": CheapestUp(most_usd=1.3), "fallback": UniformProgress()},
    "few on demand": {"placement": Stay(0), "fallback": SafetyNet(tries=1), "on_demand_machines": 3},
    "anchor": {"placement": Stay(0), "spot_machines": 2, "keeper_usd": 3.0},
    "on demand": {"on_demand_only": True, "fallback": SafetyNet()},
}


def test_replays_of_every_way_to_run_have_these_outcomes() -> None:
    job = GangJob(work_h=9.0, machines=4, checkpoint_bytes=50 * 10**9, deadline_h=21.0)
    document = {}
    for name, way in WAYS.items():
        usual = {
            "saves": SAVES,
            "start_h": 0.05,
            "restore_h": 0.02,
            "move_h": 0.03,
            "regroup_h": 0.01,
            "keeper_usd": 0.2,
        }
        strategy = Strategy(name=name, **{**usual, **way})
        found = replay(MARKET, job, strategy, [0.0, 0.4, 2.0, 5.5, 11.0, 14.25, 128.0])
        document[name] = {"margin_h": strategy.margin_h, **columns(found)}
    assert_document(document, DOCUMENTS / "replays.json")


def test_work_that_ends_within_an_instant_of_a_loss_is_done() -> None:
    market, job = market_of("10"), GangJob(work_h=1e-9, machines=1)
    found = replay(market, job, Strategy(name="x", start_h=1.0), 0.0)
    assert found.finished.tolist() == [True]
    assert found.hours[0] == pytest.approx(1.0)


def test_a_backtest_has_these_figures_and_says_what_it_does() -> None:
    said: list[tuple[str, int, int]] = []
    result = backtest(
        bulk_market(5, zones=3, days=14), JOB, starts=9, seed=3, after_h=240.0, confidence=0.9,
        progress=lambda *words: said.append(words),
    )  # fmt: skip
    assert said == [("oracle", 0, 9), *((name, at, 9) for at, name in enumerate(NAMES))]
    rows = {row.name: columns(row.outcomes) for row in result.rows if row.outcomes is not None}
    totals = {name: {column: math.fsum(values) for column, values in row.items()} for name, row in rows.items()}
    promises = [[p.strategy.name, p.mean_usd, p.mean_h, p.most_usd, p.most_h, p.past_h] for p in result.promises]
    document = {**result.to_json(), "totals": totals, "promises": promises, "bound": result.bound_usd.tolist()}
    assert_document(document, DOCUMENTS / "backtest.json")


def test_a_backtest_of_a_folder_within_a_budget_has_these_figures(tmp_path: Path) -> None:
    job = replace(JOB, deadline_h=12.5, usd_per_hour_of_waiting=0.5)
    found = backtests(
        write_traces(tmp_path), job, meaning="up", starts=6, seed=2, budget_usd=15.0,
        strategies=("durable", "tiering", "uniform-progress", "planned", "oracle"),
    )  # fmt: skip
    assert_document(found.to_json(), DOCUMENTS / "budget.json")


def test_a_drawn_market_has_these_figures() -> None:
    found = simulate(JOB, accelerator="V100", starts=5, days=12, strategies=("on-demand", "tiering+move"))
    assert_document(found.to_json(), DOCUMENTS / "drawn.json")


def test_a_risk_has_these_figures() -> None:
    moving = Strategy(name="moving", saves=SAVES, placement=CheapestUp(), fallback=SafetyNet(tries=1))
    risks = [risk_of(MARKET, replace(JOB, machines=4, deadline_h=due), moving, starts=30) for due in (15.0, None)]
    assert_document(
        [{**risk.to_json(), "means": [risk.mean_usd, risk.mean_h, risk.missed]} for risk in risks],
        DOCUMENTS / "risk.json",
    )


def test_a_bound_has_these_dollars() -> None:
    job = GangJob(work_h=9.0, machines=4, deadline_h=21.0, usd_per_hour_of_waiting=0.25)
    bounds = [lower_bound_usd(MARKET, job, [0.0, 5.5, 14.0, 120.0], start_h=start_h) for start_h in (0.0, 0.05, 2.0)]
    assert_document([found.tolist() for found in bounds], DOCUMENTS / "bound.json")
    with pytest.raises(UsageError, match="a lower bound needs a window"):
        lower_bound_usd(MARKET, replace(job, deadline_h=None), 0.0)
    wider = lower_bound_usd(MARKET, replace(job, deadline_h=None), 0.0, window_h=21.0)
    assert wider == pytest.approx(bounds[0][0])


def maker(**more: Any) -> Maker:
    return Maker(job=JOB, rates=Rates(), losses_per_h=0.2, on_demand_usd=3.0, **more)


def strategy_figures(one: Strategy) -> list[Any]:
    saves = one.saves
    intervals = [saves.interval_h, saves.stall_h, saves.remote_h] if isinstance(saves, FixedInterval) else [str(saves)]
    figures = [one.keeper_usd, one.start_h, one.restore_h, one.move_h, one.regroup_h, one.margin_h]
    return [
        one.name, *intervals, repr(one.placement), repr(one.fallback), one.spot_machines, one.least,
        one.on_demand_only, one.on_demand_machines, *figures,
    ]  # fmt: skip


def test_strategies_have_these_overheads() -> None:
    makers = (maker(), maker(budget_usd=20.0), maker(budget_usd=2.0))
    named = [[strategy_figures(one.named(name, 1)) for name in NAMES if name != "oracle"] for one in makers]
    tried = [strategy_figures(one) for one in candidates(maker())]
    assert_document({"named": named, "candidates": tried}, DOCUMENTS / "strategies.json")
    assert [Rates().memory_nodes(size) for size in (0, 10**9, 3 * 10**9, 3 * 10**9 + 1)] == [1, 1, 1, 2]
    assert not [one for one in candidates(replace(maker(), job=replace(JOB, machines=1))) if one.least is not None]


def promise(most_usd: float, most_h: float) -> Promise:
    return Promise(
        strategy=Strategy(name="x"), past_h=48.0, mean_usd=most_usd / 2, mean_h=most_h / 2, most_usd=most_usd,
        most_h=most_h, confidence=0.95, enough=True,
    )  # fmt: skip


def test_a_promise_is_kept_up_to_its_limits_in_both_figures() -> None:
    usd, hours = np.array([1.0, 2.0, 2.1, 1.9]), np.array([3.0, 4.0, 4.0, 4.1])
    promised = (promise(1.0, 3.0), *(promise(2.0, 4.0),) * 3)
    kept = Kept(cost_usd=usd, hours=hours, finished=np.ones(4, bool), promised=promised)
    assert kept.coverage == 0.5
    assert replace(kept, finished=np.array([True, False, True, True])).coverage == 0.25, "a run that never ended"
    assert kept.to_json() == {
        "starts": 4,
        "confidence": 0.95,
        "cost_usd": {
            "promised_mean": 0.875,
            "real_mean": 1.75,
            "promised_most": 1.75,
            "real_p95": pytest.approx(2.085),
        },
        "hours": {"promised_mean": 1.875, "real_mean": 3.775, "promised_most": 3.75, "real_p95": pytest.approx(4.085)},
    }
    nothing = Kept(cost_usd=usd[:0], hours=hours[:0], finished=np.zeros(0, bool), promised=())
    assert (nothing.coverage, nothing.to_json()) == (None, None)


def test_a_choice_promises_this() -> None:
    past = bulk_market(5, zones=3, days=9)
    job = replace(JOB, usd_per_hour_of_waiting=1.0)
    found = choose(past, replace(maker(), job=job), confidence=0.9)
    figures = [found.past_h, found.mean_usd, found.mean_h, found.most_usd, found.most_h, found.confidence, found.enough]
    assert_document([*strategy_figures(found.strategy), *figures], DOCUMENTS / "choice.json")
    short = choose(past.between(0, 143), maker(), confidence=0.9)
    assert (short.strategy, short.past_h, short.enough) == (maker().named("planned"), pytest.approx(143 / 6), False)
    assert math.isnan(short.most_usd)
    assert choose(None, maker(), confidence=0.9).past_h == 0.0


def test_without_a_deadline_runs_that_never_end_are_chosen_last() -> None:
    capacity = np.full((2, 2000), 8, np.int32)
    capacity[1, :1900] = capacity[1, 1930:] = 0
    price = np.array([[1.0], [0.1]]) * np.ones(2000)
    past = Market(zones=("a", "b"), tick_s=3600, capacity=capacity, price=price, on_demand_usd=np.full(2, 3.0))
    sure, cheap = (
        Strategy(name=name, saves=SAVES, placement=Stay(zone)) for zone, name in enumerate(("sure", "cheap"))
    )
    job = GangJob(work_h=40.0, machines=8)
    found = choose(past, replace(maker(), job=job), confidence=0.1, tried=(sure, cheap))
    assert found.strategy is sure, "from the last starts, the cheap zone is up for 30 h alone"


def test_a_mean_of_equal_figures_is_that_figure() -> None:
    assert spread(np.full(300, 61.958828296019554))["mean"] == 61.958828296019554


def test_a_weighted_quantile_is_the_value_that_the_share_does_not_exceed() -> None:
    values, weights = np.array([3.0, 1.0, 2.0]), np.array([1.0, 1.0, 2.0])
    found = [weighted_quantile(values, weights, share) for share in (0.0, 0.25, 0.26, 0.75, 0.76, 1.0)]
    assert found == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]


def test_saves_by_age_have_these_times() -> None:
    saves = IntervalsByAge(interval_h=np.array([0.5, 1.0, 2.0]), stall_h=0.1, remote_h=0.05)
    at = np.array([-1.0, 0.0, 0.3, 0.55, 0.6, 0.65, 1.0, 1.65, 1.7, 1.75, 3.0, 3.8, 3.85, 5.0, 5.9, 5.95, 9.0])
    document = {
        "trained": saves.trained(at).tolist(),
        "safe": saves.safe(at).tolist(),
        "needed": saves.needed(np.array([0.0, 0.3, 0.5, 0.51, 1.5, 1.6, 3.5, 3.6, 5.5, 5.6])).tolist(),
        "worst": saves.worst_loss_h,
        "fixed": [SAVES.trained(at).tolist(), SAVES.safe(at).tolist(), SAVES.needed(at).tolist(), SAVES.worst_loss_h],
    }
    assert_document(document, DOCUMENTS / "saves.json")
    never = NeverSave()
    assert (never.trained([-1.0, 2.0]).tolist(), never.safe([1.0, 2.0]).tolist()) == ([0.0, 2.0], [0.0, 0.0])
    assert (float(never.needed(3.0)), never.worst_loss_h) == (3.0, math.inf)


def test_intervals_by_age_and_what_they_waste_are_these() -> None:
    saves = intervals_by_age(policy_by_age(LAW.up, least_s=5.0), stall_s=2.0, remote_s=3.0)
    waste = age_waste(zones(2, 2000), 1, 5.0, half_life_h=40.0)
    document = {
        "intervals_s": (saves.interval_h * 3600).tolist()[:20],
        "count": len(saves.interval_h),
        "stalls_h": [saves.stall_h, saves.remote_h],
        "waste": [waste.stall_s, waste.young_daly_h, waste.by_age_h, waste.saved],
    }
    assert_document(document, DOCUMENTS / "by-age.json")
