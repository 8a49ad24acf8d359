"""Whole answers of the re-planner: every sentence, every machine and every price."""

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

STAGES = {"detection": 0.5, "regroup": 2.0, "start": 30.0, "restore": 3.0}


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return scaled(load_cluster(write_plan(tmp_path)), most_trainers=2)


def named(cluster: Cluster, name: str) -> Machine:
    return next(machine for machine in cluster.machines if machine.name == name)


def measured(size: int) -> Profile:
    """What a run measured of checkpoints of this size; nothing with size 0."""
    points = [OverheadPoint(name=name, state_bytes=size, seconds=Samples((s,))) for name, s in STAGES.items() if size]
    provenance = Provenance(machine=MeasuredMachine(cpu="a cpu", cores=2), date="2026-11-18")
    return Profile(workload="digits", provenance=provenance, overheads=tuple(points))


def replaced(cluster: Cluster, name: str, size: int | None) -> tuple[Machine, tuple[str, ...]]:
    """Return what a machine becomes, all else being as it was, and why."""
    replanner = Replanner() if size is None else Replanner(measured=lambda: measured(size))
    found = replanner.instead_of(cluster, named(cluster, name), "sold out")
    assert found is not None
    instead = named(found[0], name)
    machines = tuple(instead if machine.name == name else machine for machine in cluster.machines)
    assert found[0] == replace(cluster, machines=machines, restore_s=found[0].restore_s)
    return instead, found[1]


NEXT = "it is next in the plan's failover list"
LARGER = "checkpoints have 12 GB, as this run measured, and not the planned 300 MB"


@pytest.mark.parametrize(
    ("size", "listed", "instance", "usd", "cluster_usd", "learned"),
    [
        (None, True, "t3.xlarge", 0.1664, "$0.4820/h", (NEXT,)),
        (0, True, "t3.xlarge", 0.1664, "$0.4820/h", (NEXT,)),
        (300_000_000, True, "t3.xlarge", 0.1664, "$0.4820/h", (NEXT,)),
        (0, False, "m6i.xlarge", 0.192, "$0.5076/h", ()),
        (300_000_000, False, "m6i.xlarge", 0.192, "$0.5076/h", ("33 s",)),
        (12_000_000_000, True, "t3.xlarge", 0.1664, "$0.4820/h", (LARGER, "52.2 s")),
    ],
)
def test_a_memory_node_is_replaced_by_another_one_on_demand(
    cluster: Cluster,
    size: int | None,
    listed: bool,
    instance: str,
    usd: float,
    cluster_usd: str,
    learned: tuple[str, ...],
) -> None:
    planned = cluster if listed else replace(cluster, failover=())
    instead, changes = replaced(planned, "memory/0", size)
    assert instead == replace(
        named(cluster, "memory/0"), instance=instance, usd_per_hour=usd, on_demand_usd_per_hour=usd
    )  # fmt: skip
    assert changes == (
        f"memory/0 is {instance} (on-demand, ${usd:.4f}/h) instead of c5.xlarge ($0.1700/h): sold out",
        f"the cluster costs {cluster_usd} instead of $0.4856/h, of a budget of $3.0000/h",
        *(
            f"a loss is expected to stop training for {each}, as this run measured it" if each.endswith(" s") else each
            for each in learned
        ),
    )


@pytest.mark.parametrize(
    ("size", "learned"),
    [
        (None, ()),
        (0, ()),
        (300_000_000, ("a loss is expected to stop training for 32.9 s, as this run measured it",)),
        (12_000_000_000, (LARGER, "a loss is expected to stop training for 32.9 s, as this run measured it")),
    ],
)
def test_a_worker_that_is_not_in_the_failover_list_is_the_cheapest_of_those_as_fast(
    cluster: Cluster, size: int | None, learned: tuple[str, ...]
) -> None:
    instead, changes = replaced(replace(cluster, failover=()), "worker/1", size)
    assert (instead.instance, instead.market, instead.region, instead.zone) == ("g5.xlarge", "spot", "us-east-1", None)
    assert (instead.usd_per_hour, instead.on_demand_usd_per_hour) == (0.3018, 1.006)
    assert changes == (
        "worker/1 is g5.xlarge (spot, $0.3018/h) instead of g4dn.xlarge ($0.1578/h): sold out",
        "the cluster costs $0.6296/h instead of $0.4856/h, of a budget of $3.0000/h",
        *learned,
    )
