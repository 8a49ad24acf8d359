"""``deepvm run`` as people use it: whole runs of real processes, taken away, interrupted, resumed and failing."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from deepvm.cli.app import run as deepvm
from deepvm.performance.profile import read_profile
from deepvm.runtime.cluster import load_cluster, scaled
from deepvm.runtime.ledger.ledger import Ledger
from deepvm.runtime.run_spec import RunSpec
from tests.support.runtime.whole_runs import (
    RUN_S,
    TOY,
    check_repeats,
    check_samples,
    free_port,
    running,
    undisturbed,
    weights,
    words_for,
    write_plan,
)

STEPS = 60
pytestmark = pytest.mark.timeout(300)  # whole runs, on machines that may be busy


def test_a_run_that_loses_a_machine_and_is_interrupted_continues_to_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    options = ["--preempt", "at:step:12:worker/1:notice=1s", "--json"]
    words = words_for(tmp_path, "run", STEPS, "--step-s", "0.08", options=options)
    with running(tmp_path, words, name="run") as run:
        run.until(lambda: run.events("restored"), "a restore")
        run.until_step(max(event.data["step"] for event in run.events("restored")) + 2)
        restored = {event.machine: event.data for event in run.events("restored")}
        assert set(restored) == {"worker/0", "worker/1"}
        assert all(data["fetched"] and data["place"].startswith("memory://") for data in restored.values())
        monkeypatch.setenv("DEEPVM_RUNS", str(tmp_path / "runs"))
        assert deepvm(["run", "--report", "run", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["outcome"] == "running"
        assert deepvm(["run", "--resume", "run", "--json"]) == 1
        assert "that run is not over" in json.loads(capsys.readouterr().out)["error"]["message"]
        run.interrupt()
        code, out, err = run.end()
    assert code == 130, err
    assert json.loads(out)["outcome"] == "interrupted"
    assert "continue with deepvm run --resume run" in err
    with running(tmp_path, ["--resume", "run", "--json"], name="run") as run:
        code, out, err = run.end()
    assert code == 0, err
    report = json.loads(out)
    assert (report["outcome"], report["sessions"], report["steps"]["done"]) == ("finished", 2, STEPS)
    assert [loss["machine"] for loss in report["losses"]] == ["worker/1"]
    assert report["notices"][0]["choice"] == "save"
    assert report["steps"]["repeated"] == check_repeats(run.events())
    check_samples(tmp_path, "run", STEPS, per_epoch=12, samples=96)
    measured = read_profile(report["profile"])
    assert measured.workload == "toy_training"
    assert {"save_stall", "save_remote", "regroup", "start", "restore", "first_step"} <= {
        point.name for point in measured.overheads
    }
    assert 2 in {point.workers for point in measured.scaling}
    assert deepvm(["run", "--report", "run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["profile"] == report["profile"]
    assert weights(tmp_path, "run") == undisturbed(tmp_path, STEPS)


def test_a_memory_node_that_is_killed_alone_is_started_again_and_trainers_continue_to_save(tmp_path: Path) -> None:
    def node_of(machine: str) -> int | None:
        folder = os.fsencode(tmp_path / "runs" / "run" / "machines" / machine)
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"memory-node" in words and any(word.startswith(folder) for word in words):
                return int(name)
        return None

    def saved() -> list[int]:
        return [event.data["step"] for event in run.events("save") if event.data["state"] == "remote"]

    words = words_for(tmp_path, "run", STEPS, "--step-s", "0.2", options=["--json"])
    with running(tmp_path, words, name="run") as run:
        run.until(saved, "a save")
        pid = node_of("memory-0")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        before = run.step()
        run.until(lambda: max(saved()) > before, "a save after the restart")
        code, out, err = run.end()
    assert code == 0, err
    assert json.loads(out)["steps"]["repeated"] == 0
    assert any("memory node of memory/0 ended by SIGKILL" in event.data["text"] for event in run.events("warning"))


def test_a_worker_that_fails_by_itself_is_quoted_and_not_started_for_ever(tmp_path: Path) -> None:
    """In a terminal of 80 columns, which shows the machines meanwhile."""
    words = words_for(tmp_path, "run", 30, "--fail-at", "12", "--step-s", "0.05", options=["--max-restarts", "1"])
    ours, theirs = pty.openpty()
    drawn: list[bytes] = []

    def read() -> None:
        try:
            while found := os.read(ours, 65536):
                drawn.append(found)
        except OSError:  # the other side is closed
            return

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    terminal = {"env_more": {"COLUMNS": "80", "LINES": "24", "TERM": "xterm"}, "stderr": theirs}
    with running(tmp_path, words, name="run", **terminal) as run:
        os.close(theirs)
        code, out, _ = run.end()
    reader.join(10)
    os.close(ours)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", b"".join(drawn).decode()).replace("\r", "")
    assert code == 1
    assert "failed" in out
    assert len(run.events("group")) == 2, "it was started again once"
    assert "ZeroDivisionError: rank 1 fails by itself" in shown
    live = shown.index("the script failed on worker/1 (ZeroDivisionError: rank 1 fails by itself): it is restarted")
    assert live < shown.index("group 2:"), "it is shown when it happens"
    assert 'raise ZeroDivisionError(f"rank' in shown[live : shown.index("group 2:")], "with its traceback"
    assert "last output of worker/1" in shown
    assert "last output of worker/0" not in shown, "it failed because of the other"
    assert "the workers of worker/1 failed after 1 restart" in shown
    table = [line for line in shown.splitlines() if re.match(r"(worker|memory)/\d  ", line)]
    assert any("training" in line and "$" in line for line in table)
    assert re.search(r"step \d+ at [\d.]+/s on 2 ranks", shown)
    assert re.search(r"checkpoint 10 in memory://127\.0\.0\.1:\d+, .* old", shown)
    assert max(map(len, table)) <= 80


def test_the_hub_and_its_machines_as_processes_of_their_own_finish_a_job(tmp_path: Path) -> None:
    """As they run in a cloud, where nobody but the hub is told what happens."""
    cluster = scaled(load_cluster(write_plan(tmp_path)), most_trainers=1)
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("t" * 64, encoding="utf-8")
    (tmp_path / "out").mkdir()
    job = RunSpec(
        run="far", script=TOY, args=("20", str(tmp_path / "out"), "--step-s", "0.03"), folder=tmp_path, hub="",
        token_file=token, policy="every 5 steps", memory_bytes=64_000_000, env={"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    document = tmp_path / "job.json"
    document.write_text(json.dumps(job.to_hub_document(cluster.machines)), encoding="utf-8")
    hub_address = f"127.0.0.1:{free_port()}"
    common = ["--token-file", str(token)]
    hub = [sys.executable, "-m", "deepvm.runtime.hub", "--listen", hub_address, "--job", str(document), *common]
    machine = [sys.executable, "-m", "deepvm.runtime.agent", "--hub", hub_address, "--notices", "none", *common]
    processes = [
        subprocess.Popen([*machine, "--name", f"{role}/auto", "--folder", str(tmp_path / role)])
        for role in ("memory", "worker")
    ]
    try:
        processes.append(subprocess.Popen([*hub, "--folder", str(tmp_path / "hub")]))
        assert processes[-1].wait(RUN_S) == 0
        assert [process.wait(20) for process in processes[:-1]] == [0, 0], "machines that end well exit with 0"
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
            process.wait(20)
    assert (tmp_path / "out" / "weights").exists()
    with Ledger.open(tmp_path / "hub" / "ledger.sqlite") as ledger:
        events = list(ledger.events())
    assert events[-1].data["outcome"] == "finished"
    assert [event.data["step"] for event in events if event.kind == "step"] == list(range(1, 21))
    assert {event.machine for event in events if event.kind == "machine-up"} == {"memory/0", "worker/0"}
    assert 20 in [e.data["step"] for e in events if e.kind == "save" and e.data["state"] == "remote"]
    assert 20 in [e.data["step"] for e in events if e.kind == "save" and e.data["state"] == "durable"]
    assert "lost" not in [event.data["why"] for event in events if event.kind == "machine-down"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["PLAN", "--", "nothing.py"], "script 'nothing.py' not found"),
        (["OLD", "--", TOY], "its format is 'deepvm-plan/0'"),
        (["nothing.json", "--", TOY], "cannot be read"),
        (["PLAN"], "no plan or script given"),
        (["PLAN", "--preempt", "at:soon:worker/1", "--", TOY], "'soon' is not a duration"),
        (["PLAN", "--preempt", "at:3s:worker/7", "--", TOY], "no machine is called 'worker/7'"),
        (["PLAN", "--save", "often", "--", TOY], "'often' is not a valid save policy"),
        (["PLAN", "--after-loss", "weep", "--", TOY], "'weep' is not a valid policy"),
        (["PLAN", "--batch", "large", "--", TOY], "unknown batch policy 'large'"),
        (["PLAN", "--workers", "0", "--", TOY], "--workers"),
        (["PLAN", "--memory", "much", "--", TOY], "'much' is not a size"),
        (["PLAN", "--durable", "ftp://x", "--", TOY], "no store is known for ftp://"),
        (["PLAN", "--durable", "memory://127.0.0.1:7070", "--", TOY], "is not durable"),
        (["PLAN", "--bandwidth", "1Gbit", "--", TOY], "add --isolate"),
        (["PLAN", "--name", "../up", "--", TOY], "is not a valid run name"),
        (["PLAN", "--name", "taken", "--", TOY], "run 'taken' exists already"),
        (["PLAN", "--on", "mars", "--", TOY], "no backend is called 'mars'"),
        (["--resume", "nobody"], "no run is called 'nobody'"),
        (["--report", "nobody"], "no run is called 'nobody'"),
        (["--down", "nobody"], "no run is called 'nobody'"),
        (["--down", "taken", "--resume", "taken"], "exclude each other"),
    ],
)
def test_what_cannot_be_run_is_reported_in_one_sentence_and_leaves_nothing(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("DEEPVM_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "taken").mkdir(parents=True)
    (tmp_path / "runs" / "taken" / "settings.json").write_text("{}", encoding="utf-8")
    plan = write_plan(tmp_path)
    old = tmp_path / "old.json"
    old.write_text(plan.read_text(encoding="utf-8").replace("deepvm-plan/1", "deepvm-plan/0"), encoding="utf-8")
    words = [{"PLAN": str(plan), "OLD": str(old)}.get(word, word) for word in words]
    assert deepvm(["run", "--json", *words]) == 2
    printed = capsys.readouterr()
    found = json.loads(printed.out)["error"]
    assert said in found["message"]
    assert found["exit_code"] == 2
    assert "Traceback" not in printed.err
    assert os.listdir(tmp_path / "runs") == ["taken"]
