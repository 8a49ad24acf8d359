"""What is rented instead of a type that the market has no more of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deepvm.performance.measured import Machine as MeasuredMachine
from deepvm.performance.measured import Provenance, Samples
from deepvm.performance.profile import OverheadPoint, Profile
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
    assert named(plain[0], "memory/0").instance == "m6i.xlarge"
    assert found[0].restore_s is not None
    assert found[0].restore_s > 32.5
    assert "checkpoints have 12 GB, as this run measured, and not the planned 300 MB" in found[1]
    assert any(change.startswith("a loss is expected to stop training for") for change in found[1])
    assert len(plain[1]) == 2


def test_profiles_of_a_plan_survive_in_its_file(cluster: Cluster) -> None:
    broken = dict(cluster.plan) | {"request": {**cluster.plan["request"], "profiles": [{"format": "something"}]}}
    lost = named(cluster, "worker/1")
    assert Replanner().instead_of(replace(cluster, plan=broken), lost, "sold out") is None
