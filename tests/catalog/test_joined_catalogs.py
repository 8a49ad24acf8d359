"""Several catalogues are one market: every machine knows its cloud, and no plan spreads over two."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import deepvm
from deepvm import plan as planning
from deepvm.catalog import Catalog, Instance, Market, Quota, library
from deepvm.catalog.joined import joined
from deepvm.errors import UnknownName, UsageError
from deepvm.plan import Request
from tests.support.small_markets import small_catalog


def market(provider: str, gpu: str, usd: float, *, name: str | None = None, family: str | None = None) -> Catalog:
    """One GPU type and one CPU type in one zone of a region that all these clouds have."""
    worker = Instance(
        name=gpu, family=family, vcpus=8, memory_gib=64.0, accelerator="T4", accelerator_count=1,
        accelerator_memory_gib=16.0, eflops=100.0, sustained_gbps=25.0,
    )  # fmt: skip
    node = Instance(name=f"{gpu}-cpu", vcpus=4, memory_gib=16.0, sustained_gbps=10.0)
    found = small_catalog([worker, node], [(0, 0, 2.0), (1, 0, 0.1)], [(0, 0, usd)], places=(("us-1", "z"),))
    return replace(found, name=name or provider, provider=provider)


def test_a_plan_over_clouds_takes_the_best_and_stays_in_one() -> None:
    both = joined([market("aws", "a", 0.3), market("lambda", "b", 0.2)])
    assert (both.name, both.provider, both.clouds) == ("aws+lambda", "aws+lambda", ("aws", "lambda"))
    plan = planning.plan(both, Request(budget_usd=3.0, top=10))
    assert [[(r.instance, r.cloud) for r in best.roles] for best in plan.recommendations] == [
        [("b", "lambda"), ("b-cpu", "lambda")],
        [("a", "aws"), ("a-cpu", "aws")],
        [("b", "lambda"), ("b", "lambda")],
        [("a", "aws"), ("a", "aws")],
        [("a", "aws")],
        [("b", "lambda")],
    ]
    assert plan.to_json()["recommendations"][0]["roles"][0]["cloud"] == "lambda"
    alone = planning.plan(market("aws", "a", 0.3), Request(budget_usd=3.0)).to_json()
    assert "cloud" not in alone["recommendations"][0]["roles"][0]


def test_regions_of_the_same_name_are_two_and_memory_stays_in_its_cloud() -> None:
    without = market("aws", "a", 0.2)
    without = replace(
        without, prices={**without.prices, Market.ON_DEMAND: small_catalog([], [], []).prices[Market.SPOT]}
    )
    both = joined([without, market("lambda", "b", 0.3)])
    best = planning.plan(both, Request(budget_usd=3.0, memory_in="region")).recommendations[0]
    assert {role.cloud for role in best.roles} == {"lambda"}


def test_two_catalogues_of_one_cloud_are_its_market_and_the_first_price_counts() -> None:
    old, new = market("aws", "a", 0.9, name="old"), market("aws", "a", 0.3, name="new")
    both = joined([new, old, new])
    assert (both.name, both.provider, both.clouds, len(both.instances)) == ("new+old", "aws", (), 2)
    assert [offer.usd_per_hour for offer in both.offers("a") if offer.market is Market.SPOT] == [0.3]
    assert joined([new]) is new


def test_a_quota_counts_the_machines_of_its_own_catalogue() -> None:
    quota = Quota(families=("G",), market=Market.SPOT, vcpus=16)
    here = replace(market("aws", "a", 0.3, name="here", family="G"), quotas=(quota,))
    there = market("aws", "a", 0.4, name="there", family="G")
    there = replace(there, places=(("eu-1", "y"),))
    plan = planning.plan(joined([here, there]), Request(budget_usd=3.0, architectures=("all-spot",), gradient_bytes=0))
    assert [(best.worker.region, best.nodes) for best in plan.recommendations] == [("eu-1", 7), ("us-1", 2)]


def test_what_cannot_be_joined_is_refused_in_a_sentence() -> None:
    with pytest.raises(UsageError, match="paper-virtual is made for the paper's network table: plan it alone"):
        deepvm.load_catalogs("aws-2026-08", "paper-virtual")
    with pytest.raises(UsageError, match="aws and gcp both have a type a: plan them one by one"):
        joined([market("aws", "a", 0.3), market("gcp", "a", 0.3)])
    with pytest.raises(UsageError, match="no catalogue to join"):
        joined([])


def test_catalogues_have_short_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPVM_HOME", str(tmp_path))
    assert library.load("aws").name == library.DEFAULT
    library.save(market("gcp", "g", 0.2, name="skypilot-gcp"))
    library.save(market("aws", "a", 0.2, name="skypilot-aws"))
    assert library.load("gcp").name == "skypilot-gcp"
    assert library.load("aws").name == "skypilot-aws"
    both = deepvm.load_catalogs("aws", "gcp")
    assert both.name == "skypilot-aws+skypilot-gcp"
    assert [*library.load(both.name).offers()] == [*both.offers()]  # as a run finds it again from its plan
    assert deepvm.load_catalogs().name == library.DEFAULT
    with pytest.raises(UnknownName):
        library.load("aws+azure")
