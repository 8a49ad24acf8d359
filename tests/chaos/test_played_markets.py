"""Runs in recorded markets: the gang moves and comes back, and the simulator says of a run what happened in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.recovery.agreement import compare
from deepvm.runtime.ledger.ledger import Ledger
from deepvm.runtime.ledger.market_record import market_traces
from tests.support.runtime.whole_runs import check_repeats, running, undisturbed, weights, words_for, write_plan

STEPS = 260
A, B = "us-east-1a", "us-east-1b"

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1500)]


def write_market(folder: Path) -> None:
    """Two zones in ticks of a second, at a speed of 600: the cheaper one is down from the 20th to the 45th second."""
    folder.mkdir()
    for zone, data, usd in ((A, [2] * 20 + [0] * 25 + [2] * 1000, 0.10), (B, [2] * 1045, 0.16)):
        document = {"metadata": {"gap_seconds": 600}, "data": data, "prices": [usd] * len(data)}
        (folder / f"{zone}_T4_1.json").write_text(json.dumps(document), encoding="utf-8")


def write_planned(folder: Path) -> None:
    path = write_plan(folder)
    plan = json.loads(path.read_text(encoding="utf-8"))
    plan["recommendations"][0]["conduct"] = {
        "zones": [A, B], "at_loss": "wait", "least_workers": 17, "save": "every 10 steps or at notice",
        "tier": "memory", "replicas": 1, "fallback": "none",
    }  # fmt: skip
    path.write_text(json.dumps(plan), encoding="utf-8")


def test_a_gang_moves_when_its_zone_is_down_and_returns_when_that_is_cheaper_again(tmp_path: Path) -> None:
    write_market(tmp_path / "market")
    write_planned(tmp_path)
    options = ["--preempt", f"market:{tmp_path / 'market'}:meaning=up:speed=600", "--json"]
    words = words_for(tmp_path, "run", STEPS, "--step-s", "0.25", options=options)
    words = [word for word in words if word not in ("--save", "every 10 steps or at notice")]  # the plan's own
    with running(tmp_path, words, name="run") as run:
        code, out, err = run.end(600.0)
    assert code == 0, err
    report = json.loads(out)
    assert report["conduct"]["save"] == {"policy": "every 10 steps or at notice", "by": "plan"}
    assert weights(tmp_path, "run") == undisturbed(tmp_path, STEPS)
    assert {loss["why"] for loss in report["losses"]} == {"preempted"}
    there, back = run.events("replanned")
    assert f"moves from {A}" in there.data["changes"][0]
    assert f"moves from {B}" in back.data["changes"][0]
    assert any("the move is paid after" in change for change in back.data["changes"])
    saved = [event.data["step"] for event in run.events("save") if event.at_s < back.at_s]
    assert max(saved) == max(event.data["step"] for event in run.events("step") if event.at_s < back.at_s)
    assert check_repeats(run.events()) == report["steps"]["repeated"] == report["steps"]["lost"]
    with Ledger.open(run.ledger) as ledger:
        traces = market_traces(ledger.events(), ledger.cluster, 1.0)
    assert [trace.zone for trace in traces] == [A, B, A]
    assert traces[0].up[0] == 2
    assert traces[0].prices is not None
    assert {float(usd) for usd in traces[0].prices} == {0.1}


def test_a_gang_that_the_market_keeps_waiting_goes_on_demand_and_no_step_is_lost_by_that(tmp_path: Path) -> None:
    """The market has no machine from the 25th second on."""
    speed, deadline_s, work_s = 600, 220.0, 60.0
    (tmp_path / "market").mkdir()
    up = [2] * 25 + [0] * 2000
    document = {"metadata": {"gap_seconds": 600}, "data": up, "prices": [0.1] * len(up)}
    (tmp_path / "market" / f"{A}_T4_1.json").write_text(json.dumps(document), encoding="utf-8")
    path = write_plan(tmp_path)
    plan = json.loads(path.read_text(encoding="utf-8"))
    best = plan["recommendations"][0]
    best["conduct"] = {
        "zones": [A], "at_loss": "wait", "least_workers": 17, "save": "every 10 steps or at notice",
        "tier": "memory", "replicas": 1, "fallback": "on-demand at the last moment", "fallback_tries": 2,
    }  # fmt: skip
    plan["request"] |= {
        "work_eflops_h": best["performance"] * work_s * speed / 3600, "deadline_s": deadline_s * speed,
    }  # fmt: skip
    path.write_text(json.dumps(plan), encoding="utf-8")
    played = f"market:{tmp_path / 'market'}:meaning=up:speed={speed}"
    options = ["--steps", str(STEPS), "--preempt", played, "--json"]
    words = words_for(tmp_path, "run", STEPS, "--step-s", "0.25", options=options)
    words = [word for word in words if word not in ("--save", "every 10 steps or at notice")]  # the plan's own
    with running(tmp_path, words, name="run") as run:
        code, out, err = run.end(600.0)
    assert code == 0, err
    report = json.loads(out)
    assert weights(tmp_path, "run") == undisturbed(tmp_path, STEPS)
    assert check_repeats(run.events()) == report["steps"]["repeated"] == report["steps"]["lost"]
    (hired,) = run.events("replanned")
    assert "goes on demand" in hired.data["changes"][0]
    asked = [event for event in run.events("machine-asked") if event.machine == "worker/0"]
    assert [event.data["market"] for event in asked[:2]] == ["spot", "on-demand"]
    assert [event.data["usd_per_hour"] for event in asked[:2]] == [0.1, asked[0].data["on_demand_usd_per_hour"]]
    worker = next(role for role in report["bill"]["roles"] if role["role"] == "worker")
    assert 0 < worker["fallback_usd"] < worker["usd"]
    with Ledger.open(run.ledger) as ledger:
        traces = market_traces(ledger.events(), ledger.cluster, 1.0)
    assert traces[0].up[0] == 2


def test_a_plan_without_memory_nodes_keeps_its_checkpoints_in_the_durable_store(tmp_path: Path) -> None:
    path = write_plan(tmp_path)
    plan = json.loads(path.read_text(encoding="utf-8"))
    best = plan["recommendations"][0]
    best["roles"] = [role for role in best["roles"] if role["role"] != "memory"]
    best["conduct"] = {
        "zones": ["us-east-1"],
        "at_loss": "wait",
        "least_workers": 17,
        "save": "every 10 steps",
        "tier": "durable",
        "replicas": 0,
        "fallback": "none",
    }
    path.write_text(json.dumps(plan), encoding="utf-8")
    words = words_for(tmp_path, "run", 60, options=["--preempt", "at:step:25:worker/1:notice=0s"])
    with running(tmp_path, words, name="run") as run:
        _, err = run.process.communicate(timeout=60.0)
    assert run.process.returncode == 2
    assert "give a durable store with --durable" in err
    words[words.index("--") : words.index("--")] = ["--durable", str(tmp_path / "kept")]
    with running(tmp_path, words, name="run") as run:
        code, _, err = run.end()
    assert code == 0, err
    assert weights(tmp_path, "run") == undisturbed(tmp_path, 60)
    check_repeats(run.events())
    assert all(event.data["place"].startswith("file://") for event in run.events("restored"))


def test_the_simulator_loses_the_same_steps_as_a_run_and_takes_as_long(tmp_path: Path) -> None:
    found = compare(tmp_path)
    assert found.steady, f"starts took {found.starts_s} s: this machine is too busy to tell which step is lost"
    assert found.run.losses == found.replay.losses == 3
    assert found.replay.steps_lost == found.run.steps_lost
    assert abs(found.makespan_error) < 0.1, found
