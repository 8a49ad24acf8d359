"""A plan's file becomes machines, or one sentence about what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import deepvm
from deepvm.errors import MalformedFile, UsageError
from deepvm.runtime.cluster import load_cluster, scaled


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


def test_a_large_plan_is_played_small_and_says_so(tmp_path: Path, document: dict[str, Any]) -> None:
    cluster = load_cluster(written(tmp_path / "plan.json", document))
    small = scaled(cluster, most_trainers=2)
    assert [m.name for m in small.machines] == ["worker/0", "worker/1", "memory/0"]
    assert small.notes == ("the plan has 17 workers, 1 memory node; here 2 workers, 1 memory node run",)
    assert scaled(small, most_trainers=2) is small


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.update(format="deepvm-plan/9"), "deepvm-plan/9"),
        (lambda d: d.pop("format"), "no format"),
        (lambda d: d.pop("recommendations"), "no whole plan"),
        (lambda d: d["recommendations"][0]["roles"][0].pop("instance"), "no whole plan"),
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
    with pytest.raises(MalformedFile, match="no JSON"):
        load_cluster(tmp_path / "text")
    with pytest.raises(UsageError, match="no plan of rank 9"):
        load_cluster(written(tmp_path / "plan.json", document), rank=9)
