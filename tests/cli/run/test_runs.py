"""``deepvm runs``: existing runs listed, shown, stopped and exported, from folders as ``deepvm run`` leaves them."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from deepvm.cli.app import run as deepvm
from deepvm.events import Event
from deepvm.runtime.cluster import Cluster, billing_facts, load_cluster, scaled
from deepvm.runtime.ledger.ledger import Ledger
from deepvm.runtime.run_spec import RunSpec
from deepvm.runtime.supervise.run_folder import RunFolder
from tests.support.runtime.whole_runs import write_plan
from tests.support.waiting import wait_until


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setenv("DEEPVM_RUNS", str(tmp_path / "runs"))
    return scaled(load_cluster(write_plan(tmp_path)), most_trainers=2)


def made(name: str, cluster: Cluster, *, at_s: float = 1_790_000_000.0, hours: float = 3.0) -> RunFolder:
    """A run that lost a machine in each hour, and finished."""
    settings = {"plan": dict(cluster.plan), "settings": RunSpec(script="train.py").to_settings(), "on": "local"}
    folder = RunFolder.create(name, settings)

    def event(after_s: float, kind: str, name: str | None = None, **data: Any) -> Event:
        return Event(at_s=at_s + after_s, kind=kind, machine=name, data=data)

    events = [event(0.0, "run-started")]
    for machine in cluster.machines:
        facts = billing_facts(machine)
        events += [event(0.0, "machine-asked", machine.name, **facts), event(0.1, "machine-up", machine.name, **facts)]
    facts = billing_facts(cluster.machines[0])
    for hour in range(int(hours)):
        gone_s = hour * 3600 + 1800.0
        events.append(event(gone_s, "machine-down", "worker/0", why="preempted"))
        events.append(event(gone_s, "machine-refused", "worker/0", why="none", **facts))
        events.append(event(gone_s + 300, "machine-asked", "worker/0", **facts))
        events.append(event(gone_s + 300, "machine-up", "worker/0", **facts))
    events += [event(hours * 3600, "step", "worker/0", step=9, seconds=1.0), event(hours * 3600, "run-ended")]
    events[-1] = event(hours * 3600 + 1, "run-ended", outcome="finished")
    with Ledger.create(folder.ledger, run=name, cluster=cluster) as ledger:
        ledger.append(events)
    return folder


def as_json(capsys: Any, *words: str) -> Any:
    assert deepvm([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_runs_are_listed_oldest_first_with_their_state(cluster: Cluster, capsys: Any, tmp_path: Path) -> None:
    assert deepvm(["runs", "ls"]) == 0
    assert "no runs" in capsys.readouterr().out
    made("second", cluster, at_s=1_790_001_000.0)
    folder = made("first", cluster)
    (tmp_path / "runs" / "third").mkdir(mode=0o700)
    (tmp_path / "runs" / "third" / "settings.json").write_text("{}", encoding="utf-8")
    found = as_json(capsys, "runs", "ls")["runs"]
    assert [(each["run"], each["state"]) for each in found[1:]] == [("first", "finished"), ("second", "finished")]
    assert found[0]["run"] == "third"
    assert "cannot be read" in found[0]["state"]
    with Ledger.open(folder.ledger, write=True) as ledger:
        ledger.append([Event.now("run-started")])
        assert {each["run"]: each["state"] for each in as_json(capsys, "runs", "ls")["runs"]}["first"] == "running"
    assert {each["run"]: each["state"] for each in as_json(capsys, "runs", "ls")["runs"]}["first"] == "broken-off"


@pytest.mark.parametrize("at_s", [1e30, float("inf"), "abc"])
def test_a_damaged_run_is_one_row_that_says_so(cluster: Cluster, capsys: Any, at_s: object) -> None:
    made("good", cluster)
    damaged = made("damaged", cluster)
    with closing(sqlite3.connect(damaged.ledger, isolation_level=None)) as database:
        database.execute("INSERT INTO events(at_s, kind, data) VALUES (?, 'run-started', '{}')", (at_s,))
    rows = {row["run"]: row for row in as_json(capsys, "runs", "ls")["runs"]}
    assert rows["good"]["state"] == "finished"
    assert "cannot be read" in rows["damaged"]["state"]
    assert deepvm(["runs", "ls"]) == 0
    assert "cannot be" in capsys.readouterr().out


def test_show_is_the_runs_report(cluster: Cluster, capsys: Any) -> None:
    made("one", cluster)
    shown = as_json(capsys, "runs", "show", "one")
    assert shown == as_json(capsys, "run", "--report", "one")
    assert len(shown["losses"]) == 3


def test_logs_are_the_last_lines_of_a_machine(cluster: Cluster, capsys: Any) -> None:
    folder = made("one", cluster)
    assert deepvm(["runs", "logs", "one"]) == 2
    assert "worker/0 of run one has no log" in capsys.readouterr().err
    log = folder.log_of("worker/1")
    log.parent.mkdir()
    log.write_text("".join(f"line {number}\n" for number in range(5)) + "[red]bold\x1b[2J\n", encoding="utf-8")
    assert as_json(capsys, "runs", "logs", "one", "worker/1", "-n", "2")["lines"][0] == "line 4"
    assert deepvm(["runs", "logs", "one", "worker/1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("line 0\n")
    assert "[red]bold" in out
    assert "\x1b" not in out
    assert deepvm(["runs", "logs", "one", "worker/9"]) == 2
    assert "did you mean" in capsys.readouterr().err


def test_stop_asks_the_process_that_supervises_the_run_and_waits_for_its_end(cluster: Cluster, capsys: Any) -> None:
    folder = made("one", cluster)
    assert deepvm(["runs", "stop", "one"]) == 2
    assert "is not running on this machine" in capsys.readouterr().err
    asked: list[float] = []

    def supervise(ledger: Ledger) -> None:
        wait_until(folder.stop_requested, "the request", timeout_s=20.0)
        asked.append(time.monotonic())
        ledger.close()

    for words in (["--json"], []):
        thread = threading.Thread(target=supervise, args=(Ledger.open(folder.ledger, write=True),))
        thread.start()
        assert deepvm(["runs", "stop", "one", *words]) == 0
        thread.join(20.0)
        assert not folder.stop_requested(), "a request counts once"
        shown = capsys.readouterr()
        if words:
            assert json.loads(shown.out) == {"run": "one", "outcome": "stopped"}
        else:
            assert (shown.out, "run one has ended: continue with deepvm run --resume one" in shown.err) == ("", True)
    assert len(asked) == 2


def test_what_the_market_did_is_exported_and_backtested(cluster: Cluster, capsys: Any, tmp_path: Path) -> None:
    made("one", cluster, hours=12.0)
    found = as_json(capsys, "runs", "export", "one", "--trace", str(tmp_path / "traces"), "--tick", "1min")
    (row,) = found["traces"]
    assert (row["zone"], row["machines"], found["meaning"]) == ("us-east-1", 2, "up")
    data = json.loads(Path(row["file"]).read_text(encoding="utf-8"))["data"]
    assert data[:40] == [2] * 30 + [1] * 5 + [2] * 5
    words = ["--meaning", "up", "--workers", "2", "--work", "1h", "--on-demand-price", "0.53", "--starts", "10"]
    outcome = as_json(capsys, "backtest", "--traces", str(tmp_path / "traces"), *words)
    assert "strategies" in json.dumps(outcome)
    assert deepvm(["runs", "export", "one", "--trace", str(tmp_path / "traces"), "--tick", "soon"]) == 2
    capsys.readouterr()
    assert deepvm(["runs", "export", "one", "--trace", str(tmp_path / "more"), "--tick", "1min"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(str(tmp_path / "more"))
    assert first.endswith(f": 2 machines in us-east-1, {row['hours'] * 60:.3g} min")
    assert second == f"read them with deepvm backtest --traces {tmp_path / 'more'} --meaning up"


def test_a_run_without_spot_machines_has_nothing_to_export(cluster: Cluster, capsys: Any, tmp_path: Path) -> None:
    keepers = Cluster(
        machines=cluster.keepers, architecture="tiering", catalog="c", checkpoint_bytes=None, restore_s=None
    )
    made("calm", keepers, hours=0.0)
    assert deepvm(["runs", "export", "calm", "--trace", str(tmp_path / "traces")]) == 2
    assert "held no machine on spot" in capsys.readouterr().err
