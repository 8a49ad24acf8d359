"""Under ``flopp`` the planner is the published method, on catalogues that nobody looked at before."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deepvm import plan as planning
from deepvm.catalog import Catalog, Instance, Market, Quota
from deepvm.errors import Infeasible
from deepvm.paper import published
from deepvm.plan import POLICIES, Request
from tests.support.small_markets import small_catalog

prices = st.sampled_from([0.1, 0.2, 0.25, 0.3, 0.5])


@st.composite
def papers_catalogs(draw: st.DrawFn) -> Catalog:
    """One place, logistic curves, bandwidths of the saturation table, few prices: ties are frequent."""
    gbps = st.sampled_from(sorted(published.SATURATION))
    gpus = [
        Instance(
            name=f"g{i}", family="G", vcpus=draw(st.sampled_from([4, 8])), memory_gib=draw(st.sampled_from([0.25, 16])),
            accelerator="T4", accelerator_count=1, burst_gbps=draw(gbps), eflops=draw(st.sampled_from([100.0, 377.0])),
            speedup={"model": "logistic", "a": 0.2, "b": draw(st.sampled_from([2.0, 5.0])), "c": 4.0},
        )
        for i in range(draw(st.integers(1, 3)))
    ]  # fmt: skip
    cpus = [
        Instance(name=f"c{i}", family="C", vcpus=4, memory_gib=draw(st.sampled_from([0.5, 8])), burst_gbps=draw(gbps))
        for i in range(draw(st.integers(0, 2)))
    ]
    machines = [*gpus, *cpus]
    rows = {market: [(i, 0, draw(prices)) for i in range(len(machines))] for market in Market}
    quotas = [
        Quota(families=(family,), market=market, vcpus=draw(st.sampled_from([8, 16, 32])))
        for family, market in (("G", Market.SPOT), ("C", Market.ON_DEMAND))
        if draw(st.booleans())
    ]
    return small_catalog(machines, rows[Market.ON_DEMAND], rows[Market.SPOT], quotas=tuple(quotas), saturation="table")


def equal_worth() -> Catalog:
    """Clusters of 1 × 100/0.1 and of 3 × 100/0.3 eFLOPS per USD: equal, though floats make the second the larger."""
    machines = [
        Instance(
            name=f"g{i}", family="G", vcpus=vcpus, memory_gib=0.25, accelerator="T4", accelerator_count=1,
            burst_gbps=0.3, eflops=100.0, speedup={"model": "logistic", "a": 0.2, "b": b, "c": 4.0},
        )
        for i, (vcpus, b) in enumerate([(8, 2.0), (4, 2.0), (4, 5.0)])
    ]  # fmt: skip
    machines += [Instance(name=f"c{i}", family="C", vcpus=4, memory_gib=0.5, burst_gbps=0.3) for i in range(2)]
    on_demand = [(i, 0, 0.1) for i in range(len(machines))]
    spot = [(0, 0, 0.1), (1, 0, 0.3), (2, 0, 0.3)]
    quota = Quota(families=("G",), market=Market.SPOT, vcpus=16)
    return small_catalog(machines, on_demand, spot, quotas=(quota,), saturation="table")


@settings(max_examples=150, deadline=None)
@example(catalog=equal_worth(), policy="deepvm", cents=70, buffers=1)
@given(
    catalog=papers_catalogs(), policy=st.sampled_from(POLICIES), cents=st.integers(0, 300), buffers=st.integers(1, 2)
)
def test_the_planner_chooses_as_the_published_method_on_any_catalogue_of_its_kind(
    catalog: Catalog, policy: str, cents: int, buffers: int
) -> None:
    setting = published.setting_of(catalog, checkpoint_bytes=300_000_000, buffers=buffers)
    expected = published.recommend(setting, cents / 100, policy, prune=True)
    request = Request(budget_usd=cents / 100, objective="flopp", policy=policy, buffers=buffers)
    if not expected:
        with pytest.raises(Infeasible):
            planning.plan(catalog, request)
        return
    best = planning.plan(catalog, request).recommendations[0]
    assert (best.architecture, best.worker.instance, best.nodes, best.hourly_usd) == (
        expected[0].architecture,
        expected[0].instance,
        expected[0].count,
        pytest.approx(expected[0].hourly_usd),
    )
    (point,) = planning.sweep(catalog, request, [cents / 100], [policy])
    assert (point.architecture, point.instance, point.count) == (best.architecture, best.worker.instance, best.nodes)
