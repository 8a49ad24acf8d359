"""Plans under a spot market: what they promise, how they are run, and the laws they obey."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import date

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepvm import plan as planning
from deepvm.catalog import Market, library
from deepvm.errors import Infeasible, UsageError
from deepvm.plan import Request, planner
from deepvm.plan.request import MARKET_ARCHITECTURES, PAPER_ARCHITECTURES
from deepvm.plan.risk.overheads import RATES
from deepvm.plan.risk.reasons import price_age_effect
from deepvm.plan.risk.replays import longest_h
from deepvm.policy import parse_policy
from deepvm.simulate import GangJob
from deepvm.units import format_usd
from tests.support.market_plans import DUE_S, WORK, request, small, traces


def test_without_preemption_a_plan_takes_the_planners_time_its_start_and_its_saves() -> None:
    plan = planning.plan(small(), request(gpu="V100"), traces=traces([16] * 2000))
    best = plan.recommendations[0]
    assert best.expected is not None
    assert best.conduct is not None
    outcomes = best.expected.risk.outcomes
    undisturbed_h = WORK / best.performance
    saves = best.expected.risk.strategy.saves
    assert outcomes.hours == pytest.approx(RATES.start_s / 3600 + float(saves.needed(undisturbed_h)), abs=1e-12)
    assert best.expected.missed == 0
    assert outcomes.lost_h.max() == 0
    assert outcomes.moves.max() == 0


@pytest.mark.parametrize("objective", ["cost", "time", "throughput"])
def test_a_recommendation_says_what_to_expect_and_how_it_is_run(objective: str) -> None:
    plan = planning.plan(small(), request(objective=objective, deadline_s=DUE_S))
    document = json.loads(json.dumps(plan.to_json(), allow_nan=False))
    for best in (*document["recommendations"], *document["failover"]):
        expected, conduct = best["expected"], best["conduct"]
        assert set(expected["cost_usd"]) == set(expected["hours"]) == {"mean", "p5", "p50", "p95"}
        assert 0 <= expected["missed"] <= 1
        assert {"lost_hours", "moves", "history"} <= set(expected)
        assert conduct["zones"]
        assert conduct["at_loss"] in ("wait", "shrink")
        assert 1 <= conduct["least_workers"] <= best["nodes"]
        assert conduct["tier"] in ("memory", "durable", "anchor")
        assert conduct["fallback"] in ("none", "on-demand at the last moment")
        parse_policy(conduct["save"])
    first = document["recommendations"][0]
    assert first["expected"]["missed"] <= 0.05
    value = first["objective"]["value"]
    by_objective = {
        "time": first["expected"]["hours"]["mean"], "throughput": first["performance"],
        "cost": first["expected"]["cost_usd"]["mean"],
    }  # fmt: skip
    assert value == pytest.approx(by_objective[objective])


def test_the_failover_differs_from_the_first_in_type_or_place() -> None:
    zonal = small(places=(("r-1", "r-1a"), ("r-1", "r-1b"), ("r-2", "r-2a")))
    for plan in (
        planning.plan(zonal, request(deadline_s=DUE_S)),
        planning.plan(zonal, Request(budget_usd=4.0, max_nodes=4)),
    ):
        best = plan.recommendations[0].worker
        places = [(r.worker.instance, r.worker.region, r.worker.zone) for r in plan.failover]
        assert places
        assert (best.instance, best.region, best.zone) not in places
        assert len(set(places)) == len(places)
        assert [r.rank for r in plan.failover] == list(range(1, len(places) + 1))


def test_a_plan_without_a_market_is_as_before() -> None:
    still = request(market="none")
    best = planning.plan(small(), still).recommendations[0]
    assert best.objective_value == pytest.approx(WORK / best.performance * best.hourly_usd)
    document = planning.plan(small(), still).to_json()
    assert "expected" not in document["recommendations"][0]
    assert "conduct" not in document["recommendations"][0]


def test_the_papers_catalogues_and_its_objective_have_no_market() -> None:
    paper = library.load("paper-aws-2023")
    assert not request().under_market(paper)
    assert request(market="built-in").under_market(paper)
    assert not request(objective="flopp").under_market(small())
    assert not request(policy="cost-first").under_market(small())
    assert not Request(budget_usd=3).under_market(small())


def test_architectures_that_are_given_are_the_only_ones_and_all_are_tried_otherwise() -> None:
    given = ("tiering", "single-anchor")
    for asked, allowed in ((None, MARKET_ARCHITECTURES), (given, given), (("all-spot",), ("all-spot",))):
        plan = planning.plan(small(), request(architectures=asked, max_nodes=2))
        assert {best.architecture for best in plan.architectures} <= set(allowed)
        assert plan.to_json()["request"]["architectures"] == list(allowed)
        first = planner.first(small(), request(architectures=asked, max_nodes=2))
        assert first is not None
        assert first.architecture in allowed
    still = planning.plan(small(), request(market="none"))
    assert still.to_json()["request"]["architectures"] == list(PAPER_ARCHITECTURES)


def test_the_front_of_a_market_has_its_architectures_and_sweeps_those_without_one() -> None:
    wanted = request(objective="time", budget_usd=1.0)
    plan, front = planning.plan(small(), wanted), planning.pareto(small(), wanted)
    assert {best.architecture for best in front} - set(PAPER_ARCHITECTURES)
    assert max(best.performance for best in front) >= plan.recommendations[0].performance
    (point,) = planning.sweep(small(), wanted, [1.0], ["deepvm"])
    assert point.architecture in PAPER_ARCHITECTURES


@pytest.mark.parametrize("over", [0.7, 1.01])
def test_a_deadline_that_nothing_keeps_names_the_nearest_and_that_one_is_kept(over: float) -> None:
    """Too short for any machines, and too short for the market alone."""
    fastest = planning.plan(small(), request(objective="time", market="none")).recommendations[0]
    asked = request(deadline_s=over * fastest.objective_value * 3600)
    with pytest.raises(Infeasible, match="the nearest that can be kept is") as caught:
        planning.plan(small(), asked)
    nearest_h = float(str(caught.value).split("can be kept is ")[1].split("h")[0])
    kept = planning.plan(small(), replace(asked, deadline_s=nearest_h * 3600)).recommendations[0]
    assert kept.expected is not None
    assert kept.expected.missed <= 0.05 + 1e-9


def test_a_market_with_no_machine_leaves_on_demand_machines_or_says_so() -> None:
    nothing = traces([0] * 500)
    best = planning.plan(small(), request(gpu="V100"), traces=nothing).recommendations[0]
    assert best.architecture == "all-on-demand"
    with pytest.raises(Infeasible, match=r"this spot market.* add --architecture all-on-demand,"):
        planning.plan(small(), request(gpu="V100", architectures=("tiering",)), traces=nothing)


def test_advice_for_work_that_never_ends_names_only_what_was_not_tried() -> None:
    with pytest.raises(Infeasible, match="raise --budget, or allow more types or places"):
        planning.plan(small(), request(work_eflops_h=1e9))


def test_a_market_that_is_always_lost_makes_the_deadline_a_matter_of_on_demand_machines() -> None:
    often = traces([16, 16, 16, 0] * 400)
    best = planning.plan(small(), request(gpu="V100", deadline_s=DUE_S), traces=often).recommendations[0]
    assert best.expected is not None
    assert best.conduct is not None
    assert best.expected.missed <= 0.05
    assert best.conduct.fallback == "on-demand at the last moment" or best.architecture == "all-on-demand"


def test_the_fallback_never_breaks_the_budget() -> None:
    plan = planning.plan(small(), request(budget_usd=1.5, deadline_s=30 * 3600.0))
    for best in plan.recommendations:
        assert best.conduct is not None
        if best.conduct.fallback != "none":
            on_demand = {"slow": 1.0, "fast": 3.0}[best.worker.instance]
            spot = sum(r.count for r in best.roles if r.market is Market.SPOT)
            others = sum(r.count * r.usd_per_hour for r in best.roles if r.market is not Market.SPOT)
            assert spot * on_demand + others <= 1.5 + 1e-6


def test_waiting_priced_buys_machines_and_cost_alone_says_that_it_does_not() -> None:
    alone = planning.plan(small(), request(gpu="V100"))
    assert "--deadline" in " ".join(alone.advice)
    priced = planning.plan(small(), request(gpu="V100", usd_per_hour_of_waiting=20.0))
    assert priced.recommendations[0].nodes > alone.recommendations[0].nodes
    assert not any("--deadline" in line for line in priced.advice)


def test_a_slow_plan_names_a_faster_one_that_costs_little_more_also_before_a_deadline() -> None:
    for deadline_s in (None, 400 * 3600.0):
        found = planning.plan(small(), request(deadline_s=deadline_s, budget_usd=20.0, max_nodes=8))
        slow = found.recommendations[0].expected
        assert slow is not None
        line = next(line for line in found.advice if "cost alone favours few machines" in line)
        hours, usd = re.search(r": ([\d.]+)h would cost \$([\d.]+) instead", line).groups()  # type: ignore[union-attr]
        assert float(hours) <= slow.hours / 2
        assert slow.cost_usd <= float(usd) <= 1.5 * slow.cost_usd
        assert ("--deadline" in line) == (deadline_s is None)


def test_the_runner_up_is_the_best_of_another_type_and_what_is_too_little_buys_nothing() -> None:
    catalog, wanted = small(), request(budget_usd=2.0)
    found = planning.plan(catalog, wanted)
    why = planning.explain(catalog, found, date(2026, 8, 30))
    other = next((r for r in (*found.recommendations, *found.failover) if r.worker.instance != "slow"), None)
    assert (why.runner_up is None) == (other is None)
    assert why.dollar_more_gain is None or why.dollar_more_gain == 0 or why.dollar_more_gain > 0.02
    if all(role.role == "worker" for role in found.recommendations[0].roles):
        assert not any("memory and network" in each for each in why.binding)


@pytest.mark.parametrize(("budget_usd", "due_s"), [(0.7, None), (1.3, None), (1.3, DUE_S)])
def test_the_next_better_budget_is_the_smallest_that_buys_more(budget_usd: float, due_s: float | None) -> None:
    wanted = request(objective="time", budget_usd=budget_usd, deadline_s=due_s, max_nodes=8)
    why = planning.explain(small(), planning.plan(small(), wanted), date(2026, 8, 30))

    def hours(usd: float) -> float:
        found = planner.first(small(), replace(wanted, budget_usd=usd))
        assert found is not None
        return found.objective_value

    next_usd = why.next_better_usd
    assert next_usd is not None
    assert budget_usd < next_usd < 2 * budget_usd
    assert hours(next_usd) < hours(budget_usd) / 1.02
    assert hours(next_usd - 0.01) >= hours(budget_usd) / 1.021
    assert f"budget (the next better cluster costs {format_usd(next_usd)}/h)" in why.binding


def test_a_mixed_plan_is_explained_without_a_market() -> None:
    wanted = request(objective="throughput", mixed=True, budget_usd=1.0)
    plan = planning.plan(small(), wanted)
    assert plan.recommendations[0].expected is None
    why = planning.explain(small(), plan, date(2026, 8, 30))
    more = planning.plan(small(), replace(wanted, mixed=False, budget_usd=2.0, market="none")).recommendations[0]
    assert why.dollar_more is not None
    assert why.dollar_more.performance == more.performance


def test_a_calm_zone_needs_no_memory_node() -> None:
    calm = planning.plan(small(), request(gpu="V100", checkpoint_bytes=10**9), traces=traces([16] * 2000))
    assert calm.recommendations[0].conduct is not None
    assert calm.recommendations[0].conduct.tier == "durable"


def test_a_guess_is_called_one() -> None:
    short = planning.plan(small(), request(gpu="V100"), traces=traces([16] * 100))
    assert any("not enough history" in line for line in short.advice)
    assert short.recommendations[0].expected is not None
    assert short.recommendations[0].expected.guess


def test_traces_of_another_accelerator_are_refused() -> None:
    with pytest.raises(UsageError, match="the traces are of K80"):
        planning.plan(small(), request(), traces=traces([1] * 10, accelerator="K80"))
    with pytest.raises(UsageError, match="traces have an effect under a spot market only"):
        planning.plan(small(), request(market="none"), traces=traces([1] * 10))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"confidence": 1.0}, "the confidence is 1"),
        ({"confidence": float("nan")}, "the confidence is nan"),
        ({"usd_per_hour_of_waiting": -1.0}, "an hour of waiting is worth -1 dollars"),
        ({"objective": "time", "usd_per_hour_of_waiting": 1.0}, "needs the objective cost"),
        ({"market": "spot"}, "no market is called 'spot'"),
        ({"deadline_s": 3.7e8}, "the deadline is 102778 h: it must be 100,000 h at most"),
        ({"deadline_s": 1e300}, "the deadline is 2.77778e\\+296 h: it must be 100,000 h at most"),
        ({"seed": -1}, "the seed is negative: it must be an integer from 0 to 9223372036854775807"),
        ({"seed": 2**63}, "the seed is too large: it must be"),
        ({"market": "built-in", "policy": "noscale"}, "a spot market needs"),
    ],
)
def test_what_a_market_cannot_have_is_refused_in_a_sentence(wrong: dict[str, object], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        request(**wrong)


def test_the_same_seed_gives_the_same_plan() -> None:
    first, second = (planning.plan(small(), request(deadline_s=DUE_S)).to_json() for _ in range(2))
    assert first == second
    other = planning.plan(small(), request(deadline_s=DUE_S, seed=1)).to_json()
    assert other["recommendations"][0]["expected"] != first["recommendations"][0]["expected"]


@given(
    factors=st.tuples(st.floats(0.3, 1.0), st.floats(0.3, 1.0)),
    waiting=st.sampled_from([0.0, 5.0]),
    due=st.sampled_from([None, DUE_S]),
    zonal=st.booleans(),
)
@settings(max_examples=6, deadline=None)
def test_a_cheaper_market_never_makes_a_plan_dearer(
    factors: tuple[float, float], waiting: float, due: float | None, zonal: bool
) -> None:
    places = (("r-1", "r-1a"), ("r-1", "r-1b")) if zonal else (("r-1", None),)
    catalog = small(places=places)
    spot = catalog.prices[Market.SPOT]
    cheaper = spot.usd_per_hour * np.array(factors)[spot.instance]
    changed = replace(catalog, prices={**catalog.prices, Market.SPOT: replace(spot, usd_per_hour=cheaper)})
    asked = request(max_nodes=2, deadline_s=due, usd_per_hour_of_waiting=waiting, architectures=("all-spot",))
    before, after = (planning.plan(market, asked).recommendations[0].objective_value for market in (catalog, changed))
    assert after <= before * (1 + 1e-9)


def test_an_explanation_prices_preemption_tier_and_zones() -> None:
    catalog = small(places=(("r-1", "r-1a"), ("r-1", "r-1b"), ("r-2", "r-2a")))
    plan = planning.plan(catalog, request(deadline_s=DUE_S))
    why = planning.explain(catalog, plan, date(2026, 11, 18))
    assert why.risk is not None
    assert why.risk.preemption is not None
    assert why.risk.preemption.hours > 0
    assert why.risk.tier is not None
    assert why.risk.zone is not None
    document = json.loads(json.dumps(why.to_json(), allow_nan=False))
    assert set(document["risk"]) == {"preemption", "tier", "zone", "fallback", "prices", "guess"}


def test_the_age_of_prices_has_the_measured_effect_at_the_measured_ages() -> None:
    assert price_age_effect(0) is None
    for days, dearer, over in ((1, "0%", "0%"), (7, "3%", "17%"), (30, "18%", "42%"), (365, "78%", "71%")):
        told = price_age_effect(days)
        assert told is not None
        assert f"{dearer} dearer" in told
        assert f"in {over} of cases" in told
    assert price_age_effect(5000) is not None


def test_a_deadline_beyond_what_the_work_can_use_makes_no_market_longer() -> None:
    free, far, farther = (
        planning.plan(small(), request(gpu="V100", deadline_s=due_h and due_h * 3600)).recommendations[0]
        for due_h in (None, 20_000.0, 100_000.0)
    )
    assert (far.roles, far.conduct) == (farther.roles, farther.conduct)
    for best in (free, far, farther):
        assert best.expected is not None
        assert best.expected.missed == 0
    assert far.expected is not None
    assert farther.expected is not None
    assert far.expected.risk.to_json() == farther.expected.risk.to_json()
    assert far.objective_value == pytest.approx(free.objective_value, rel=0.02)
    hours = [longest_h(GangJob(work_h=24.0, machines=4, deadline_h=due_h)) for due_h in (None, 200.0, 2e4, 1e300)]
    assert hours == [256.0, 256.0, 1448.1546878700494, 1448.1546878700494]


def test_distributions_hold_all_starts() -> None:
    plan = planning.plan(small(), request(deadline_s=DUE_S))
    expected = plan.recommendations[0].expected
    assert expected is not None
    for found in expected.risk.distribution().values():
        assert sum(found["share"]) == pytest.approx(1.0)
        assert len(found["edges"]) == len(found["share"]) + 1


def test_progress_is_told_while_clusters_are_replayed() -> None:
    seen: list[tuple[int, int]] = []
    planning.plan(small(), request(max_nodes=1), progress=lambda done, every: seen.append((done, every)))
    assert seen
    assert all(0 <= done < every for done, every in seen)
