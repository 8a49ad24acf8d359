"""Whole screens of plan, sweep, simulate, profile and calibrate."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepvm import plan as planning
from deepvm.calibrate.profile_file import ProfileFile
from deepvm.catalog import load
from deepvm.cli.app import run
from deepvm.cli.plan import restore_text
from deepvm.cli.risk import shown
from deepvm.cli.risk.figure import draw_risk
from deepvm.market.builtin import History
from deepvm.performance.job import Component, Job
from deepvm.performance.measured import Machine, Provenance, Samples
from deepvm.performance.profile import OVERHEADS, ComputePoint, NetworkPoint, OverheadPoint, Profile, ScalingPoint
from deepvm.plan.explain import Figure, PriceAge, QuotaRaise
from deepvm.plan.result import Expected
from deepvm.plan.risk.reasons import Change, RiskReasons
from deepvm.policy.conduct import LAST_MOMENT, Conduct
from deepvm.simulate.outcome import Outcomes
from deepvm.simulate.risk import Risk
from deepvm.simulate.strategy import Strategy
from tests.cli.conftest import DAY, Screen
from tests.cli.test_calibrate_cli import PROFILE
from tests.support.drawings import recorded
from tests.support.golden import same_as_file

pytestmark = pytest.mark.usefixtures("terminal")
DRAWINGS = Path(__file__).with_name("screens")


def deepvm(*words: object, code: int = 0) -> None:
    assert run([str(word) for word in words]) == code


def expected(hours: list[float], dollars: list[float], *, late: bool = True, enough: bool = True) -> Expected:
    count = len(hours)
    nothing = np.zeros(count)
    outcomes = Outcomes(
        hours=np.array(hours), spot_usd=np.array(dollars), on_demand_usd=nothing, keeper_usd=nothing,
        transfer_usd=nothing, lost_h=nothing + 0.25, trained_h=nothing + 1, losses=np.zeros(count, np.int64),
        moves=np.zeros(count, np.int64), on_demand_h=nothing, waiting_h=nothing, finished=np.ones(count, bool),
    )  # fmt: skip
    history = History(days=30.0 if enough else 2.0, zones=3, origin="traces")
    risk = Risk(strategy=Strategy(name="s"), outcomes=outcomes, deadline_h=7.0 if late else None, history=history)
    return Expected(risk=risk, notes=() if enough else ("a note",))


CONDUCT = Conduct(
    zones=("us-east-1a",), way_back=None, ceiling=None, at_loss="wait", least_workers=4, save="every 60s",
    tier="memory", replicas=2, fallback="none",
)  # fmt: skip
MOVING = replace(
    CONDUCT, zones=("us-east-1a", "us-east-1b"), at_loss="shrink", least_workers=2, tier="durable", replicas=0,
    fallback=LAST_MOMENT,
)  # fmt: skip
SPREAD = expected([4.0, 5.0, 5.5, 6.0, 7.0, 8.0, 10.0, 4.5], [10.0, 12.0, 12.5, 13.0, 14.0, 15.0, 1500.0, 11.0])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("paper", "--budget 3 --catalog paper-aws-2023"),
        ("flopp", "--budget 3 --catalog paper-aws-2023 --explain --pareto --objective flopp --top 2 -o plan.json"),
        ("quota", "--budget 3 --catalog paper-aws-2023 --explain --quota G:spot=16 --region us-east-1"),
        ("virtual", "--budget 6 --catalog paper-virtual --explain --policy cost-first --top 1"),
        ("job", "--budget 2 --catalog paper-aws-2023 --explain --job job.json --min-gpu-memory 20"),
    ],
)
def test_plans(name: str, words: str, screen: Screen) -> None:
    job = Job(
        name="j", parameters=3, trainable_parameters=3, components={"model": Component(bytes=3 * 10**8)},
        gradient_bytes=10**8, batch=32,
    )  # fmt: skip
    job.write(Path("job.json"))
    deepvm("plan", *words.split())
    screen(f"plan-{name}")
    if "-o" in words:
        assert json.loads(Path("plan.json").read_text())["recommendations"][1]["rank"] == 2


def planned(budget_usd: float = 3.0) -> tuple[planning.Plan, planning.Explanation]:
    catalog = load("paper-aws-2023")
    plan = planning.plan(catalog, planning.Request(budget_usd=budget_usd, top=2))
    return plan, planning.explain(catalog, plan, DAY)


def test_a_plan_under_a_market(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, why = planned()
    first, second = plan.recommendations
    plan = replace(
        plan,
        recommendations=(
            replace(
                first, expected=SPREAD, conduct=CONDUCT, traffic_usd_per_hour=0.0125, estimates=("eFLOPS of [x]", "a"),
                roles=tuple(replace(role, seen=date(2026, 6, 22), zone="us-east-1a") for role in first.roles),
            ),
            replace(second, expected=expected([5.0], [3.0], late=False), conduct=MOVING),
        ),
        failover=(first, replace(second, roles=tuple(replace(r, zone="us-east-1c") for r in second.roles))),
        advice=("Give a --deadline.", "[bold]Another"),
    )  # fmt: skip
    reasons = RiskReasons(
        preemption=Change(what="preemption", usd=3.2, hours=1.4),
        tier=Change(what="memory instead of a store", usd=-1.0, hours=0.25),
        zone=Change(what="one zone more", usd=0.0, hours=-0.5),
        fallback="no machines on demand", prices="prices are old", guess="not enough history",
    )  # fmt: skip
    why = replace(
        why, risk=reasons, batch="64 samples", flip_usd=None, runner_up=None, dollar_more_gain=0.0,
        figures=(
            Figure(name="checkpoint_bytes", value=3e8, origin="measured"),
            Figure(name="step_s", value=0.5, origin="guessed", low=0.25, high=1.0),
            Figure(name="gpu_memory_bytes", value=None, origin="not known"),
        ),
        quota_raises=(QuotaRaise(quota="G spot", vcpus=16.0, wanted_vcpus=32.0, performance=2.0, gain=0.5),),
        price_ages=(PriceAge(instance="g4dn.xlarge", market="spot", seen=date(2026, 6, 22), days=61),),
    )  # fmt: skip
    monkeypatch.setattr(planning, "plan", lambda _, request, **__: replace(plan, request=request))
    monkeypatch.setattr(planning, "explain", lambda *_: why)
    under = "--budget 3 --work 1h@g4dn.xlarge --deadline 7h --objective cost"
    words = ["plan", *under.split(), "--risk", "--explain"]
    with recorded() as drawings:
        deepvm(*words, "--figure", "risk.svg", "-o", "plan.json")
    screen("plan-under-a-market")
    same_as_file("".join(drawings.values()), DRAWINGS / "plan-risk-figure.txt")
    deepvm(*words, "--json")
    screen("plan-under-a-market-json")


def test_a_single_outcome_is_one_bar(tmp_path: Path, screen: Screen) -> None:
    one = expected([4.0], [10.0], late=False, enough=False)
    with recorded() as drawings:
        draw_risk(one, tmp_path / "f.svg", title="one", deadline_h=None)
    same_as_file("".join(drawings.values()), DRAWINGS / "plan-risk-figure-of-one.txt")
    shown.show_distribution(one, None)
    screen("plan-risk-of-one")
    assert shown.cells(one) == ["10.00", "10.00", "4.0", "4.0", "0.0%"]


def test_conducts_and_changes_in_words() -> None:
    assert shown.conduct_text(CONDUCT, 4) == (
        "in us-east-1a; at a loss waits for all 4 machines; saves every 60s into memory nodes with 2 replicas; "
        "no on-demand fallback"
    )
    assert shown.conduct_text(MOVING, 4) == (
        "moves between us-east-1a, us-east-1b; at a loss shrinks to 2 machines; saves every 60s into a durable store; "
        "on-demand at the last moment"
    )
    one = shown.conduct_text(replace(CONDUCT, replicas=1, tier="anchor"), 1)
    assert "waits for 1 machine; saves every 60s into the memory of the anchor; no" in one
    signs = ((3.2, 1.4), (-3.2, -1.4), (3.2, -1.4), (-3.2, 0.0), (0.0, 0.0))
    assert [shown.change_text(Change(what="x", usd=usd, hours=hours)) for usd, hours in signs] == [
        "x costs $3.2000 and 1.40 h",
        "x saves $3.2000 and 1.40 h",
        "x costs $3.2000 and saves 1.40 h",
        "x saves $3.2000 and costs 0.00 h",
        "x costs $0.0000 and 0.00 h",
    ]
    nothing = RiskReasons(preemption=None, tier=None, zone=None, fallback=None, prices=None, guess=None)
    assert list(shown.reason_rows(nothing)) == []


def test_the_forecast_of_a_restore_in_words() -> None:
    restore = planned()[0].recommendations[0].restore
    assert restore is not None
    assert restore_text(restore).endswith("overlapped and on demand")
    assert restore_text(replace(restore, measured=("start", "first_step"))).endswith("; measured: start, first step")


def test_sweeps(screen: Screen) -> None:
    common = "--from 0 --to 6 --step 0.25 --catalog paper-virtual"
    deepvm("sweep", *common.split(), "-o", "points.csv")
    deepvm("sweep", *common.split(), "-o", "points.csv", "--policy", "noscale", "--policy", "deepvm")
    screen("sweep")
    assert len(Path("points.csv").read_text().splitlines()) == 1 + 2 * 25
    with recorded() as drawings:
        deepvm("sweep", *common.split(), "--figure", "f.svg", "--objective", "flopp")
    assert list(drawings) == ["paper-virtual, by flopp"]
    screen("sweep-by-flopp")


JOB = Job(
    name="train [x].py", parameters=1_000_000, trainable_parameters=900_000,
    components={"model": Component(bytes=4_000_000, changed_bytes=3_600_000),
                "optimizer": Component(bytes=7_200_000, changed_bytes=7_200_000)},
    gradient_bytes=3_600_000, batch=32, step_s=Samples((0.1, 0.2, 0.4)), data_share=0.125, flops_per_step=2.5e12,
    memory_bytes=20_000_000, memory_parts={"weights": 4_000_000, "activations": 16_000_000},
    host_memory_bytes=10**9, precision="bf16", parallel="fsdp",
    origins={"components": "measured", "gradient_bytes": "measured", "flops_per_step": "measured",
             "memory_bytes": "guessed"},
    notes=("the script itself created [x]",),
)  # fmt: skip


def test_profiled_jobs(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    found = {"train.py": JOB}

    def profile(words: list[str], *, progress: Any, **how: Any) -> Job:
        progress(1, 15)
        asked.append((words, how))
        return found[words[0]]

    monkeypatch.setattr("deepvm.cli.calibrate.profile.profile_script", profile)
    deepvm("profile", "-o", "job.json", "--", "train.py", "--lr", "1")
    assert JOB.to_json() == json.loads(Path("job.json").read_text())
    plain = replace(
        JOB, trainable_parameters=10**6, components={"model": Component(bytes=4_000_000)}, step_s=None, data_share=None,
        flops_per_step=999_999.0, memory_bytes=None, host_memory_bytes=None, origins={}, notes=(),
    )  # fmt: skip
    found["plain.py"] = plain
    deepvm("profile", "--steps", "4", "--warmup", "2", "--timeout", "1min", "--parallel", "fsdp", "--", "plain.py")
    found["bare.py"] = replace(plain, batch=None, flops_per_step=None, step_s=Samples((0.5,)))
    deepvm("profile", "--", "bare.py")
    found["big.py"] = replace(JOB, flops_per_step=3e15, step_s=Samples((1e-9,)), notes=())
    deepvm("profile", "--", "big.py")
    deepvm("profile", "--model", "resnet18", "--batch", "4", "--optimizer", "sgd")
    screen("profile")
    usual = {"steps": 10, "warmup": 3, "timeout_s": 600.0, "parallel": None}
    assert asked == [
        (["train.py", "--lr", "1"], usual),
        (["plain.py"], {"steps": 4, "warmup": 2, "timeout_s": 60.0, "parallel": "fsdp"}),
        (["bare.py"], usual),
        (["big.py"], usual),
    ]


def test_profiles_of_machines(screen: Screen) -> None:
    PROFILE.write(Path("whole.json"))
    bare = replace(
        PROFILE,
        provenance=replace(PROFILE.provenance, machine=Machine(cpu="Xeon [x]", cores=4)),
        compute=(ComputePoint(batch=8, step_s=Samples((0.5,))),),
        scaling=(ScalingPoint(workers=2, batch=128, step_s=Samples((0.5,)), cores_per_worker=2),),
        network=tuple(
            NetworkPoint(workers=w, memory_nodes=m, link_gbps=g, checkpoint_bytes=10**8, remote_s=Samples((0.4, 0.5)))
            for w, m, g in ((2, 1, 5.0), (1, 2, 5.0), (1, 1, 5.0), (4, 1, None))
        ),
        overheads=tuple(
            OverheadPoint(name=name, state_bytes=size, seconds=Samples((0.3,)))
            for size in (10**9, 10**8)
            for name in ("start", "restore")
        ),
        notes=(),
    )  # fmt: skip
    bare.write(Path("bare.json"))
    empty = Profile(workload="gpt2", provenance=PROFILE.provenance, notes=("only [a] note",))
    empty.write(Path("empty.json"))
    deepvm("calibrate", "show", "whole.json")
    screen("calibrate-show")
    deepvm("calibrate", "show", "bare.json", "empty.json")
    screen("calibrate-show-bare")
    deepvm("calibrate", "show", "whole.json", "--json", "--figure", "f.svg")
    screen("calibrate-show-json")
    deepvm("calibrate", "show", "whole.json", "--figure", "f.svg")
    screen("calibrate-show-figure")


def test_networks_and_overheads_that_are_known(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepvm.cli.calibrate.network.no_links_because", lambda: None, raising=False)
    for place in ("deepvm.calibrate.network.settings", "deepvm.calibrate.network.measure"):
        monkeypatch.setattr(f"{place}.no_links_because", lambda: None)
    here = Provenance(machine=Machine(cpu="Xeon", cores=4), date="2026-11-18T12:00:00", versions={})
    monkeypatch.setattr("deepvm.calibrate.profile_file.here_and_now", lambda: here)
    file = ProfileFile.open(Path("p.json"))
    for workers in (2, 1):
        for nodes in (1, 2, 3):
            for link in (5.0, 1.0):
                seconds = 0.02 + 8e8 * workers / (min(workers, nodes) * link * 1e9)
                file.add(
                    NetworkPoint(
                        workers=workers, memory_nodes=nodes, link_gbps=link, checkpoint_bytes=10**8,
                        remote_s=Samples((seconds, seconds * 1.1, seconds * 1.2)),
                        step_s=None if nodes == 3 else Samples((0.01,)),
                    )
                )  # fmt: skip
    for size in (10**7, 10**8):
        for name in OVERHEADS[: 5 if size > 10**7 else 8]:
            file.add(OverheadPoint(name=name, state_bytes=size, seconds=Samples((0.5, 0.7, 0.6))))
    common = ["--links", "1,5", "--checkpoint-size", "100MB", "-o", "p.json"]
    words = ["--workers", "1,2", "--memory-nodes", "1..3", *common]
    deepvm("calibrate", "network", *words, "--figure", "n.svg")
    deepvm("calibrate", "network", "--workers", "1", "--memory-nodes", "3", *common)
    deepvm("calibrate", "network", *words, "--json")
    screen("calibrate-network")
    deepvm("calibrate", "overheads", "--sizes", "100MB,10MB", "-o", "p.json", "--figure", "o.svg")
    deepvm("calibrate", "overheads", "--sizes", "100MB", "-o", "p.json", "--json")
    screen("calibrate-overheads")
