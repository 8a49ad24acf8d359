"""``deepvm plan`` under a spot market: its JSON, what it draws, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepvm.cli.app import run
from deepvm.performance.measured import Machine, Provenance, Samples
from deepvm.performance.profile import OverheadPoint, Profile
from deepvm.policy import parse_policy
from deepvm.simulate.inputs.planned_cluster import machines_of

WORK = "plan --budget 20 --work 40h@g4dn.xlarge --objective cost --gpu T4"


def test_json_has_what_to_expect_its_distribution_and_its_reasons(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    figure, plan = tmp_path / "risk.svg", tmp_path / "plan.json"
    more = f"--deadline 24h --confidence 0.9 --risk --explain --json --figure {figure} -o {plan}"
    assert run([*WORK.split(), *more.split()]) == 0
    document = json.loads(capsys.readouterr().out)
    first = document["recommendations"][0]
    assert first["expected"]["missed"] <= 0.1
    assert first["objective"] == {"name": "cost", "value": first["expected"]["cost_usd"]["mean"]}
    parse_policy(first["conduct"]["save"])
    assert sum(document["risk"]["hours"]["share"]) == pytest.approx(1)
    assert document["explanation"]["risk"]["preemption"]["what"] == "preemption"
    assert document["request"]["confidence"] == 0.9
    assert figure.read_text(encoding="utf-8").startswith("<?xml")
    assert json.loads(plan.read_text(encoding="utf-8")) == document
    assert machines_of(plan).workers == first["nodes"]


def test_the_terminal_shows_conduct_distribution_and_what_preemption_costs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*WORK.split(), "--deadline", "24h", "--risk", "--explain"]) == 0
    shown = capsys.readouterr().out
    for part in ("conduct: ", "if the market has none: ", "Cost  over ", "Time  over ", "deadline 24 h", "price age"):
        assert part in shown


def test_a_plan_on_demand_has_no_history_to_lack(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*WORK.split(), "--architecture", "all-on-demand"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "on-demand machines are assumed to be there, and to stay" in shown
    assert "not enough history" not in shown


def test_the_drift_of_spot_prices_concerns_plans_with_spot_machines_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*WORK.split(), "--architecture", "all-on-demand", "--explain"]) == 0
    shown = capsys.readouterr().out
    assert "on-demand:" in shown
    assert "price age" not in shown


def test_the_front_has_the_architectures_of_the_decision(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan --budget 0.9 --work 5h@g4dn.xlarge --objective time --gpu T4 --pareto --json"
    assert run(words.split()) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["recommendations"][0]["performance"] <= document["pareto"][-1]["performance"]
    assert "all-spot" in {best["architecture"] for best in document["pareto"]}


def test_profiles_without_a_rated_machine_say_what_they_change(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    measured = Profile(
        workload="checkpoints",
        provenance=Provenance(machine=Machine(cpu="a cpu", cores=2), date="2026-11-18", versions={"deepvm": "0"}),
        overheads=(OverheadPoint(name="start", state_bytes=300_000_000, seconds=Samples((400.0,))),),
    )
    measured.write(tmp_path / "profile.json")
    assert run([*WORK.split(), "--profile", str(tmp_path / "profile.json")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "the profiles say only what starts, saves and restores take" in shown


def test_cost_alone_is_answered_with_advice(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*WORK.split(), "--json"]) == 0
    assert any("--deadline" in line for line in json.loads(capsys.readouterr().out)["advice"])


def test_recorded_traces_replace_the_market(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "availability" / "16-node" / "set"
    folder.mkdir(parents=True)
    trace = {"metadata": {"gap_seconds": 600}, "data": [16] * 2000}
    (folder / "us-east-1a_T4_1.json").write_text(json.dumps(trace), encoding="utf-8")
    assert run([*WORK.split(), "--traces", str(tmp_path), "--meaning", "up", "--json"]) == 0
    history = json.loads(capsys.readouterr().out)["recommendations"][0]["expected"]["history"]
    assert (round(history["days"], 1), history["zones"], history["enough"]) == (13.9, 1, False)


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (f"{WORK} --deadline 1min", 3, "the nearest that can be kept is"),
        (f"{WORK} --confidence 0.9", 2, "--confidence has no effect without --deadline"),
        (f"{WORK} --deadline 24h --confidence 95", 2, "it must be between 0 and 1"),
        (f"{WORK} --usd-per-hour-of-waiting=-1", 2, "-1"),
        ("plan --budget 3 --risk", 2, "--risk needs a spot market: give --work"),
        ("plan --budget 3 --notices 0.5", 2, "--notices needs a spot market: give --work"),
        ("plan --budget 3 --seed 9", 2, "--seed needs a spot market: give --work"),
        (f"{WORK} --market none --notices 0", 2, "--notices needs a spot market: leave --market none out"),
        (f"{WORK} --market none --deadline 24h --confidence 0.9", 2, "--confidence needs a spot market"),
        (f"{WORK} --market none --figure risk.svg", 2, "--figure needs a spot market"),
        (f"{WORK} --market none --risk", 2, "leave --market none out"),
        (
            "plan --budget 3 --catalog paper-aws-2023 --objective flopp --work 40h@g4dn.xlarge --risk",
            2,
            "flopp has none",
        ),
        ("plan --budget 3 --catalog paper-aws-2023 --work 40h@g4dn.xlarge --risk", 2, "need --market built-in"),
        (f"{WORK} --meaning up", 2, "--meaning has no effect without --traces"),
        (f"{WORK} --traces .", 2, "write --meaning up"),
        (f"{WORK} --market spot", 2, "no market is called"),
    ],
)
def test_what_cannot_be_is_told_in_a_sentence(
    words: str, code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words.split()) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert told in " ".join(shown.err.split())
