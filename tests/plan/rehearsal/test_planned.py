"""A plan that is read and replayed again: the very figures that it predicted, and what its user changed."""

from __future__ import annotations

import copy
import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepvm import plan as planning
from deepvm.catalog import Catalog
from deepvm.errors import MalformedFile, UsageError
from deepvm.plan import Plan
from deepvm.plan.rehearsal.beside import beside
from deepvm.plan.rehearsal.planned import Planned, read_planned
from deepvm.simulate.strategies import NAMES
from tests.support.market_plans import DUE_S, WORK, request, small, traces

ZONAL = (("r-1", "r-1a"), ("r-1", "r-1b"), ("r-2", "r-2a"))


def planned(plan: Plan | dict[str, Any], folder: Path, number: int = 0) -> Planned:
    """Write a plan, and read one of its recommendations back."""
    document = plan if isinstance(plan, dict) else plan.to_json()
    rows = document["recommendations"]
    path = folder / "plan.json"
    path.write_text(json.dumps({**document, "recommendations": rows[number:]}, allow_nan=False), encoding="utf-8")
    found = read_planned(path)
    assert found is not None
    return found


def same(found: Planned, recommendation: planning.Recommendation) -> None:
    assert recommendation.expected is not None
    expected, outcomes = recommendation.expected.risk, found.risk().outcomes
    for column in outcomes.__dataclass_fields__:
        assert getattr(outcomes, column).tolist() == getattr(expected.outcomes, column).tolist(), column
    assert found.risk().to_json() == expected.to_json()


@pytest.mark.parametrize(
    ("catalog", "wanted"),
    [
        (small(), {}),
        (small(), {"deadline_s": DUE_S}),
        (small(places=ZONAL), {"deadline_s": DUE_S, "objective": "time"}),
        (small(places=ZONAL), {"deadline_s": 2 * DUE_S, "checkpoint_bytes": 6 * 10**9, "seed": 3}),
        (small(), {"architectures": ("single-anchor",), "usd_per_hour_of_waiting": 5.0}),
        (small(), {"architectures": ("single-anchor", "tiering"), "budget_usd": 40.0, "max_nodes": 40,
                   "objective": "time"}),
        (small(), {"architectures": ("all-on-demand",), "deadline_s": 3 * DUE_S}),
        (small(places=ZONAL), {"notices": 0.7, "checkpoint_bytes": 10**9}),
    ],
)  # fmt: skip
def test_every_recommendation_read_back_has_the_very_figures_that_were_predicted(
    catalog: Catalog, wanted: dict[str, Any], tmp_path: Path
) -> None:
    plan = planning.plan(catalog, request(**wanted))
    for number, recommendation in enumerate(plan.recommendations):
        same(planned(plan, tmp_path, number), recommendation)


@pytest.mark.parametrize("zones", [1, 3])
def test_a_plan_on_traces_has_its_figures_on_the_same_traces(zones: int, tmp_path: Path) -> None:
    chance = np.random.default_rng(4)
    recorded = traces([int(up) for up in chance.choice([0, 8, 16, 16, 16], 60).repeat(30)], zones=zones)
    plan = planning.plan(small(), request(gpu="V100", deadline_s=3 * DUE_S), traces=recorded)
    found = planned(plan, tmp_path)
    assert plan.recommendations[0].conduct is not None
    if found.market is not None:
        assert found.market.traces == "set"
        same(found.on_traces(recorded), plan.recommendations[0])
        with pytest.raises(UsageError, match="the traces are of K80"):
            found.on_traces(traces([1] * 10, accelerator="K80"))


def test_the_seed_of_the_plan_draws_its_market_again_and_another_one_does_not(tmp_path: Path) -> None:
    plan = planning.plan(small(), request(gpu="V100", architectures=("all-spot",), seed=2))
    found = planned(plan, tmp_path)
    same(found.seeded(2), plan.recommendations[0])
    assert found.seeded(5).risk().mean_h != found.risk().mean_h
    assert len(found.started(17).risk().outcomes.hours) == 17


@functools.cache
def whole_plan() -> Plan:
    asked = request(gpu="V100", architectures=("all-spot",), deadline_s=2 * DUE_S)
    return planning.plan(small(places=ZONAL), asked)


def fresh_document() -> dict[str, Any]:
    return copy.deepcopy(whole_plan().to_json())


def test_what_a_user_changes_in_the_conduct_is_what_is_replayed(tmp_path: Path) -> None:
    document = fresh_document()

    def changed(**conduct: Any) -> Planned:
        other = copy.deepcopy(document)
        other["recommendations"][0]["conduct"].update(conduct)
        return planned(other, tmp_path)

    rare, often = changed(save="every 3600s").risk(), changed(save="every 60s or at notice").risk()
    assert rare.outcomes.lost_h.mean() > 5 * often.outcomes.lost_h.mean()
    assert changed(zones=["r-1b"], way_back=None).risk().outcomes.moves.max() == 0
    assert changed(zones=["r-1"]).columns == (0, 1), "a region stands for its zones"
    assert changed(zones=["r-2a", "r-1a"]).columns == (2, 0)
    assert changed(zones=["r-2a", "r-1a"], way_back=0.95).risk().outcomes.moves.mean() > 0
    asked = whole_plan().recommendations[0].worker
    assert changed(zones=[]).conduct.zones == (asked.zone,), "those of the machines"
    assert changed(zones=[]).risk().outcomes.finished.any()
    for wrong in (["r-9"], ["r-1a", "r-1x"], ["r-9", "r-1"]):
        with pytest.raises(MalformedFile, match=r"zones has 'r-..?', and the plan's market has r-1a, r-1b, r-2a;"):
            changed(zones=wrong)
    for tier in ("memory", "anchor"):
        with pytest.raises(MalformedFile, match=f"tier is '{tier}', and the plan's machines are for 'durable'"):
            changed(tier=tier)
    with pytest.raises(MalformedFile, match="replicas is 10000, and the plan has 0 memory nodes"):
        changed(replicas=10000)
    with pytest.raises(MalformedFile, match="least_workers is 9999, and the plan has 3 machines that train"):
        changed(at_loss="shrink", least_workers=9999)
    with pytest.raises(UsageError, match="'every 7 steps' cannot be simulated"):
        changed(save="every 7 steps").risk()


def test_the_replicas_of_a_plan_are_those_of_its_memory_nodes_and_of_its_replay(tmp_path: Path) -> None:
    document = planning.plan(small(), request(gpu="V100", architectures=("tiering",))).to_json()
    best = document["recommendations"][0]
    node = next(role for role in best["roles"] if role["role"] == "memory")
    for replicas, nodes, told in (
        (1, 1, None),
        (0, 1, "replicas is 0, and the plan has 1 memory nodes"),
        (2, 1, "replicas is 2, and the plan has 1 memory nodes"),
        (2, 2, "replicas is 2, and its replay is of 1"),
    ):
        best["conduct"]["replicas"], node["count"] = replicas, nodes
        if told is None:
            assert planned(document, tmp_path).conduct.replicas == replicas
            continue
        with pytest.raises(MalformedFile, match=told):
            planned(document, tmp_path)
    del best["replay"]["replicas"]
    assert planned(document, tmp_path).written.figures.replicas == 2, "of a plan that does not say it"


def test_a_seed_that_is_negative_or_too_large_is_refused(tmp_path: Path) -> None:
    found = planned(fresh_document(), tmp_path)
    for seed in (-1, -2, 2**63, 10**5000):
        with pytest.raises(UsageError, match="the seed is"):
            found.seeded(seed)
    assert found.seeded(2**63 - 1).risk().outcomes.finished.any()


def test_prices_that_are_given_are_paid(tmp_path: Path) -> None:
    found = planned(fresh_document(), tmp_path)
    assert found.market is not None
    dear_usd = 10 * found.market.columns[0].usd
    dear = found.priced(dear_usd, 2 * dear_usd)
    assert dear.risk().outcomes.spot_usd.mean() > 5 * found.risk().outcomes.spot_usd.mean()
    assert len(found.columns) > 1
    assert found.priced(dear_usd, None).risk().outcomes.spot_usd.max() == 0, "dearer than on demand: it waits"


def test_all_strategies_are_beside_it_from_the_same_starts(tmp_path: Path) -> None:
    plan = planning.plan(small(places=ZONAL), request(gpu="V100", deadline_s=2 * DUE_S))
    document = beside(planned(plan, tmp_path).started(30), strategies=NAMES).to_json()
    by_name = {row["name"]: row for row in document["strategies"]}
    assert list(by_name) == list(NAMES)
    assert document["starts"] == 30
    assert document["coverage"] is None
    assert by_name["planned"]["cost_usd"]["mean"] == planned(plan, tmp_path).started(30).risk().mean_usd
    assert all(row["regret"] > -1e-6 for row in by_name.values() if row["missed"] == 0)
    json.dumps(document, allow_nan=False)


def test_a_plan_of_on_demand_machines_is_beside_a_drawn_market(tmp_path: Path) -> None:
    plan = planning.plan(small(), request(architectures=("all-on-demand",), gpu="V100"))
    found = planned(plan, tmp_path)
    document = beside(found, strategies=("planned", "tiering")).to_json()
    expected = plan.recommendations[0].expected
    assert expected is not None
    assert document["strategies"][0]["cost_usd"]["mean"] == expected.cost_usd
    assert document["history"]["note"] == "on-demand machines are assumed to be there, and to stay"
    assert document["markets"][0]["market"].startswith("a drawn market of V100")
    cheap = beside(found.priced(0.01, None), strategies=("planned", "tiering")).to_json()
    assert cheap["strategies"][0]["cost_usd"] == document["strategies"][0]["cost_usd"]
    assert cheap["strategies"][1]["cost_usd"]["mean"] < document["strategies"][1]["cost_usd"]["mean"]
    assert not any("70% of the on-demand price" in note for note in cheap["notes"])
    assert found.seeded(7) is found, "nothing is drawn"
    with pytest.raises(UsageError, match="no spot machines"):
        found.on_traces(traces([16] * 100))


def test_a_gang_that_shrinks_is_simulated_where_it_never_is_whole(tmp_path: Path) -> None:
    fast = request(gpu="V100", architectures=("all-spot",), objective="throughput")
    document = planning.plan(small(), fast).to_json()
    document["recommendations"][0]["conduct"].update(at_loss="shrink", least_workers=1)
    found = planned(document, tmp_path)
    assert found.job.machines == 4
    few = found.on_traces(traces([2, 2, 2, 1] * 500)).started(20)
    rows = {row["name"]: row for row in beside(few, strategies=NAMES).to_json()["strategies"]}
    assert rows["planned"]["missed"] == 0
    assert rows["tiering"]["missed"] == 1


def test_long_jobs_have_a_bound_from_some_of_the_starts(tmp_path: Path) -> None:
    plan = planning.plan(small(), request(gpu="V100", architectures=("all-spot",), work_eflops_h=20 * WORK))
    found = beside(planned(plan, tmp_path), strategies=("planned", "oracle"))
    assert 8 <= len(found.markets[0].bounded) < 384
    assert any("the oracle looks at" in note for note in found.notes)


def test_announced_losses_lose_less_where_a_save_fits(tmp_path: Path) -> None:
    document = fresh_document()
    found = planned(document, tmp_path)
    told = [found.told(share, 120.0).risk().outcomes.lost_h.mean() for share in (0.0, 0.5, 1.0)]
    assert told[0] > told[1] > told[2]
    assert found.told(None, None).risk().outcomes.lost_h.mean() == told[0], "nobody promises a notice"
    figures = found.written.figures
    slow = replace(figures, overheads=replace(figures.overheads, remote_s=200.0))
    late = replace(found, written=replace(found.written, figures=slow))
    assert late.told(1.0, 120.0).strategy.notices is not None
    left, never = (late.told(share, 120.0).risk().mean_h for share in (1.0, 0.0))
    assert left >= never, "a save of 200 s does not fit, and the machine leaves all the same"
    del document["recommendations"][0]["replay"]["notice_s"]
    with pytest.raises(MalformedFile, match="notice_s"):
        planned(document, tmp_path)


def test_plans_without_a_conduct_have_none(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(planning.plan(small(), request(market="none")).to_json()), encoding="utf-8")
    assert read_planned(path) is None


def test_a_plan_may_have_100000_starts(tmp_path: Path) -> None:
    document = fresh_document()
    document["recommendations"][0]["replay"]["starts"] = 100_000
    assert planned(document, tmp_path).written.starts == 100_000


@pytest.mark.parametrize(
    ("where", "value", "told"),
    [
        ("replay.speeds", [0.0], "speeds has 1 figures"),
        ("replay.machines", 0, "machines is 0"),
        ("replay.starts", 100_001, "starts is 100001"),
        ("replay.overheads", {}, "'start_s' is missing"),
        ("replay.overheads.stall_s", "long", "stall_s is"),
        ("replay.market.zones", [], "no zones"),
        ("replay.market.zones.0.drawn", 99, "drawn is 99"),
        ("replay.market.zones.0.usd", -1.0, "usd is -1.0"),
        ("replay.market.draw.regions", [["r-1"]], "a region's zones"),
        ("replay.market.draw.regions", [["r-1", 10**9]], "a region's zones"),
        ("replay.market.draw.worlds", 10**6, "worlds is"),
        ("conduct.at_loss", "pray", "at_loss is 'pray', not one of wait, shrink"),
        ("conduct.save", "sometimes", "sometimes"),
        ("conduct.least_workers", 1.5, "least_workers is 1.5"),
        ("performance", 0, "performance is 0, not a number from 1e-09"),
        ("replay.machines", 2, "speeds has 4 figures: it needs 3"),
        ("replay.replicas", 1, "replicas is 0, and its replay is of 1"),
        ("roles.0.count", 9, "its replay has 3 machines, and its roles 9 that train"),
        ("roles.0.region", None, "region is None"),
    ],
)
def test_damaged_plans_are_one_sentence(where: str, value: Any, told: str, tmp_path: Path) -> None:
    document = fresh_document()
    *folders, name = where.split(".")
    at = document["recommendations"][0]
    for folder in folders:
        at = at[int(folder)] if folder.isdecimal() else at[folder]
    at[int(name) if name.isdecimal() else name] = value
    with pytest.raises((MalformedFile, UsageError)) as caught:
        planned(document, tmp_path).risk()
    assert told in str(caught.value)
