"""More freedom never costs more under a market: other regions, other catalogues, more money."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from deepvm.catalog import Catalog, load
from deepvm.catalog.joined import joined
from deepvm.plan import Request, plan
from deepvm.plan.risk.spot import Draw
from tests.support.market_plans import cpu, gpu
from tests.support.small_markets import small_catalog

REGIONS = ("us-central1", "us-east4", "europe-west4")
NOISE = 1.0005


def three_regions() -> Catalog:
    usd = {
        0: ((0.54, 0.20), (0.57, 0.19), (0.56, 0.17)), 1: ((11.0, 3.6), (11.5, 4.2), (10.8, 3.1)),
        2: ((2.5, 0.75), (2.6, 0.8), (2.48, 0.9)),
    }  # fmt: skip
    machines = [gpu("t4", 377.0, "T4"), gpu("h100", 3000.0, "H100"), gpu("v100", 900.0, "V100"), cpu("node")]
    on_demand = [(i, p, both[0]) for i, rows in usd.items() for p, both in enumerate(rows)]
    spot = [(i, p, both[1]) for i, rows in usd.items() for p, both in enumerate(rows)]
    on_demand += [(3, p, 0.1) for p in range(3)]
    return small_catalog(machines, on_demand, spot, places=tuple((region, None) for region in REGIONS))


def best_usd(catalog: Catalog, **wanted: object) -> float:
    request = Request(**{"objective": "cost", "top": 1, **wanted})  # type: ignore[arg-type]
    return plan(catalog, request).recommendations[0].objective_value


@pytest.mark.parametrize("due_h", [30.0, None])
def test_another_region_never_makes_the_best_plan_dearer(due_h: float | None) -> None:
    catalog, wanted = three_regions(), {"work_eflops_h": 30_000.0, "deadline_s": due_h and due_h * 3600}
    one, two, every = (
        best_usd(catalog, budget_usd=8.0, region=regions, **wanted) for regions in (REGIONS[:1], REGIONS[:2], REGIONS)
    )
    assert every <= two * NOISE
    assert two <= one * NOISE


def test_another_catalogue_never_makes_the_best_plan_dearer() -> None:
    here = replace(three_regions(), name="here", provider="aws")
    machines = [gpu("l4", 500.0, "L4"), cpu("keeper")]
    there = small_catalog(machines, [(0, 0, 5.0), (1, 0, 0.1)], [(0, 0, 4.0)], places=(("us-9", None),))
    both = joined([here, replace(there, name="there", provider="gcp")])
    wanted = {"budget_usd": 8.0, "work_eflops_h": 3000.0}
    assert best_usd(both, **wanted) <= best_usd(here, **wanted) * NOISE
    assert Request(budget_usd=8.0).architectures_of(both) == ("tiering", "single-anchor", "all-on-demand")


def test_more_money_never_makes_the_best_plan_dearer() -> None:
    catalog = load("aws-2026-08")
    work = 240 * 377.0
    found = [best_usd(catalog, budget_usd=usd, work_eflops_h=work, deadline_s=30 * 3600.0) for usd in (3.0, 5.0, 8.0)]
    assert found[1] <= found[0] * NOISE
    assert found[2] <= found[1] * NOISE


def test_what_a_place_draws_does_not_depend_on_other_places() -> None:
    alone = Draw(accelerator="V100", regions=("b", "b"), seed=3, worlds=2).capacity((0, 1))
    among = Draw(accelerator="V100", regions=("a", "b", "c", "b"), seed=3, worlds=2)
    assert np.array_equal(alone, among.capacity((1, 3)))
    assert not np.array_equal(alone[0], among.capacity((0,))[0])
