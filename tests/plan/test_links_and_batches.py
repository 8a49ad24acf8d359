"""Machines of several GPUs, EFA, and a limit of the global batch, as the planner sees them."""

from __future__ import annotations

from dataclasses import replace
from datetime import date

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepvm import catalog as catalogues
from deepvm import plan as planning
from deepvm.catalog import Catalog, Instance
from deepvm.cli.options import parse_work
from deepvm.errors import Infeasible, UsageError
from deepvm.performance import DEFAULT_LATENCY_S, curve_from_spec
from deepvm.performance.cluster.interconnect import EFA, NVLINK, PCIE
from deepvm.plan import Request
from deepvm.plan.search.instances import analyse_instances, eflops_of
from deepvm.plan.search.links import links_of
from tests.support.small_markets import (
    TOLERANCE_USD,
    every_cluster,
    markets,
    objective_score,
    requests,
    small_catalog,
)

AWS = catalogues.load("aws-2026-08")
JOB = Request(budget_usd=100.0, checkpoint_bytes=3_000_000_000)


def machine(name: str, count: float = 1.0, **facts: object) -> Instance:
    base: dict[str, object] = {
        "vcpus": 8, "memory_gib": 64.0, "accelerator": "T4", "accelerator_memory_gib": 16.0, "sustained_gbps": 25.0
    }  # fmt: skip
    return Instance(name=name, accelerator_count=count, **{**base, **facts})  # type: ignore[arg-type]


def eflops(name: str, request: Request = JOB) -> float:
    row = next(row for row in planning.plan(AWS, request).instances if row.instance == name)
    return row.eflops


@pytest.mark.parametrize(
    ("name", "kind", "gbytes_per_s", "efa"),
    [
        ("g4dn.xlarge", PCIE, 7.04, False),
        ("g4dn.12xlarge", PCIE, 7.04, True),
        ("g5.48xlarge", PCIE, 14.08, True),
        ("p4d.24xlarge", NVLINK, 231, True),
        ("p5.48xlarge", NVLINK, 346.5, True),
        ("p6-b200.48xlarge", NVLINK, 693, True),
    ],
)
def test_links_follow_from_the_accelerator_and_the_type(
    name: str, kind: object, gbytes_per_s: float, efa: bool
) -> None:
    found = links_of(AWS.instance(name), "aws")
    assert found.inside is kind
    assert found.inside_gbytes_per_s == pytest.approx(gbytes_per_s)
    assert found.efa is efa
    assert links_of(AWS.instance(name), "other").efa is False


def test_unknown_gpus_and_azures_nc_machines_are_cards() -> None:
    assert links_of(machine("x", 4, accelerator="Nobody's"), "test").inside_gbytes_per_s == pytest.approx(7.04)
    assert links_of(machine("Standard_NC24s_v3", 4, accelerator="V100"), "azure").inside is PCIE
    assert links_of(machine("Standard_ND40rs_v2", 8, accelerator="V100-32GB"), "azure").inside is NVLINK
    assert links_of(machine("slice", 0.25), "test").gpus == 1


def test_eight_gpus_are_less_than_eight_times_one_by_the_exchange_inside() -> None:
    for name, least, most in (("p4d.24xlarge", 0.97, 1.0), ("g4dn.metal", 0.6, 0.8)):
        peak, _ = eflops_of(AWS.instance(name))
        assert peak is not None
        assert least < eflops(name) / peak < most
    for name in ("g4dn.xlarge", "p5.4xlarge"):
        assert eflops(name) == eflops_of(AWS.instance(name))[0]


def test_a_measured_machine_was_measured_with_its_exchange() -> None:
    market = small_catalog([machine("g", 8, eflops=1000.0)], [(0, 0, 1.0)], [(0, 0, 0.5)])
    board = analyse_instances(market, JOB)
    assert board.workers.eflops.tolist() == [1000.0]
    assert board.curve(0).scaling([1]).tolist() == [1.0]


@pytest.mark.parametrize("name", ["g4dn.xlarge", "g4dn.12xlarge", "p4d.24xlarge"])
def test_a_job_of_forty_hours_on_a_machine_takes_forty_hours_there(name: str) -> None:
    work = parse_work(AWS, f"40h@{name}", JOB)
    assert work / eflops(name) == pytest.approx(40)


def test_efa_clusters_do_not_pay_the_hops_of_tcp() -> None:
    board = analyse_instances(AWS, JOB)
    efa, tcp = (board.curve(AWS.index_by_name[name]).to_spec() for name in ("p4d.24xlarge", "g4dn.xlarge"))
    assert (efa["model"], efa["latency_s"], efa["gpus"]) == ("cluster-all-reduce", EFA.latency_s, 8)
    assert (tcp["model"], tcp["latency_s"]) == ("all-reduce", DEFAULT_LATENCY_S)


@pytest.mark.parametrize("changes", [{}, {"batch": 8, "global_batch": 1000}, {"curve": "all-reduce"}])
def test_the_table_of_all_types_is_the_curve_of_each(changes: dict[str, object]) -> None:
    board = analyse_instances(AWS, replace(JOB, **changes))  # type: ignore[arg-type]
    nodes = np.arange(1, 200)
    table = board.scaling(nodes)
    for row, instance in enumerate(board.workers.instance):
        curve = board.curve(int(instance))
        np.testing.assert_allclose(table[row], curve.scaling(nodes), rtol=1e-12)
        back = curve_from_spec(curve.to_spec())
        np.testing.assert_allclose(back.scaling(nodes), curve.scaling(nodes), rtol=1e-12)


def test_a_mixed_ring_has_efa_only_if_all_its_machines_do() -> None:
    types = [machine("g5.8xlarge", eflops=300.0), machine("g5.2xlarge", eflops=290.0)]
    market = replace(small_catalog(types, [], [(0, 0, 0.5), (1, 0, 0.4)]), provider="aws")
    plan = planning.plan(market, Request(budget_usd=0.9, mixed=True, architectures=("all-spot",)))
    best = plan.recommendations[0]
    assert set(planning.explain(market, plan, date(2026, 9, 1)).links) == {
        "g5.8xlarge: machines over TCP",
        "g5.2xlarge: machines over TCP",
    }
    assert not any("EFA" in text for text in best.estimates)
    assert {role.instance for role in best.roles} == {"g5.8xlarge", "g5.2xlarge"}
    assert {curve.spec["latency_s"] for curve in best.curves} == {DEFAULT_LATENCY_S}
    assert best.performance == pytest.approx(
        sum(e * c.scaling for e, c in zip((300.0, 290.0), best.curves, strict=True))
    )


def test_estimates_name_the_links_that_nobody_measured() -> None:
    best = planning.plan(AWS, replace(JOB, gpu="A100")).recommendations[0]
    assert "all-reduce over NVLink of p4d.24xlarge" in best.estimates
    assert ("all-reduce over EFA of p4d.24xlarge" in best.estimates) == (best.nodes > 1)
    assert not any("all-reduce" in text for text in planning.plan(AWS, replace(JOB, gpu="T4", budget_usd=1.0))
                   .recommendations[0].estimates)  # fmt: skip


# A limit of the global batch

LIMITED = replace(JOB, gpu="T4", budget_usd=30.0, batch=32, checkpoint_bytes=300_000_000)


def gpus_of(best: planning.Recommendation) -> float:
    return best.nodes * AWS.instance(best.worker.instance).accelerator_count


def test_a_limit_stops_the_planner_from_adding_machines() -> None:
    found = [planning.plan(AWS, replace(LIMITED, global_batch=n)).recommendations[0] for n in (32, 256, 100_000)]
    without = planning.plan(AWS, LIMITED).recommendations[0]
    assert gpus_of(found[0]) < gpus_of(found[1]) <= gpus_of(found[2])
    assert found[0].performance < found[1].performance <= found[2].performance == pytest.approx(without.performance)
    assert found[0].hourly_usd < without.hourly_usd


@settings(max_examples=60, deadline=None)
@given(catalog=markets(), request=requests(), batch=st.integers(1, 20), limit=st.integers(1, 40))
def test_no_cluster_has_more_gpus_than_samples_and_a_limit_never_helps(
    catalog: Catalog, request: Request, batch: int, limit: int
) -> None:
    bounded = replace(request, batch=batch, global_batch=limit)
    try:
        plan = planning.plan(catalog, bounded)
    except Infeasible:
        return
    for best in plan.recommendations:
        assert best.nodes * catalog.instance(best.worker.instance).accelerator_count <= limit
        assert np.isfinite(best.performance)
        free = analyse_instances(catalog, request).curve(catalog.index_by_name[best.worker.instance])
        eflops_each = catalog.instance(best.worker.instance).eflops or 0.0
        assert best.performance <= eflops_each * best.nodes * float(free.scaling(best.nodes)) * (1 + 1e-9)


@settings(max_examples=80, deadline=None)
@given(catalog=markets(), request=requests(), batch=st.integers(1, 20), limit=st.integers(1, 60))
def test_under_a_limit_the_planner_equals_brute_force(
    catalog: Catalog, request: Request, batch: int, limit: int
) -> None:
    bounded = replace(request, batch=batch, global_batch=limit)
    clusters = [c for c in every_cluster(catalog, bounded) if c.usd <= bounded.budget_usd + TOLERANCE_USD]
    if not clusters:
        with pytest.raises(Infeasible):
            planning.plan(catalog, bounded)
        return
    best = max(objective_score(catalog, bounded, c) for c in clusters)
    first = planning.plan(catalog, bounded).recommendations[0]
    assert max(
        objective_score(catalog, bounded, c)
        for c in clusters
        if (catalog.instances[c.worker].name, c.nodes) == (first.worker.instance, first.nodes)
    ) == pytest.approx(best, rel=1e-9)


def test_measured_curves_saturate_too() -> None:
    paper = catalogues.load("paper-aws-2023")
    request = Request(budget_usd=3.0, batch=128, global_batch=512)
    best = planning.plan(paper, request).recommendations[0]
    assert best.curves[0].spec["model"] == "limited-batch"
    assert best.curves[0].spec["curve"]["model"] == "logistic"
    assert best.performance < planning.plan(paper, replace(request, global_batch=None)).recommendations[0].performance


def test_an_explanation_shows_links_and_batch() -> None:
    plan = planning.plan(AWS, replace(LIMITED, global_batch=64))
    why = planning.explain(AWS, plan, date(2026, 9, 1))
    name = plan.recommendations[0].worker.instance
    assert why.links[0].startswith(f"{name}: ")
    assert why.batch is not None
    assert f"{64 / gpus_of(plan.recommendations[0]):.4g} samples on each" in why.batch
    assert "--global-batch 64" in why.binding
    assert why.to_json()["batch"] == why.batch
    free = planning.explain(AWS, planning.plan(AWS, LIMITED), date(2026, 9, 1))
    assert free.batch is None
    wide = planning.explain(AWS, planning.plan(AWS, replace(LIMITED, global_batch=10**6)), date(2026, 9, 1))
    assert "within the limit" in (wide.batch or "")


def test_a_limit_below_the_gpus_of_every_machine_is_named() -> None:
    eight = replace(LIMITED, gpu="A100", budget_usd=1000.0, global_batch=4)
    with pytest.raises(Infeasible, match="--global-batch 4"):
        planning.plan(AWS, eight)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"global_batch": 64}, "needs --batch"),
        ({"batch": 0}, "batch is 0"),
        ({"batch": 1, "global_batch": 0}, "global_batch is 0"),
        ({"batch": 1, "global_batch": -5}, "1 or more"),
        ({"batch": 1, "global_batch": 5, "mixed": True}, "cannot be combined"),
    ],
)
def test_limits_that_make_no_sense_are_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Request(budget_usd=1.0, **changes)  # type: ignore[arg-type]
