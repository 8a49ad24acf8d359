"""A plan's file becomes machines, or one sentence about what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import deepvm
from deepvm.cli.app import run
from deepvm.errors import MalformedFile, UsageError
from deepvm.runtime.backends.ec2.placement import region_of
from deepvm.runtime.backends.ec2.settings import Ec2Settings
from deepvm.runtime.cluster import billing_facts, hub_of, load_cluster, scaled


@pytest.fixture
def document() -> dict[str, Any]:
    catalog = deepvm.load_catalog("paper-aws-2023")
    return deepvm.make_plan(catalog, deepvm.Request(budget_usd=3.0, objective="flopp")).to_json()


def written(path: Path, document: Any) -> Path:
    path.write_text(json.dumps(document))
    return path


def test_every_machine_has_a_place_and_a_price(tmp_path: Path, document: dict[str, Any]) -> None:
    cluster = load_cluster(written(tmp_path / "plan.json", document))
    assert [m.name for m in cluster.machines][-1] == "memory/0"
    assert len(cluster.trainers) == 17
    assert cluster.trainers[3].name == "worker/3"
    assert cluster.trainers[3].market == "spot"
    assert cluster.hourly_usd == pytest.approx(document["recommendations"][0]["hourly_usd"])
    assert cluster.trainers[0].on_demand_usd_per_hour == pytest.approx(0.526)
    assert cluster.keepers[0].on_demand_usd_per_hour == cluster.keepers[0].usd_per_hour


def test_a_plan_over_clouds_names_them_and_ec2_refuses_the_others(tmp_path: Path, document: dict[str, Any]) -> None:
    assert {machine.cloud for machine in load_cluster(written(tmp_path / "plan.json", document)).machines} == {None}
    for role in document["recommendations"][0]["roles"]:
        role["cloud"] = "gcp"
    cluster = load_cluster(written(tmp_path / "plan.json", document))
    assert {machine.cloud for machine in cluster.machines} == {"gcp"}
    with pytest.raises(UsageError, match="worker/0 is planned on gcp, and --on ec2 has machines of aws alone"):
        region_of(Ec2Settings(), cluster)


def test_a_large_plan_is_played_small_and_says_so(tmp_path: Path, document: dict[str, Any]) -> None:
    cluster = load_cluster(written(tmp_path / "plan.json", document))
    small = scaled(cluster, most_trainers=2)
    assert [m.name for m in small.machines] == ["worker/0", "worker/1", "memory/0"]
    assert small.notes == ("the plan has 17 workers, 1 memory node; this host runs 2 workers, 1 memory node",)
    assert scaled(small, most_trainers=2) is small


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.update(format="deepvm-plan/9"), "deepvm-plan/9"),
        (lambda d: d.pop("format"), "no format"),
        (lambda d: d.pop("recommendations"), "not a valid plan"),
        (lambda d: d.update(recommendations=[]), "not a valid plan: it has no recommendations"),
        (lambda d: d["recommendations"][0]["roles"][0].pop("instance"), "not a valid plan"),
    ],
)
def test_a_plan_of_another_version_or_half_a_plan_is_refused(
    tmp_path: Path, document: dict[str, Any], change: Any, says: str
) -> None:
    change(document)
    with pytest.raises(MalformedFile, match=says):
        load_cluster(written(tmp_path / "plan.json", document))


def test_no_plan_at_all(tmp_path: Path, document: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        load_cluster(tmp_path / "none.json")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(MalformedFile, match="not valid JSON"):
        load_cluster(tmp_path / "text")
    with pytest.raises(UsageError, match="no plan of rank 9"):
        load_cluster(written(tmp_path / "plan.json", document), rank=9)


NASTY = "\x1b[2J[red]g4dn"
HOSTILE: dict[str, Any] = {
    "a count of a thousand million": lambda d: d["recommendations"][0]["roles"][0].update(count=10**9),
    "many roles of many machines": lambda d: d["recommendations"][0].update(
        roles=[{**d["recommendations"][0]["roles"][0], "count": 9_000}] * 9_000
    ),
    "a negative count": lambda d: d["recommendations"][0]["roles"][0].update(count=-1),
    "a float count": lambda d: d["recommendations"][0]["roles"][0].update(count=2.0),
    "a bool count": lambda d: d["recommendations"][0]["roles"][0].update(count=True),
    "an unknown role": lambda d: d["recommendations"][0]["roles"][0].update(role="queen"),
    "a role that is a list": lambda d: d["recommendations"][0]["roles"][0].update(role=["worker"]),
    "an unknown market": lambda d: d["recommendations"][0]["roles"][0].update(market={}),
    "a name with control characters": lambda d: d["recommendations"][0]["roles"][0].update(instance=NASTY),
    "a region that is a number": lambda d: d["recommendations"][0]["roles"][0].update(region=3),
    "a price that is text": lambda d: d["recommendations"][0]["roles"][0].update(usd_per_hour="1"),
    "a negative price": lambda d: d["recommendations"][0]["roles"][0].update(usd_per_hour=-1),
    "roles null": lambda d: d["recommendations"][0].update(roles=None),
    "recommendations that are text": lambda d: d.update(recommendations="x"),
    "a rank that is a list": lambda d: d["recommendations"][0].update(rank=[1]),
    "an accelerator that is a list": lambda d: d["instances"][0].update(accelerator=["T4"]),
    "eFLOPS that are text": lambda d: d["instances"][0].update(eflops="fast"),
    "a budget that is text": lambda d: d["request"].update(budget_usd="3"),
    "instances null": lambda d: d.update(instances=None),
    "a request null": lambda d: d.update(request=None),
    "a restore that is a list": lambda d: d["recommendations"][0].update(restore=[1]),
    "checkpoint bytes that are text": lambda d: d["request"].update(checkpoint_bytes="x"),
    "a format that is an object": lambda d: d.update(format={"a": NASTY}),
}


@pytest.mark.parametrize("damage", HOSTILE)
def test_a_hostile_plan_is_one_sentence(
    tmp_path: Path, document: dict[str, Any], damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    HOSTILE[damage](document)
    path = written(tmp_path / "plan.json", document)
    assert run(["run", str(path), "--", "train.py"]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"deepvm: {path}: ")
    assert told.count("\n") == 1
    assert told.strip().isprintable()


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "[" * 900 + "]" * 900, "", "NaN", '{"format": 1e999}', '"\\ud800"', "\xff"]
)
def test_a_plan_that_is_not_json_is_one_sentence(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(text.encode("latin-1"))
    assert run(["run", str(path), "--", "train.py"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_plan_without_an_end_is_not_read_for_ever() -> None:
    with pytest.raises(MalformedFile, match="at most"):
        load_cluster("/dev/zero")


def counted(document: dict[str, Any], count: int) -> dict[str, Any]:
    """The plan with one role of so many machines."""
    document["recommendations"][0]["roles"] = [{**document["recommendations"][0]["roles"][0], "count": count}]
    return document


def test_a_cluster_has_ten_thousand_machines_at_most(tmp_path: Path, document: dict[str, Any]) -> None:
    most = load_cluster(written(tmp_path / "plan.json", counted(document, 10_000)))
    assert [machine.name for machine in most.machines[::9_999]] == ["worker/0", "worker/9999"]
    with pytest.raises(MalformedFile, match="count is 10001"):
        load_cluster(written(tmp_path / "plan.json", counted(document, 10_001)))


def test_a_cluster_that_trains_nowhere_is_refused(tmp_path: Path, document: dict[str, Any]) -> None:
    cluster = load_cluster(written(tmp_path / "plan.json", document))
    with pytest.raises(UsageError, match="most_trainers is 0: at least one machine must train"):
        scaled(cluster, most_trainers=0)


def test_a_host_runs_anchors_before_workers_and_one_memory_node(tmp_path: Path, document: dict[str, Any]) -> None:
    worker, memory = document["recommendations"][0]["roles"]
    anchor = {**worker, "role": "anchor", "market": "on-demand", "usd_per_hour": 0.526}
    document["recommendations"][0]["roles"] = [
        {**worker, "count": 2}, {**anchor, "count": 2}, {**memory, "count": 3}, {**worker, "count": 1}
    ]  # fmt: skip
    cluster = load_cluster(written(tmp_path / "plan.json", document))
    names = [machine.name for machine in cluster.machines]
    assert names == ["worker/0", "worker/1", "anchor/0", "anchor/1", "memory/0", "memory/1", "memory/2", "worker/2"]
    for most, kept in (
        (1, ["anchor/0", "memory/0"]),
        (3, ["worker/0", "anchor/0", "anchor/1", "memory/0"]),
        (5, ["worker/0", "worker/1", "anchor/0", "anchor/1", "memory/0", "worker/2"]),
    ):
        assert [machine.name for machine in scaled(cluster, most_trainers=most).machines] == kept
    assert scaled(cluster, most_trainers=1).notes == (
        "the plan has 3 workers, 2 anchors, 3 memory nodes; this host runs 1 anchor, 1 memory node",
    )
    assert [machine.name for machine in cluster.gang] == ["worker/0", "worker/1", "worker/2"]
    assert [machine.name for machine in cluster.trainers] == [
        "worker/0",
        "worker/1",
        "anchor/0",
        "anchor/1",
        "worker/2",
    ]
    assert [machine.name for machine in cluster.keepers] == ["anchor/0", "anchor/1", "memory/0", "memory/1", "memory/2"]
    assert hub_of(cluster).name == "anchor/0"
    assert billing_facts(cluster.machines[2]) == {
        "role": "anchor",
        "instance": "g4dn.xlarge",
        "market": "on-demand",
        "usd_per_hour": 0.526,
        "on_demand_usd_per_hour": 0.526,
        "region": worker["region"],
        "zone": worker["zone"],
    }


def test_the_hub_needs_a_machine_that_stays(tmp_path: Path, document: dict[str, Any]) -> None:
    document["recommendations"][0]["roles"].pop()
    with pytest.raises(UsageError, match="the tiering plan has spot machines only, and the hub needs an on-demand one"):
        hub_of(load_cluster(written(tmp_path / "plan.json", document)))


def test_a_failover_list_has_one_machine_of_each_role(tmp_path: Path, document: dict[str, Any]) -> None:
    worker, memory = document["recommendations"][0]["roles"]
    second = {"roles": [{**worker, "instance": "g5.xlarge", "count": 3}, {**memory, "instance": "m5.large"}]}
    document["failover"] = [second, {"roles": [{**worker, "instance": "p3.2xlarge"}]}]
    cluster = load_cluster(written(tmp_path / "plan.json", document))
    assert [(machine.name, machine.instance) for machine in cluster.failover] == [
        ("worker/0", "g5.xlarge"), ("memory/0", "m5.large"), ("worker/0", "p3.2xlarge")
    ]  # fmt: skip
