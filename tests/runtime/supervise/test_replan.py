"""What is rented instead of a type that the market has no more of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deepvm.runtime.cluster import Cluster, Machine, load_cluster, scaled
from deepvm.runtime.supervise.replan import Replanner
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
    assert (instead.instance, instead.market) == ("m6i.xlarge", "on-demand")
    assert instead.usd_per_hour == pytest.approx(0.192)


def test_the_budget_holds(cluster: Cluster) -> None:
    dear = tuple(replace(m, usd_per_hour=1.4) if m.name != "worker/1" else m for m in cluster.machines)
    assert Replanner().instead_of(replace(cluster, machines=dear), named(cluster, "worker/1"), "sold out") is None
