"""A run's report as people meet it: tables that fit, amounts that say something, and JSON for machines."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deepvm.cli import render
from deepvm.cli.run.display import sentence
from deepvm.cli.run.report import show_report, usd_texts
from deepvm.events import Event
from deepvm.runtime.cluster import Cluster, Machine
from deepvm.runtime.ledger.report import Report, make_report

STORE = "memory://ip-10-0-0-9.ec2.internal:7070,ip-10-0-0-10.ec2.internal:7070?replicas=2"


def machine(name: str, usd: float) -> Machine:
    role: Any = name.partition("/")[0]
    return Machine(
        name=name, role=role, instance="g", market="spot", usd_per_hour=usd, on_demand_usd_per_hour=usd * 3
    )  # fmt: skip


CLUSTER = Cluster(
    machines=(machine("worker/0", 0.1578), machine("worker/1", 0.1578), machine("memory/0", 0.17)),
    architecture="tiering", catalog="a", checkpoint_bytes=1, restore_s=2.1,
    notes=("the plan has 17 workers, 1 memory node; this host runs 2 workers, 1 memory node",),
)  # fmt: skip


def long_story(rounds: int) -> Report:
    """A step a second and a loss every ten, in the words of a real store and a talkative policy."""
    events = [Event(at_s=0, kind="run-started")]
    events += [Event(at_s=1, kind="machine-up", machine=m.name) for m in CLUSTER.machines]

    def add(at_s: float, kind: str, name: str | None = None, **data: Any) -> None:
        events.append(Event(at_s=at_s, kind=kind, machine=name, data=data))

    for n in range(rounds):
        at_s = 10.0 * (n + 1)
        add(at_s, "step", "worker/0", step=n + 1, seconds=1.0, world_size=2)
        add(at_s + 1, "save", "worker/0", step=n + 1, state="remote", place=STORE, stall_s=0.0123)
        add(at_s + 2, "notice", "worker/1", seconds_left=117.25, source="aws", action="terminate")
        add(at_s + 2, "decision", "worker/1", choice="finish", why="300 MB at 1.2 GB/s are safe in 0.25 s of 117 s")
        add(at_s + 3, "machine-down", "worker/1", why="preempted")
        add(at_s + 4, "machine-up", "worker/1")
        add(at_s + 5, "group", machines=["worker/0", "worker/1"], took_s=2.0)
        add(at_s + 7, "restored", "worker/0", step=n + 1, place=STORE, seconds=0.4567)
    add(10.0 * (rounds + 1), "replanned", changes=["worker/1: g5.xlarge in us-east-1b instead of g4dn.xlarge"])
    add(10.0 * (rounds + 1), "run-ended", outcome="failed", why="[red]boom[/] in \x1b[2J/home/me/train.py\nline 2")
    return make_report(events, CLUSTER, run="digits")


def test_a_restore_is_shown_with_its_step_and_its_place_as_far_as_they_are_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    events = [
        Event(at_s=0, kind="run-started"),
        Event(at_s=60, kind="restored", machine="worker/0", data={"step": 1234, "place": "file:///a", "seconds": 2.0}),
        Event(at_s=120, kind="group", data={"machines": ["worker/0"], "took_s": 1.0}),
        Event(at_s=125, kind="restored", machine="worker/0", data={}),
    ]
    show_report(make_report(events, CLUSTER, run="r"))
    shown = capsys.readouterr().out
    rows = [line.split() for line in shown[shown.index("Restores") :].splitlines()[2:4]]
    assert rows == [["1:00", "1,234", "2", "s", "file:///a"], ["2:05", "?", "?", "?"]]


def test_time_on_demand_has_a_row_of_its_own_beside_the_deadline_that_it_kept(
    capsys: pytest.CaptureFixture[str],
) -> None:
    conduct = {"fallback": "on-demand at the last moment", "deadline_s": 36 * 3600.0}
    hired = {"market": "on-demand", "usd_per_hour": 0.526, "on_demand_usd_per_hour": 0.526}
    events = [
        Event(at_s=0, kind="run-started", data={"conduct": conduct}),
        Event(at_s=0, kind="machine-up", machine="worker/0"),
        Event(at_s=3600, kind="machine-down", machine="worker/0", data={"why": "preempted"}),
        Event(at_s=7200, kind="machine-up", machine="worker/0", data=hired),
        Event(at_s=9000, kind="run-ended", data={"outcome": "finished"}),
    ]
    report = make_report(events, CLUSTER, run="r")
    (worker,) = report.bill.roles
    assert (worker.fallback_s, worker.fallback_usd) == (1800.0, pytest.approx(0.263))
    assert worker.usd == pytest.approx(0.1578 + 0.263)
    show_report(report)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines if "of it" in line] == [
        ["of", "it", "on", "demand", "30", "min", "$0.2630"]
    ]  # fmt: skip
    assert any("36 h; on-demand at the last moment (the plan's)" in line for line in lines)


@pytest.mark.parametrize("columns", [80, 60])
@pytest.mark.parametrize("rounds", [0, 1, 40])
def test_no_line_is_wider_than_the_terminal(
    rounds: int, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(render.console, "_width", columns)
    show_report(long_story(rounds), as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines
    assert max(map(len, lines)) <= columns


def test_the_report_has_everything(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render.console, "_width", 160)
    show_report(long_story(2))
    shown = capsys.readouterr().out
    for words in (
        "digits  failed  30 s",
        "[red]boom[/] in  [2J/home/me/train.py line 2",  # nothing of it is markup, or moves the cursor
        "2 done, 0 lost, 0 repeated",
        "24.6 ms by saves; stood still 20 s in 2 pauses",
        "2 made, 0 durable, 0 skipped, 0 failed",
        f"step 2 in {STORE}, not durable",
        "goodput      4.7% of 85 s paid machine time",
        "worker  2 (4 hired)  56 s  $0.0025    $0.0074",
        "memory            1  29 s  $0.0014    $0.0041",
        "total                85 s  $0.0038    $0.0115",
        "$0.0076 saved against on demand, 67%",
        "Losses  2 preempted",
        "  at  stood still  detect  regroup   start  restore  first step",
        "0:10         10 s     3 s      2 s  1.54 s   457 ms         3 s",
        "0:20         10 s     3 s      2 s  1.54 s   457 ms        none",
        "finish the save: 300 MB at 1.2 GB/s are safe in 0.25 s of 117 s",
        "stood still after a loss    2.1 s      10 s",
        "of it restoring                      457 ms",
        "changed: worker/1: g5.xlarge in us-east-1b instead of g4dn.xlarge",
        "note: the plan has 17 workers",
    ):
        assert words in shown


def test_long_lists_show_their_end_and_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    show_report(long_story(40))
    assert capsys.readouterr().out.count("the last 12 of 40; --json has all") == 4  # losses, pauses, notices, restores


def test_json_is_the_report_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    report = long_story(3)
    show_report(report, as_json=True)
    assert json.loads(capsys.readouterr().out) == report.to_json()


@pytest.mark.parametrize(
    ("amounts", "texts"),
    [
        ([0.0021, 0.0], ["$0.0021", "$0.0000"]),
        ([0.0021, 0.000034], ["$0.002100", "$0.000034"]),
        ([1234.5, 250.0], ["$1,234.50", "$250.00"]),
        ([3.25, None], ["$3.2500", "?"]),
        ([1e-30], ["$0.00000000"]),
        ([0.0], ["$0.00"]),
        ([-0.5], ["-$0.5000"]),
        ([], []),
    ],
)
def test_dollars_have_as_many_digits_as_the_smallest_needs(amounts: list[float | None], texts: list[str]) -> None:
    assert usd_texts(amounts) == texts


def test_the_first_save_that_fails_is_a_line_of_the_display() -> None:
    data = {
        "step": 3,
        "state": "failed",
        "why": "meter.best is a tensor on rank 0 and a float on rank 1",
        "first": True,
    }
    told = sentence(Event(at_s=1.0, kind="save", data=data))
    assert told == "step 3 was NOT saved: meter.best is a tensor on rank 0 and a float on rank 1"
    assert sentence(Event(at_s=2.0, kind="save", data={**data, "first": False})) is None
    assert sentence(Event(at_s=2.0, kind="save", data={**data, "state": "remote"})) is None
