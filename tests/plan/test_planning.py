"""What the planner does in the cases that people meet."""

from __future__ import annotations

import itertools
import sys
import textwrap
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from deepvm import catalog as catalogues
from deepvm import plan as planning
from deepvm.catalog import Catalog, Instance, Market, Quota
from deepvm.errors import DeepvmError, Infeasible, UnknownName, UsageError
from deepvm.plan import Request
from deepvm.plan.search.board import ANCHOR_SHARE
from deepvm.plan.search.instances import analyse_instances
from tests.support.small_markets import every_cluster, markets, requests, small_catalog

TABLE_IV = Request(budget_usd=3, objective="flopp", checkpoint_bytes=300_000_000, buffers=2)


def gpu(name: str, **facts: object) -> Instance:
    base: dict[str, object] = {
        "family": "G", "vcpus": 4, "memory_gib": 16.0, "accelerator": "T4", "accelerator_count": 1,
        "accelerator_memory_gib": 16.0, "eflops": 100.0, "sustained_gbps": 25.0,
    }  # fmt: skip
    return Instance(name=name, **{**base, **facts})  # type: ignore[arg-type]


def cpu(name: str, **facts: object) -> Instance:
    return Instance(name=name, **{"family": "C", "vcpus": 4, "memory_gib": 16.0, "sustained_gbps": 10.0, **facts})  # type: ignore[arg-type]


def shape(best: planning.Recommendation) -> list[tuple[str, str, int]]:
    return [(r.role, r.instance, r.count) for r in best.roles]


def test_table_iv_is_made_again() -> None:
    aws = catalogues.load("paper-aws-2023")
    three = planning.plan(aws, TABLE_IV).recommendations
    assert [shape(r) for r in three] == [
        [("worker", "g4dn.xlarge", 17), ("memory", name, 1)] for name in ("c5.xlarge", "m6i.xlarge", "c5n.xlarge")
    ]
    assert [r.hourly_usd for r in three] == pytest.approx([2.8526, 2.8746, 2.8986])
    others = {
        policy: planning.plan(aws, replace(TABLE_IV, policy=policy, top=1)).recommendations[0]
        for policy in ("noscale", "cost-first", "performance-first")
    }
    assert shape(others["noscale"]) == shape(three[0])
    assert shape(others["cost-first"]) == [("worker", "g4dn.xlarge", 15), ("anchor", "g4dn.xlarge", 1)]
    assert shape(others["performance-first"]) == [("worker", "g5.xlarge", 6), ("anchor", "g5.xlarge", 1)]


def test_performance_is_eflops_times_n_times_scaling_whatever_the_objective() -> None:
    virtual = catalogues.load("paper-virtual")
    for objective in ("throughput", "flopp"):
        best = planning.plan(
            virtual, Request(budget_usd=3, objective=objective, checkpoint_bytes=500_000_000)
        ).recommendations[0]
        assert (best.worker.instance, best.nodes) == ("D", 17)
        assert best.performance == pytest.approx(11230.6, abs=0.05)


def test_the_quota_is_inclusive_but_for_the_published_method() -> None:
    market = small_catalog(
        [gpu("g"), cpu("c")],
        [(0, 0, 1.0), (1, 0, 0.1)],
        [(0, 0, 0.1)],
        quotas=(Quota(families=("G",), market=Market.SPOT, vcpus=32),),
        saturation="table",
    )
    request = Request(budget_usd=100, architectures=("tiering",), gradient_bytes=0)
    assert planning.plan(market, request).recommendations[0].nodes == 8
    assert planning.plan(market, replace(request, objective="flopp")).recommendations[0].nodes == 7


def test_a_price_equal_to_the_budget_fits_in_spite_of_rounding() -> None:
    market = small_catalog([gpu("g"), cpu("c")], [(1, 0, 0.2)], [(0, 0, 0.1)])
    assert planning.plan(market, Request(budget_usd=0.3)).recommendations[0].hourly_usd == pytest.approx(0.3)
    with pytest.raises(Infeasible):
        planning.plan(market, Request(budget_usd=0.3 - 2e-6))


def test_an_on_demand_quota_for_one_machine_is_enough_for_an_anchor() -> None:
    for vcpus, architectures in ((4, ["single-anchor"]), (3, [])):
        market = small_catalog(
            [gpu("g")],
            [(0, 0, 1.0)],
            [(0, 0, 0.1)],
            quotas=(Quota(families=("G",), market=Market.ON_DEMAND, vcpus=vcpus),),
        )
        request = Request(budget_usd=3, architectures=("single-anchor", "all-spot"), checkpoint_bytes=0)
        found = [best.architecture for best in planning.plan(market, request).architectures]
        assert found == [*architectures, "all-spot"]


def test_each_architecture_is_shown_with_its_own_best_cluster() -> None:
    market = small_catalog([gpu("g"), cpu("c")], [(0, 0, 1.0), (1, 0, 0.2)], [(0, 0, 0.1)])
    names = ("tiering", "single-anchor", "all-spot", "all-on-demand")
    found = planning.plan(market, Request(budget_usd=3, architectures=names, max_nodes=2)).architectures
    assert [(best.architecture, best.hourly_usd) for best in found] == [
        ("tiering", pytest.approx(0.4)),
        ("single-anchor", pytest.approx(1.1)),
        ("all-spot", pytest.approx(0.2)),
        ("all-on-demand", pytest.approx(2.0)),
    ]


def test_checkpoints_larger_than_one_memory_node_are_spread_over_several() -> None:
    market = small_catalog([gpu("g"), cpu("c", memory_gib=10.0)], [(1, 0, 0.1)], [(0, 0, 0.1)])
    best = planning.plan(market, Request(budget_usd=1, checkpoint_bytes=12 * 2**30, buffers=2, checkpoint_every_s=600))
    assert shape(best.recommendations[0])[1] == ("memory", "c", 3)  # 24 GiB in nodes of 8 usable ones


def test_memory_nodes_stay_in_the_workers_zone_unless_the_region_is_allowed() -> None:
    market = small_catalog(
        [gpu("g"), cpu("c")],
        [(1, 1, 0.1)],
        [(0, 0, 0.1)],
        places=(("r", "a"), ("r", "b")),
    )
    request = Request(budget_usd=1, architectures=("tiering",))
    with pytest.raises(Infeasible):
        planning.plan(market, request)
    best = planning.plan(market, replace(request, memory_in="region")).recommendations[0]
    assert [r.zone for r in best.roles] == ["a", "b"]


@pytest.mark.parametrize(
    ("facts", "wanted", "reason"),
    [
        ({"architecture": "arm64"}, {}, "arm64"),
        ({"architecture": None}, {"cpu": "arm64"}, "CPU architecture unknown, arm64 asked for"),
        ({"accelerator_count": 0.125}, {}, "slice"),
        ({"eflops": None, "accelerator": "Nobody's"}, {}, "unknown speed"),
        ({"accelerator": "M60"}, {"min_gpu_memory_gb": 16.0}, "less than 16 GB of GPU memory"),
        ({"accelerator": "Nobody's", "accelerator_memory_gib": 8.0}, {"min_gpu_memory_gb": 16.0}, "GPU memory"),
        (
            {"accelerator": "Nobody's", "accelerator_memory_gib": None},
            {"min_gpu_memory_gb": 16.0},
            "GPU memory unknown",
        ),
        ({"sustained_gbps": None, "vcpus": None}, {}, "bandwidth"),
    ],
)
def test_what_is_left_out_is_reported_with_its_reason(
    facts: dict[str, object], wanted: dict[str, object], reason: str
) -> None:
    good = {"architecture": wanted.get("cpu", "x86_64")}
    machines = [gpu("good", **good), gpu("bad", **facts), cpu("c", **good)]
    market = small_catalog(machines, [(2, 0, 0.1)], [(0, 0, 0.3), (1, 0, 0.01)])
    plan = planning.plan(market, Request(budget_usd=1, **wanted))  # type: ignore[arg-type]
    assert plan.recommendations[0].worker.instance == "good"
    assert [x.example for x in plan.left_out if reason in x.reason] == ["bad"]


def test_several_regions_and_zones_widen_the_choice_and_no_more() -> None:
    places = (("r1", "a"), ("r1", "b"), ("r2", "c"), ("r3", "d"))
    spot = [(0, 0, 0.4), (0, 1, 0.3), (0, 2, 0.2), (0, 3, 0.1)]
    market = small_catalog([gpu("g")], [(0, p, 0.5) for p in range(4)], spot, places=places)
    request = Request(budget_usd=2, architectures=("all-spot",))

    def where(**wanted: object) -> tuple[str, str | None]:
        best = planning.plan(market, replace(request, **wanted)).recommendations[0]  # type: ignore[arg-type]
        return best.worker.region, best.worker.zone

    assert where() == ("r3", "d")
    assert where(region="r1") == ("r1", "b")
    assert where(region=("r1", "r2")) == ("r2", "c")
    assert where(region=("r1", "r2"), zone=("a", "b")) == ("r1", "b")
    assert replace(request, region=("r1",)).region == "r1"
    assert replace(request, region=()).region is None
    assert replace(request, region=["r1", "r2", "r1"]).to_json()["region"] == ["r1", "r2"]  # type: ignore[arg-type]
    with pytest.raises(UnknownName):
        where(region=("r1", "mars"))


def test_missing_bandwidth_is_estimated_and_marked() -> None:
    market = small_catalog([gpu("g", sustained_gbps=None, eflops=None), cpu("c")], [(1, 0, 0.1)], [(0, 0, 0.3)])
    best = planning.plan(market, Request(budget_usd=1)).recommendations[0]
    assert best.estimates == ("eFLOPS of g", "bandwidth of g")


def test_a_bid_floor_is_no_price_and_the_published_method_names_it() -> None:
    eight = gpu("a100.8x", accelerator="A100-80GB", accelerator_count=8, eflops=None, accelerator_memory_gib=80.0)
    market = small_catalog([eight, cpu("c")], [(0, 0, 0.08), (1, 0, 0.1)], [(0, 0, 0.08)])
    with pytest.raises(Infeasible, match="no GPU type fits \\(1 × a bid floor instead of a price"):
        planning.plan(market, Request(budget_usd=1))
    best = planning.plan(market, Request(budget_usd=1, objective="flopp")).recommendations[0]
    assert "price of a100.8x (a bid floor)" in best.estimates


def test_infeasible_names_the_cheapest_price() -> None:
    virtual = catalogues.load("paper-virtual")
    with pytest.raises(Infeasible, match=r"\$0\.2324/h.*\$0\.2000/h.*raise --budget") as caught:
        planning.plan(virtual, Request(budget_usd=0.2))
    assert caught.value.cheapest_usd == pytest.approx(0.066 + 0.1664)


@pytest.mark.parametrize(
    ("on_demand", "spot", "wanted", "told", "then"),
    [
        ([(0, 0, 1.0), (1, 0, 0.1)], [], {}, "no spot price of any GPU type", {"architectures": ("all-on-demand",)}),
        (
            [(0, 0, 1.0), (1, 0, 0.1)],
            [],
            {"objective": "flopp"},
            "--objective throughput --architecture all-on-demand",
            {"objective": "throughput", "architectures": ("all-on-demand",)},
        ),
        (
            [(0, 0, 1.0)],
            [],
            {"policy": "cost-first"},
            "--policy deepvm --architecture all-on-demand",
            {"policy": "deepvm", "architectures": ("all-on-demand",)},
        ),
        ([], [(0, 0, 0.3)], {}, "add --architecture all-spot", {"architectures": ("all-spot",)}),
        (
            [(1, 0, 0.1)],
            [(0, 0, 0.3)],
            {"quotas": (Quota(families=("G",), market=Market.SPOT, vcpus=2),)},
            "no cluster meets the quotas, at any price: raise a quota",
            {"quotas": ()},
        ),
        (
            [(1, 0, 0.1)],
            [(0, 0, 0.3)],
            {"work_eflops_h": 1e9, "deadline_s": 60.0, "market": "none"},
            "no cluster meets the deadline, at any price: allow ",
            {"deadline_s": None},
        ),
        (
            [(1, 0, 0.1)],
            [(0, 0, 0.3)],
            {"checkpoint_bytes": 10**15},
            "no cluster meets checkpoints of 2 × 1 PB every 60 s",
            {"checkpoint_bytes": 0},
        ),
    ],
)
def test_what_rules_every_cluster_out_is_named_with_what_helps(
    on_demand: list[tuple[int, int, float]],
    spot: list[tuple[int, int, float]],
    wanted: dict[str, object],
    told: str,
    then: dict[str, object],
) -> None:
    market = small_catalog([gpu("g"), cpu("c")], on_demand, spot)
    request = Request(budget_usd=50, **wanted)  # type: ignore[arg-type]
    with pytest.raises(Infeasible) as caught:
        planning.plan(market, request)
    assert told in str(caught.value)
    assert planning.plan(market, replace(request, **then)).recommendations  # type: ignore[arg-type]


def test_infeasible_at_any_price_names_the_constraints() -> None:
    market = small_catalog(
        [gpu("g"), cpu("c")], [(1, 0, 0.1)], [(0, 0, 0.3)],
        quotas=(Quota(families=("G",), market=Market.SPOT, vcpus=0),),
    )  # fmt: skip
    with pytest.raises(Infeasible, match="at any price"):
        planning.plan(market, Request(budget_usd=100))
    with pytest.raises(Infeasible, match="no GPU type fits"):
        planning.plan(small_catalog([cpu("c")], [(0, 0, 0.1)], []), Request(budget_usd=1))


@pytest.mark.parametrize(
    "wrong",
    [
        {"budget_usd": float("nan")}, {"budget_usd": -1.0}, {"budget_usd": float("inf")}, {"top": 0},
        {"buffers": 0}, {"checkpoint_bytes": -1}, {"max_nodes": 0}, {"checkpoint_every_s": 0.0},
        {"objective": "cost"}, {"deadline_s": 10.0}, {"architectures": ()}, {"mixed": True, "policy": "noscale"},
    ],
)  # fmt: skip
def test_a_request_that_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Request(**{"budget_usd": 3.0, **wrong})  # type: ignore[arg-type]


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean throughput"):
        Request(budget_usd=3, objective="througput")
    aws = catalogues.load()
    for field, value, hint in (("gpu", "A10", "A10G"), ("region", "us-east1", "us-east-1")):
        with pytest.raises(UnknownName, match=hint):
            planning.plan(aws, Request(budget_usd=3, **{field: value}))  # type: ignore[arg-type]


def test_cost_and_time_finish_the_job_and_keep_the_deadline() -> None:
    aws = catalogues.load()
    work = 100 * 377.0
    still = partial(Request, budget_usd=10, market="none")  # spot machines stay
    cheap = planning.plan(aws, still(objective="cost", work_eflops_h=work)).recommendations[0]
    fast = planning.plan(aws, still(objective="time", work_eflops_h=work)).recommendations[0]
    assert cheap.objective_value == pytest.approx(work / cheap.performance * cheap.hourly_usd)
    assert fast.objective_value == pytest.approx(work / fast.performance)
    assert fast.objective_value <= work / cheap.performance
    bound_s = (work / cheap.performance + fast.objective_value) / 2 * 3600
    held = planning.plan(aws, still(objective="cost", work_eflops_h=work, deadline_s=bound_s)).recommendations[0]
    assert work / held.performance * 3600 <= bound_s
    assert held.objective_value >= cheap.objective_value


# --- explanations ---------------------------------------------------------------------------------------------


def explained(request: Request, name: str = "paper-aws-2023") -> tuple[planning.Plan, planning.Explanation]:
    catalog = catalogues.load(name)
    plan = planning.plan(catalog, request)
    return plan, planning.explain(catalog, plan, date(2026, 11, 15))


def test_ranks_by_cost_count_the_price_of_the_memory_node() -> None:
    """A dearer memory node makes a cluster of the same workers dearer, and may put it behind another type's."""
    machines = [gpu("first"), gpu("second"), cpu("cheap"), cpu("dear")]
    offers = [(2, 0, 0.01), (3, 0, 0.5)], [(0, 0, 0.1), (1, 0, 0.11)]
    market = small_catalog(machines, *offers, saturation="table")  # other rules have one plan of each type
    request = Request(budget_usd=5, objective="cost", work_eflops_h=100.0, max_nodes=1, top=4)
    plan = planning.plan(market, request)
    values = [best.objective_value for best in plan.recommendations]
    assert values == sorted(values)
    assert [shape(best)[-1][1] for best in plan.recommendations] == ["cheap", "cheap", "dear", "dear"]


def test_the_flip_price_is_where_the_choice_flips() -> None:
    catalog = catalogues.load("paper-aws-2023")
    plan, why = explained(Request(budget_usd=3))
    chosen = plan.recommendations[0].worker
    assert why.flip_usd is not None
    assert why.flip_usd > chosen.usd_per_hour

    def first_at(usd: float) -> str:
        spot = catalog.prices[Market.SPOT]
        moved = np.where(spot.instance == catalog.index_by_name[chosen.instance], usd, spot.usd_per_hour)
        changed = replace(catalog, prices={**catalog.prices, Market.SPOT: replace(spot, usd_per_hour=moved)})
        return planning.plan(changed, Request(budget_usd=3)).recommendations[0].worker.instance

    assert first_at(why.flip_usd - 1e-4) == chosen.instance
    assert first_at(why.flip_usd + 1e-4) != chosen.instance


def test_a_quota_that_binds_is_named_with_what_its_raise_buys() -> None:
    plan, why = explained(Request(budget_usd=20))
    assert plan.recommendations[0].nodes in (32, 33)
    assert why.quota_raises[0].quota == "G spot"
    assert why.quota_raises[0].wanted_vcpus > 128
    assert any("quota G spot" in b for b in why.binding)


def test_a_dollar_more_buys_what_the_plan_at_that_budget_gives() -> None:
    plan, why = explained(Request(budget_usd=3))
    more = planning.plan(catalogues.load("paper-aws-2023"), Request(budget_usd=4)).recommendations[0]
    assert why.dollar_more is not None
    assert why.dollar_more.performance == more.performance
    assert why.dollar_more_gain == pytest.approx(more.performance / plan.recommendations[0].performance - 1)
    assert why.next_better_usd is not None
    assert 3 < why.next_better_usd <= 4


def test_the_runner_up_is_another_type_and_prices_carry_their_age() -> None:
    plan, why = explained(Request(budget_usd=3))
    assert why.runner_up is not None
    assert why.runner_up.worker.instance != plan.recommendations[0].worker.instance
    assert why.runner_up_behind is not None
    assert 0 <= why.runner_up_behind < 1
    assert {age.days for age in why.price_ages} == {(date(2026, 11, 15) - date(2023, 10, 1)).days}


@settings(max_examples=60, deadline=None)
@given(catalog=markets(), request=requests())
def test_every_feasible_plan_can_be_explained(catalog: Catalog, request: Request) -> None:
    try:
        plan = planning.plan(catalog, request)
    except Infeasible:
        return
    why = planning.explain(catalog, plan, date(2026, 11, 15))
    assert why.binding
    assert why.unspent_usd >= -1e-6


# --- several types in one cluster -----------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(
    catalog=markets(),
    request=requests(
        policy="deepvm", objective="throughput", deadline_s=None, max_nodes=4, architectures=("all-spot",)
    ),
)
def test_a_mixed_cluster_equals_brute_force(catalog: Catalog, request: Request) -> None:
    """Over all ways to choose up to four spot machines of a place."""
    board = analyse_instances(catalog, request)
    workers, best = board.workers, 0.0
    for place in set(workers.place.tolist()):
        rows = [r for r in np.flatnonzero(workers.place == place) if np.isfinite(workers.spot_usd[r])]
        for n in range(1, request.max_nodes + 1):
            for chosen in itertools.combinations_with_replacement(rows, n):
                if workers.spot_usd[list(chosen)].sum() > request.budget_usd + 1e-6:
                    continue
                if any(_vcpus(catalog, board, chosen, q) > q.vcpus for q in catalog.quotas):
                    continue
                slowest = float(workers.gbps[list(chosen)].min())
                if n * slowest < board.checkpoint_gbps:
                    continue
                value = sum(
                    workers.eflops[r] * float(board.curve(int(workers.instance[r]), slowest).scaling(np.array([n]))[0])
                    for r in chosen
                )
                best = max(best, value)
    single = [c for c in every_cluster(catalog, request) if c.usd <= request.budget_usd + 1e-6]
    best = max([best, *(c.performance for c in single)])
    if best == 0:
        with pytest.raises(Infeasible):
            planning.plan(catalog, replace(request, mixed=True))
    else:
        found = planning.plan(catalog, replace(request, mixed=True)).recommendations[0]
        assert found.performance == pytest.approx(best, rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    catalog=markets(),
    request=requests(policy="deepvm", objective="throughput", max_nodes=3, architectures=("single-anchor",)),
)
def test_a_mixed_anchored_cluster_equals_brute_force_under_deadline_memory_and_links(
    catalog: Catalog, request: Request
) -> None:
    """Over all ways to choose an anchor that holds and receives the checkpoints, and spot machines beside it."""
    board = analyse_instances(catalog, request)
    workers, best = board.workers, 0.0
    wanted_gib = request.checkpoint_bytes * request.buffers / 2**30 / (1.0 if board.paper else ANCHOR_SHARE)
    for anchor in range(len(workers)):
        if workers.memory_gib[anchor] < wanted_gib or workers.gbps[anchor] < board.checkpoint_gbps:
            continue
        beside = np.flatnonzero((workers.place == workers.place[anchor]) & np.isfinite(workers.spot_usd))
        for n in range(2, request.max_nodes + 1):
            for chosen in itertools.combinations_with_replacement(beside.tolist(), n - 1):
                usd = workers.on_demand_usd[anchor] + workers.spot_usd[list(chosen)].sum()
                spot, anchors = (Market.SPOT, chosen), (Market.ON_DEMAND, (anchor,))
                used = {q: sum(_vcpus(catalog, board, r, q, m) for m, r in (spot, anchors)) for q in catalog.quotas}
                if usd > request.budget_usd + 1e-6 or any(vcpus > q.vcpus for q, vcpus in used.items()):
                    continue
                slowest = float(workers.gbps[[anchor, *chosen]].min())
                if n * slowest < board.checkpoint_gbps:
                    continue
                value = sum(
                    workers.eflops[r] * float(board.curve(int(workers.instance[r]), slowest).scaling(np.array([n]))[0])
                    for r in (anchor, *chosen)
                )
                best = max(best, value)
    if best < max(request.least_performance, 1e-9):
        with pytest.raises(Infeasible):
            planning.plan(catalog, replace(request, mixed=True))
    else:
        found = planning.plan(catalog, replace(request, mixed=True)).recommendations[0]
        assert found.performance == pytest.approx(best, rel=1e-6)


def test_a_mixed_cluster_keeps_the_deadline() -> None:
    request = Request(budget_usd=3.0, mixed=True, work_eflops_h=20_000.0, deadline_s=3600.0)
    with pytest.raises(Infeasible):
        planning.plan(catalogues.load("aws-2026-08"), request)
    kept = planning.plan(catalogues.load("aws-2026-08"), replace(request, budget_usd=60.0)).recommendations
    assert all(r.performance >= 20_000 for r in kept)


def test_the_anchor_of_a_mixed_cluster_holds_the_checkpoints() -> None:
    """The type with little memory may work, not anchor; the one without an on-demand offer likewise."""
    small, large = gpu("small", memory_gib=1.0, eflops=300.0), gpu("large", memory_gib=64.0)
    catalog = small_catalog([small, large], [(0, 0, 0.5), (1, 0, 0.5)], [(0, 0, 0.2), (1, 0, 0.2)])
    request = Request(
        budget_usd=0.75,
        mixed=True,
        checkpoint_bytes=3_000_000_000,
        checkpoint_every_s=600,
        architectures=("single-anchor",),
    )
    best = planning.plan(catalog, request).recommendations[0]
    assert shape(best) == [("worker", "small", 1), ("anchor", "large", 1)]
    only_spot = small_catalog([small, large], [(1, 0, 0.5)], [(0, 0, 0.2), (1, 0, 0.2)])
    assert planning.plan(only_spot, request).recommendations[0].performance == best.performance


def _vcpus(catalog: Catalog, board: object, rows: tuple[int, ...], quota: Quota, market: Market = Market.SPOT) -> float:
    workers = board.workers  # type: ignore[attr-defined]
    return sum(
        catalog.instances[workers.instance[r]].vcpus
        for r in rows
        if quota.market is market
        and catalog.instances[workers.instance[r]].family in quota.families
        and quota.region in (None, catalog.places[workers.place[r]][0])
    )


# --- architectures of others ----------------------------------------------------------------------------------


@pytest.fixture
def plugged_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of a user's, as pip would lay it down: one module, one entry point."""
    (tmp_path / "their_architecture.py").write_text(
        textwrap.dedent(
            """
            import numpy as np
            from deepvm.catalog import Market
            from deepvm.plan.architectures import Part

            class Twins:
                name = "twins"
                summary = "exactly two on-demand machines"

                def hourly_usd(self, board, nodes):
                    usd = np.full((len(board.workers), len(nodes)), np.inf)
                    usd[:, nodes == 2] = 2 * board.workers.on_demand_usd[:, None]
                    return usd

                def clusters(self, board, worker, nodes, limit):
                    w = board.workers
                    return [(Part(role="worker", instance=int(w.instance[worker]), place=int(w.place[worker]),
                                  market=Market.ON_DEMAND, count=2, usd_per_hour=float(w.on_demand_usd[worker])),)]

            class Broken:
                pass
            """
        )
    )
    info = tmp_path / "their_architecture-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-architecture\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[deepvm.architectures]\ntwins = their_architecture:Twins\nbroken = their_architecture:Broken\n"
        "absent = their_architecture:Absent\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "their_architecture", raising=False)


@pytest.mark.usefixtures("plugged_in")
def test_an_architecture_in_a_users_package_is_planned_with() -> None:
    virtual = catalogues.load("paper-virtual")
    best = planning.plan(virtual, Request(budget_usd=3, architectures=("twins",))).recommendations[0]
    assert (best.architecture, best.nodes) == ("twins", 2)
    for name in ("broken", "absent"):
        with pytest.raises(DeepvmError, match="their_architecture"):
            planning.plan(virtual, Request(budget_usd=3, architectures=(name,)))
    with pytest.raises(UnknownName, match="twins"):
        planning.plan(virtual, Request(budget_usd=3, architectures=("twin",)))


# --- how long a restore would take ----------------------------------------------------------------------------


def test_a_plan_tells_how_long_its_memory_tier_takes_to_restore_all_workers() -> None:
    best = planning.plan(catalogues.load("aws-2026-08"), Request(budget_usd=3, architectures=("tiering",)))
    restore = best.recommendations[0].restore
    assert restore is not None
    memory = next(role for role in best.recommendations[0].roles if role.role == "memory")
    assert (restore.workers, restore.memory_nodes) == (best.recommendations[0].nodes, memory.count)
    assert restore.on_demand_s < restore.time.total_s
    document = best.to_json()["recommendations"][0]["restore"]
    assert document["state_bytes"] == 300_000_000
    assert document["total_s"] == restore.time.total_s
    assert document["total_s"] == pytest.approx(
        sum(document[f"{part}_s"] for part in ("detection", "entry", "rendezvous", "model", "fetch", "first_step"))
    )


def test_a_larger_checkpoint_takes_longer_to_restore_and_a_cluster_without_memory_tells_nothing() -> None:
    market = small_catalog([gpu("g"), cpu("c", memory_gib=64.0)], [(0, 0, 1.0), (1, 0, 0.1)], [(0, 0, 0.1)])
    request = Request(budget_usd=1, architectures=("tiering",), gradient_bytes=1000)
    small, large = (
        planning.plan(market, replace(request, checkpoint_bytes=size, checkpoint_every_s=3600.0)).recommendations[0]
        for size in (10**9, 10**10)
    )
    assert small.restore is not None
    assert large.restore is not None
    assert small.nodes == large.nodes == small.restore.workers
    # One node of 10 Gbit/s serves them all.
    assert small.restore.time.fetch_s == pytest.approx(small.nodes * 1e9 / 1.25e9)
    assert large.restore.time.fetch_s == pytest.approx(large.nodes * 1e10 / 1.25e9)
    assert small.restore.time.bound_by == "the memory nodes' links"
    bare = planning.plan(market, replace(request, architectures=("all-spot",))).recommendations[0]
    assert bare.restore is None
    assert bare.to_json()["restore"] is None


def test_an_anchor_serves_the_others_and_needs_nothing_itself() -> None:
    market = small_catalog([gpu("g"), cpu("c")], [(0, 0, 1.0), (1, 0, 0.1)], [(0, 0, 0.1)])
    best = planning.plan(market, Request(budget_usd=1.3, architectures=("single-anchor",))).recommendations[0]
    assert best.restore is not None
    assert (best.restore.workers, best.restore.memory_nodes) == (best.nodes - 1, 1)


def test_a_deadline_of_zero_is_refused_in_a_sentence() -> None:
    with pytest.raises(
        UsageError, match="the deadline, in seconds from the start, is 0: it must be a finite number above"
    ):
        Request(budget_usd=3.0, deadline_s=0.0)
