"""Whole plans of a small market, with every figure, and the reasons given for them."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from deepvm import plan as planning
from deepvm.catalog import Catalog, Instance, Market, Quota, library
from deepvm.errors import Infeasible
from deepvm.plan import Request
from tests.support.documents import assert_document
from tests.support.small_markets import small_catalog

DOCUMENTS = Path(__file__).with_name("documents")
TODAY = date(2026, 9, 1)
PLACES = (("us-east-1", "us-east-1a"), ("us-east-1", "us-east-1b"), ("us-west-2", "us-west-2a"))


def gpu(name: str, accelerator: str, **facts: Any) -> Instance:
    base = {"family": "G", "vcpus": 4, "memory_gib": 16.0, "accelerator_count": 1, "accelerator_memory_gib": 16.0}
    return Instance(name=name, accelerator=accelerator, **{**base, "sustained_gbps": 10.0, **facts})


def cpu(name: str, **facts: Any) -> Instance:
    return Instance(name=name, **{"family": "M", "vcpus": 4, "memory_gib": 16.0, "sustained_gbps": 5.0, **facts})


def catalog(**changes: Any) -> Catalog:
    """Three types of GPUs and two of memory nodes in three zones; the spot price of one place is missing."""
    machines = [
        gpu("g4dn.xlarge", "T4", eflops=377.0),
        gpu("g5.xlarge", "A10G", accelerator_memory_gib=24.0, sustained_gbps=2.5),
        gpu("g4dn.12xlarge", "T4", vcpus=48, accelerator_count=4, sustained_gbps=50.0),
        cpu("m6i.xlarge"),
        cpu("r6i.large", vcpus=2, sustained_gbps=None, burst_gbps=12.5),
    ]
    usd = (0.526, 1.006, 3.912, 0.192, 0.126)
    on_demand = [(i, p, each * (1 + p / 20)) for i, each in enumerate(usd) for p in range(3)]
    spot = [(i, p, each * (0.3 + p / 40)) for i, each in enumerate(usd) for p in range(3) if (i, p) != (1, 0)]
    quotas = (
        Quota(families=("G",), market=Market.SPOT, vcpus=64),
        Quota(families=("G",), market=Market.ON_DEMAND, vcpus=48, region="us-east-1"),
    )
    market = small_catalog(machines, on_demand, spot, places=PLACES, quotas=quotas)
    return replace(market, provider="aws", **changes)


ALL = ("tiering", "single-anchor", "all-spot", "all-on-demand")
REQUESTS: dict[str, dict[str, Any]] = {
    "throughput": {"budget_usd": 3.0, "top": 2},
    "cost-by-a-deadline": {
        "budget_usd": 6.0, "objective": "cost", "work_eflops_h": 30000.0, "deadline_s": 38 * 3600.0, "market": "none",
        "architectures": ALL, "checkpoint_bytes": 6_000_000_000, "memory_in": "region", "usd_per_hour_of_waiting": 0.5,
    },
    "time-with-a-limit-of-the-batch": {
        "budget_usd": 4.0, "objective": "time", "work_eflops_h": 9000.0, "market": "none", "batch": 32,
        "global_batch": 256, "zone": "us-east-1b", "checkpoint_every_s": 20.0, "buffers": 3,
    },
    "mixed": {"budget_usd": 3.0, "mixed": True, "architectures": ALL, "top": 2},
    "the-papers-objective": {"budget_usd": 2.5, "objective": "flopp", "top": 2},
    "cost-first": {"budget_usd": 2.5, "policy": "cost-first", "top": 1},
    "performance-first": {"budget_usd": 5.5, "policy": "performance-first", "top": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", REQUESTS)
def test_a_plan_and_its_reasons_are_these(name: str) -> None:
    found = planning.plan(catalog(), Request(**REQUESTS[name]))
    document = {name: value for name, value in found.to_json().items() if name not in ("format", "request")}
    reasons = planning.explain(catalog(), found, TODAY).to_json()
    assert_document({"plan": document, "reasons": reasons}, DOCUMENTS / f"{name}.json")


def test_what_is_not_asked_for_is_this() -> None:
    assert_document(Request(budget_usd=3.0).to_json(), DOCUMENTS / "request.json")


def test_policies_differ_at_these_budgets() -> None:
    at_usd = planning.budgets(0.4, 4.0, 0.6)
    points = planning.sweep(catalog(), Request(budget_usd=1.0, architectures=ALL), at_usd)
    paper = planning.sweep(library.load("paper-virtual"), Request(budget_usd=1.0, objective="flopp"), at_usd)
    document = {"small": [p.to_json() for p in points], "paper": [p.to_json() for p in paper]}
    assert_document(document, DOCUMENTS / "sweep.json")
    assert planning.sweep(catalog(), Request(budget_usd=1.0), []) == []


def test_the_front_of_prices_and_performance_is_this() -> None:
    front = planning.pareto(catalog(), Request(budget_usd=1.5, architectures=ALL))
    rows = [[r.rank, r.architecture, r.worker.instance, r.nodes, r.hourly_usd, r.performance] for r in front]
    assert_document(rows, DOCUMENTS / "front.json")


def shape(best: planning.Recommendation) -> list[tuple[str, str, int]]:
    return [(role.role, role.instance, role.count) for role in best.roles]


def refused(of: Catalog, **wanted: Any) -> str:
    with pytest.raises(Infeasible) as caught:
        planning.plan(of, Request(**wanted))
    return str(caught.value)


def test_what_nothing_meets_is_said_with_what_helps() -> None:
    quotas = (
        Quota(families=("G",), market=Market.SPOT, vcpus=3),
        Quota(families=("G",), market=Market.ON_DEMAND, vcpus=3),
    )
    cheap = {"budget_usd": 0.2}
    due = {"work_eflops_h": 9000.0, "market": "none"}
    no_spot = replace(
        catalog(), prices={**catalog().prices, Market.SPOT: small_catalog([], [], []).prices[Market.SPOT]}
    )
    offers = {side: small_catalog([], *([(2, 0, usd)] for usd in (3.9, 1.2))).prices[side] for side in Market}
    only_four = catalog(prices=offers)
    texts = {
        "budget": refused(catalog(), **cheap),
        "budget and deadline": refused(catalog(), budget_usd=1.0, deadline_s=3600.0, **due),
        "types": refused(catalog(), budget_usd=3.0, min_gpu_memory_gb=40.0, region="us-east-1"),
        "quotas": refused(catalog(quotas=quotas), budget_usd=3.0),
        "deadline": refused(catalog(), budget_usd=3.0, deadline_s=60.0, **due),
        "checkpoints": refused(catalog(), budget_usd=3.0, checkpoint_bytes=10**13, checkpoint_every_s=1.0),
        "batch": refused(only_four, budget_usd=9.0, batch=8, global_batch=1),
        "nodes": refused(catalog(), budget_usd=9.0, max_nodes=1, architectures=("single-anchor",)),
        "no spot": refused(no_spot, budget_usd=3.0),
        "no spot by the paper": refused(no_spot, budget_usd=3.0, objective="flopp", zone="us-east-1a"),
        "no spot for a policy": refused(no_spot, budget_usd=3.0, policy="cost-first", architectures=("all-spot",)),
    }
    assert_document(texts, DOCUMENTS / "infeasible.json")


def test_a_ring_of_two_types_with_efa_uses_it() -> None:
    large = {"vcpus": 192, "memory_gib": 768.0, "accelerator_count": 8, "sustained_gbps": 100.0}
    machines = [gpu("g5.48xlarge", "A10G", eflops=4000.0, **large), gpu("g6.48xlarge", "L4", eflops=3000.0, **large)]
    market = small_catalog(machines, [(0, 0, 16.0), (1, 0, 13.0)], [(0, 0, 5.0), (1, 0, 3.5)])
    asked = Request(budget_usd=19.0, architectures=("all-spot",), mixed=True, checkpoint_bytes=3_000_000_000)
    best = planning.plan(replace(market, provider="aws"), asked).recommendations[0]
    assert [(role.instance, role.count) for role in best.roles] == [("g5.48xlarge", 1), ("g6.48xlarge", 4)]
    assert (best.hourly_usd, best.performance) == (pytest.approx(19.0), pytest.approx(13897.085758))
    assert [curve.spec["efficiency"] for curve in best.curves] == [0.6, 0.6]


@pytest.mark.parametrize(("vcpus", "nodes"), [(4, 1), (8, 2), (12, 3), (400, 8)])
def test_a_tier_has_no_more_nodes_than_its_quota(vcpus: int, nodes: int) -> None:
    machines = [
        gpu("dear", "A10G", eflops=900.0, sustained_gbps=25.0),
        cpu("node", sustained_gbps=1.0, memory_gib=64.0),
    ]
    quotas = (Quota(families=("M",), market=Market.ON_DEMAND, vcpus=vcpus),)
    market = small_catalog(machines, [(1, 0, 0.01)], [(0, 0, 9.0)], quotas=quotas)
    asked = Request(budget_usd=100.0, checkpoint_bytes=6_000_000_000, checkpoint_every_s=900.0, gradient_bytes=0)
    best = planning.plan(market, asked).recommendations[0]
    assert shape(best) == [("worker", "dear", 11), ("memory", "node", nodes)]
