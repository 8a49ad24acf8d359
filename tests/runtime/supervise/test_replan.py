"""What is rented instead of a type that the market has no more of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deepvm.catalog import Catalog, Market, library
from deepvm.performance.measured import Machine as MeasuredMachine
from deepvm.performance.measured import Provenance, Samples
from deepvm.performance.profile import OverheadPoint, Profile
from deepvm.runtime.cluster import Cluster, Machine, load_cluster, scaled
from deepvm.runtime.supervise.replan import BACKOFF_S, MOST_BACKOFF_S, Replanner
from tests.support.runtime.whole_runs import write_plan


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return scaled(load_cluster(write_plan(tmp_path)), most_trainers=2)


def named(cluster: Cluster, name: str) -> Machine:
    return next(machine for machine in cluster.machines if machine.name == name)


def test_a_worker_becomes_the_cheapest_type_that_slows_nobody_then_the_fastest_then_none(cluster: Cluster) -> None:
    replanner, taken = Replanner(), []
    while found := replanner.instead_of(cluster, named(cluster, "worker/1"), "sold out"):
        cluster, changes = found
        taken.append(named(cluster, "worker/1").instance)
        assert "sold out" in changes[0]
        assert taken[-1] in changes[0]
    assert taken == ["g5.xlarge", "g3s.xlarge"]
    assert named(cluster, "worker/0").instance == "g4dn.xlarge"


def test_a_memory_node_becomes_another_machine_without_a_gpu(cluster: Cluster) -> None:
    found = Replanner().instead_of(cluster, named(cluster, "memory/0"), "sold out")
    assert found is not None
    instead = named(found[0], "memory/0")
    assert (instead.instance, instead.market) == ("t3.xlarge", "on-demand")  # the next of the plan's failover list
    assert instead.usd_per_hour == pytest.approx(0.1664)


def test_the_budget_holds(cluster: Cluster) -> None:
    dear = tuple(replace(m, usd_per_hour=1.4) if m.name != "worker/1" else m for m in cluster.machines)
    assert Replanner().instead_of(replace(cluster, machines=dear), named(cluster, "worker/1"), "sold out") is None


def test_what_the_run_measured_counts_in_a_new_plan(cluster: Cluster) -> None:
    size = 12_000_000_000
    stages = {"detection": 0.5, "regroup": 2.0, "start": 30.0, "restore": 3.0}
    measured = Profile(
        workload="digits",
        provenance=Provenance(machine=MeasuredMachine(cpu="a cpu", cores=2), date="2026-11-18"),
        overheads=tuple(
            OverheadPoint(name=name, state_bytes=size, seconds=Samples((seconds,))) for name, seconds in stages.items()
        ),
    )
    lost = named(cluster, "memory/0")
    plain = Replanner().instead_of(cluster, lost, "sold out")
    found = Replanner(measured=lambda: measured).instead_of(cluster, lost, "sold out")
    assert plain is not None
    assert found is not None
    assert plain[0].restore_s == cluster.restore_s
    assert named(plain[0], "memory/0").instance == "t3.xlarge"
    assert found[0].restore_s is not None
    assert found[0].restore_s > 32.5
    assert "checkpoints have 12 GB, as this run measured, and not the planned 300 MB" in found[1]
    assert any(change.startswith("a loss is expected to stop training for") for change in found[1])
    assert plain[1][2:] == ("it is next in the plan's failover list",)


def test_profiles_of_a_plan_survive_in_its_file(cluster: Cluster) -> None:
    broken = dict(cluster.plan) | {"request": {**cluster.plan["request"], "profiles": [{"format": "something"}]}}
    lost = named(cluster, "worker/1")
    assert Replanner().instead_of(replace(cluster, plan=broken), lost, "sold out") is None


def listed(cluster: Cluster, *instead: tuple[str, float]) -> Cluster:
    """The cluster with a failover list of workers, by type and price."""
    worker = named(cluster, "worker/0")
    rows = tuple(replace(worker, instance=instance, usd_per_hour=usd) for instance, usd in instead)
    return replace(cluster, failover=(*rows, replace(named(cluster, "memory/0"), instance="m6i.2xlarge")))


def test_the_failover_list_of_the_plan_comes_first_in_its_order(cluster: Cluster) -> None:
    replanner, taken = Replanner(), []
    cluster = listed(cluster, ("p2.xlarge", 0.27), ("g4ad.xlarge", 9.0), ("g3.4xlarge", 0.34))
    while found := replanner.instead_of(cluster, named(cluster, "worker/1"), "sold out"):
        cluster, changes = found
        taken.append(named(cluster, "worker/1").instance)
        assert any("next in the plan's failover list" in change for change in changes) == (len(taken) <= 2)
    assert taken == ["p2.xlarge", "g3.4xlarge", "g3s.xlarge", "g5.xlarge"], "9.0 is above the budget"
    found = replanner.instead_of(cluster, named(cluster, "memory/0"), "sold out")
    assert found is not None
    assert named(found[0], "memory/0").instance == "m6i.2xlarge"


def test_a_type_that_was_refused_is_asked_for_again_after_a_wait_that_doubles(cluster: Cluster) -> None:
    now_s = [0.0]
    replanner = Replanner(clock=lambda: now_s[0])
    cluster = listed(cluster, ("p2.xlarge", 0.27), ("g3.4xlarge", 0.34))
    lost = named(cluster, "worker/1")

    def instead() -> str | None:
        found = replanner.instead_of(cluster, lost, "sold out")
        return None if found is None else named(found[0], "worker/1").instance

    assert instead() == "p2.xlarge"
    replanner.refused(replace(lost, instance="p2.xlarge"))
    assert instead() == "g3.4xlarge"
    now_s[0] = BACKOFF_S - 1
    assert instead() == "g3.4xlarge"
    now_s[0] = BACKOFF_S
    assert instead() == "p2.xlarge"
    replanner.refused(replace(lost, instance="p2.xlarge"))
    now_s[0] += 2 * BACKOFF_S - 1
    assert instead() == "g3.4xlarge", "refused twice in a row"
    now_s[0] += 1
    assert instead() == "p2.xlarge"
    now_s[0] += 100 * MOST_BACKOFF_S
    replanner.refused(replace(lost, instance="p2.xlarge"))
    now_s[0] += BACKOFF_S
    assert instead() == "p2.xlarge", "an old refusal no longer counts"
    for _ in range(20):
        replanner.refused(replace(lost, instance="p2.xlarge"))
        now_s[0] += MOST_BACKOFF_S
        assert instead() == "p2.xlarge"


def test_a_failover_in_another_region_is_for_gangs_that_move_as_a_whole(cluster: Cluster) -> None:
    elsewhere = replace(named(cluster, "worker/0"), instance="p2.xlarge", region="eu-west-1")
    found = Replanner().instead_of(replace(cluster, failover=(elsewhere,)), named(cluster, "worker/1"), "sold out")
    assert found is not None
    assert named(found[0], "worker/1").instance == "g5.xlarge"


def repriced(factor: float, instance: str) -> Catalog:
    """Today's catalogue, in which one type's spot price has changed."""
    catalog = library.load("paper-aws-2023")
    spot = catalog.prices[Market.SPOT]
    usd = spot.usd_per_hour.copy()
    usd[spot.instance == catalog.index_by_name[instance]] *= factor
    return replace(catalog, prices={**catalog.prices, Market.SPOT: replace(spot, usd_per_hour=usd)})


def test_another_type_is_better_when_prices_have_changed_by_more_than_the_threshold(cluster: Cluster) -> None:
    def better(threshold: float | None, factor: float) -> tuple[Cluster, tuple[str, ...]] | None:
        return Replanner(load=lambda _: repriced(factor, "g5.xlarge"), threshold=threshold).better(cluster)

    assert better(0.2, 1.0) is None, "nothing has changed"
    assert better(None, 0.3) is None
    found = better(0.2, 0.3)
    assert found is not None
    assert {machine.instance for machine in found[0].gang} == {"g5.xlarge"}
    assert "throughput is better by" in found[1][0]
    assert any(change.startswith("the move stops training for about 3.1 s") for change in found[1])
    assert better(0.99, 0.9) is None


def test_a_type_that_has_become_too_dear_is_left(cluster: Cluster) -> None:
    found = Replanner(load=lambda _: repriced(100.0, "g4dn.xlarge"), threshold=0.2).better(cluster)
    assert found is not None
    assert {machine.instance for machine in found[0].gang} != {"g4dn.xlarge"}
    assert "g4dn.xlarge" in found[1][0]
