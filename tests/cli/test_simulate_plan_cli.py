"""``deepvm simulate plan.json``: the plan's own conduct and figures, options that change them, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deepvm.cli.app import run
from deepvm.performance.measured import Machine, Provenance, Samples
from deepvm.performance.profile import OverheadPoint, Profile
from deepvm.simulate.strategies import NAMES

WORK = "plan --budget 20 --work 40h@g4dn.xlarge --objective cost --gpu T4 --deadline 24h --json"


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    assert run([*WORK.split(), "-o", str(path)]) == 0
    return path


def simulated(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert run(["simulate", *words, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def row(document: dict[str, Any], name: str = "planned") -> dict[str, Any]:
    return dict(next(row for row in document["strategies"] if row["name"] == name))


def figures(found: dict[str, Any]) -> dict[str, Any]:
    return {name: found[name] for name in ("cost_usd", "hours", "missed", "lost_hours", "moves")}


def test_a_plan_is_simulated_as_it_was_planned(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = json.loads(plan.read_text(encoding="utf-8"))["recommendations"][0]["expected"]
    document = simulated(capsys, str(plan))
    assert figures(row(document)) == figures(expected)
    assert [one["name"] for one in document["strategies"]] == ["on-demand", "planned", "oracle"]
    assert any("the plan's own conduct" in note for note in document["notes"])
    assert document["starts"] == 384


def test_others_are_beside_it_with_compare(plan: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    figure = tmp_path / "out.svg"
    document = simulated(capsys, str(plan), "--compare", "--runs", "20", "--figure", str(figure))
    assert [one["name"] for one in document["strategies"]] == list(NAMES)
    assert figure.read_text(encoding="utf-8").startswith("<?xml")
    assert run(["simulate", str(plan), "--runs", "20"]) == 0
    shown = capsys.readouterr().out
    for part in ("planned", "the plan's market of T4", "the plan expected $"):
        assert part in shown
    assert "confidence: not enough history" in shown, "nobody traced a T4"


def test_options_change_what_is_replayed(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    usual = row(simulated(capsys, str(plan)))
    assert row(simulated(capsys, str(plan), "--seed", "7")) != usual
    assert row(simulated(capsys, str(plan), "--seed", "0")) == usual, "the seed of the plan"
    half = row(simulated(capsys, str(plan), "--work", "1h"))
    assert half["hours"]["p50"] < usual["hours"]["p50"]
    told = row(simulated(capsys, str(plan), "--notices", "1"))
    assert told["lost_hours"] < usual["lost_hours"]
    assert any(
        "counts on 100% of the losses" in note for note in simulated(capsys, str(plan), "--notices", "1")["notes"]
    )
    other = simulated(capsys, str(plan), "--workers", "3", "--runs", "5")
    assert any("--workers is given" in note for note in other["notes"])


def test_what_was_measured_replaces_the_overheads_of_the_plan(
    plan: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    profile = Profile(
        workload="checkpoints",
        provenance=Provenance(machine=Machine(cpu="a cpu", cores=2), date="2026-11-18", versions={"deepvm": "0"}),
        overheads=(OverheadPoint(name="start", state_bytes=300_000_000, seconds=Samples((400.0,))),),
    )
    slow = tmp_path / "profile.json"
    slow.write_text(json.dumps(profile.to_json()), encoding="utf-8")
    usual, measured = (row(simulated(capsys, str(plan), *more)) for more in ((), ("--profile", str(slow))))
    assert measured["hours"]["p5"] > usual["hours"]["p5"] + 300 / 3600


def test_a_plan_with_a_profile_is_simulated_with_it_as_it_was_planned(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    seconds = {"start": 300.0, "first_step": 5.0, "detection": 20.0, "regroup": 3.0, "restore": 30.0}
    seconds |= {"save_stall": 0.5, "save_remote": 12.0, "save_durable": 40.0}
    points = tuple(
        OverheadPoint(name=name, state_bytes=300_000_000, seconds=Samples((each,))) for name, each in seconds.items()
    )
    slow, path = tmp_path / "profile.json", tmp_path / "plan.json"
    Profile(
        workload="checkpoints",
        provenance=Provenance(machine=Machine(cpu="a cpu", cores=2), date="2026-11-18", versions={"deepvm": "0"}),
        overheads=points,
    ).write(slow)
    assert run([*WORK.split(), "--profile", str(slow), "-o", str(path)]) == 0
    best = json.loads(path.read_text(encoding="utf-8"))["recommendations"][0]
    over = best["replay"]["overheads"]
    assert over["start_s"] == 90 + 305
    assert over["regroup_s"] == 23
    assert over["restore_s"] == 30
    assert over["remote_s"] == (40 if best["conduct"]["tier"] == "durable" else 12)
    assert figures(row(simulated(capsys, str(path)))) == figures(best["expected"])
    assert figures(row(simulated(capsys, str(path), "--profile", str(slow)))) == figures(best["expected"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--days 10", "--days has no effect on a plan with a market of its own"),
        ("--gpu V100", "--gpu has no effect on a plan"),
        ("--meaning up", "--meaning has no effect without --traces"),
        ("--usd-per-hour-of-waiting 5", "--usd-per-hour-of-waiting has no effect on a plan's own conduct"),
        ("--notice 30s", "--notice has no effect without --notices"),
        ("--notices 1.5", "notices is 1.5"),
        ("--deadline 200000h", "too long to be replayed"),
        ("--seed -1", "the seed is negative"),
        ("--seed -2", "the seed is negative"),
        ("--seed 9223372036854775808", "the seed is too large"),
    ],
)
def test_what_cannot_be_is_told_in_a_sentence(
    words: str, told: str, plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["simulate", str(plan), *words.split()]) == 2
    assert told in " ".join(capsys.readouterr().err.split())


def test_a_budget_below_the_price_on_demand_leaves_that_strategy_out(
    plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads(plan.read_text(encoding="utf-8"))
    worker = next(role for role in document["recommendations"][0]["roles"] if role["role"] == "worker")
    usd = next(one["on_demand_usd"] for one in document["instances"] if one["instance"] == worker["instance"])
    found = simulated(capsys, str(plan), "--budget", f"{usd - 0.01}", "--runs", "5")
    assert [one["name"] for one in found["strategies"]] == ["planned", "oracle"]
    assert any("on-demand is left out: the budget pays no on-demand machine" in note for note in found["notes"])


def test_a_gang_waits_where_spot_machines_cost_more_than_on_demand_ones(
    plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usual, dear = (row(simulated(capsys, str(plan), *more)) for more in ((), ("--spot-price", "100")))
    assert dear["cost_usd"]["p95"] < 5 * usual["cost_usd"]["p95"], "on-demand machines alone"


def test_notices_without_a_plan_need_their_time(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "--workers", "4", "--gpu", "V100", "--work", "6h", "--runs", "20", "--days", "10", "--compare"]
    assert run([*words, "--notices", "1"]) == 2
    assert "--notices needs --notice" in capsys.readouterr().err
    usual, told = (simulated(capsys, *words[1:], *more) for more in ((), ("--notices", "1", "--notice", "120s")))
    assert row(told, "tiering")["lost_hours"] < row(usual, "tiering")["lost_hours"]
    assert row(told, "no-checkpoint")["hours"] == pytest.approx(row(usual, "no-checkpoint")["hours"], rel=0.2)


def test_a_plan_on_traces_is_simulated_on_the_same_ones(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder, path = tmp_path / "availability" / "16-node" / "set", tmp_path / "plan.json"
    folder.mkdir(parents=True)
    trace = {"metadata": {"gap_seconds": 600}, "data": ([16] * 20 + [0] * 3) * 90}
    (folder / "us-east-1a_T4_1.json").write_text(json.dumps(trace), encoding="utf-8")
    recorded = ["--traces", str(tmp_path / "availability"), "--meaning", "up"]
    assert run([*WORK.split(), *recorded, "-o", str(path)]) == 0
    expected = json.loads(path.read_text(encoding="utf-8"))["recommendations"][0]["expected"]
    document = simulated(capsys, str(path), *recorded)
    assert figures(row(document)) == figures(expected)
    assert expected["lost_hours"] > 0
    elsewhere = simulated(capsys, str(path))
    assert any("was replayed on the traces 16-node/set" in note for note in elsewhere["notes"]), elsewhere["notes"]
    assert figures(row(elsewhere)) != figures(expected)
