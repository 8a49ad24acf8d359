"""Laws of the planner on small random markets."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings

from deepvm import plan as planning
from deepvm.catalog import Catalog
from deepvm.errors import Infeasible, UsageError
from deepvm.plan import POLICIES, Request
from deepvm.plan.sweep import MOST_BUDGETS, budgets
from tests.support.small_markets import TOLERANCE_USD, every_cluster, markets, objective_score, requests

laws = settings(max_examples=100, deadline=None)


@settings(max_examples=300, deadline=None)
@given(catalog=markets(), request=requests())
def test_planner_equals_brute_force_for_every_objective_and_policy(catalog: Catalog, request: Request) -> None:
    clusters = [c for c in every_cluster(catalog, request) if c.usd <= request.budget_usd + TOLERANCE_USD]
    if not clusters:
        with pytest.raises(Infeasible):
            planning.plan(catalog, request)
        return
    best = max(objective_score(catalog, request, c) for c in clusters)
    cheapest = min(c.usd for c in clusters if objective_score(catalog, request, c) >= best - abs(best) * 1e-12)

    first = planning.plan(catalog, request).recommendations[0]

    chosen = [
        c
        for c in clusters
        if c.architecture == first.architecture
        and catalog.instances[c.worker].name == first.worker.instance
        and catalog.places[c.place] == (first.worker.region, first.worker.zone)
        and c.nodes == first.nodes
        and c.usd == pytest.approx(first.hourly_usd, abs=1e-9)
    ]
    assert chosen, "the planner recommends a cluster that is not among the feasible ones"
    assert objective_score(catalog, request, chosen[0]) == pytest.approx(best, rel=1e-12)
    assert first.performance == pytest.approx(chosen[0].performance, rel=1e-12)
    assert first.hourly_usd == pytest.approx(cheapest, abs=1e-6)


@laws
@given(catalog=markets(), request=requests(policy="deepvm"))
def test_the_optimum_never_falls_when_the_budget_rises(catalog: Catalog, request: Request) -> None:
    before = None
    for budget in (0.5, 1.0, 2.0, 4.0, 8.0):
        try:
            first = planning.plan(catalog, replace(request, budget_usd=budget)).recommendations[0]
        except Infeasible:
            assert before is None, "a plan that fits a budget fits every larger one"
            continue
        value = -first.objective_value if request.objective in ("cost", "time") else first.objective_value
        assert before is None or value >= before * (1 - 1e-12) - 1e-12 or value >= before
        before = value


@laws
@given(catalog=markets(), request=requests())
def test_no_recommendation_breaks_the_budget_and_ranks_are_in_order(catalog: Catalog, request: Request) -> None:
    try:
        plan = planning.plan(catalog, replace(request, top=5))
    except Infeasible:
        return
    scores = []
    for rank, best in enumerate(plan.recommendations, start=1):
        assert best.rank == rank
        assert best.hourly_usd <= request.budget_usd + 1e-6
        assert best.hourly_usd == pytest.approx(sum(r.count * r.usd_per_hour for r in best.roles))
        assert best.nodes == sum(r.count for r in best.roles if r.role != "memory")
        scores.append(-best.objective_value if request.objective in ("cost", "time") else best.objective_value)
    if request.policy == "deepvm":
        assert all(b <= a + abs(a) * 1e-9 for a, b in pairwise(scores))


@settings(max_examples=30, deadline=None)  # of which each compares every policy at every budget
@given(catalog=markets(), request=requests())
def test_a_sweep_is_the_plan_at_every_budget(catalog: Catalog, request: Request) -> None:
    at_usd = [0.0, 0.4, 1.0, 2.5, 6.0]
    points = planning.sweep(catalog, request, at_usd)
    assert [p.policy for p in points] == [policy for policy in POLICIES for _ in at_usd]
    for point in points:
        try:
            first = planning.plan(
                catalog, replace(request, policy=point.policy, budget_usd=point.budget_usd)
            ).recommendations[0]
        except Infeasible:
            assert point.performance is None
            assert point.architecture is None
            continue
        assert point.performance == pytest.approx(first.performance)
        assert point.hourly_usd == pytest.approx(first.hourly_usd)


@laws
@given(catalog=markets(), request=requests(policy="deepvm", objective="throughput"))
def test_the_pareto_front_rises_in_price_and_performance_and_ends_at_the_optimum(
    catalog: Catalog, request: Request
) -> None:
    try:
        front = planning.pareto(catalog, request)
    except Infeasible:
        return
    pairs = [(r.hourly_usd, r.performance) for r in front]
    assert all(a[0] < b[0] and a[1] < b[1] for a, b in pairwise(pairs))
    assert front[-1].performance == pytest.approx(planning.plan(catalog, request).recommendations[0].performance)


@settings(max_examples=60, deadline=None)
@given(catalog=markets(), request=requests(policy="deepvm", objective="throughput", deadline_s=None))
def test_mixing_types_is_never_worse_and_keeps_every_constraint(catalog: Catalog, request: Request) -> None:
    try:
        single = planning.plan(catalog, request).recommendations[0]
    except Infeasible:
        return
    mixed = planning.plan(catalog, replace(request, mixed=True)).recommendations[0]
    assert mixed.performance >= single.performance * (1 - 1e-9)
    assert mixed.hourly_usd <= request.budget_usd + 2e-6
    assert mixed.nodes <= request.max_nodes
    assert len({(r.region, r.zone) for r in mixed.roles if r.role != "memory"}) == 1
    for quota in catalog.quotas:
        used = sum(
            r.count * catalog.instance(r.instance).vcpus
            for r in mixed.roles
            if r.market is quota.market
            and catalog.instance(r.instance).family in quota.families
            and quota.region in (None, r.region)
        )
        assert used <= quota.vcpus


def test_a_sweep_may_have_as_many_budgets_as_it_says_and_no_more() -> None:
    assert len(budgets(0, MOST_BUDGETS - 1, 1)) == MOST_BUDGETS
    with pytest.raises(UsageError, match=r"a sweep of 100001 budgets is too long \(at most 100000\)"):
        budgets(0, MOST_BUDGETS, 1)
