"""How ``deepvm run`` ends: what was trained is saved, what is saved is durable, and machines that end well say so."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from running import running, words_for

pytestmark = pytest.mark.timeout(300)  # whole runs, on machines that may be busy

SELDOM = ["--save", "every 1000 steps", "--json"]


def test_ctrl_c_saves_first_loses_no_step_and_the_run_goes_on_to_a_durable_end(tmp_path: Path) -> None:
    words = words_for(tmp_path, "run", 40, "--step-s", "0.05", options=SELDOM)
    with running(tmp_path, words, name="run") as run:
        run.until_step(8)
        run.interrupt()
        code, out, err = run.end()
    assert code == 130, err
    assert "saving step" in err
    report = json.loads(out)
    last = run.step()
    assert report["checkpoints"]["newest"]["step"] == last
    assert report["checkpoints"]["newest"]["durable"]
    ends = [(e.machine, e.data["why"], e.data["exit_code"]) for e in run.events("machine-down")]
    assert sorted(ends[:2]) == [("worker/0", "ended", 0), ("worker/1", "ended", 0)]
    assert ends[2:] == [("memory/0", "ended", 0)]
    with running(tmp_path, ["--resume", "run", "--json", "--save", "every 10 steps"], name="run") as run:
        code, out, err = run.end()
    assert code == 0, err
    report = json.loads(out)
    assert report["steps"] == {"done": 40, "lost": 0, "repeated": 0, "repeated_s": 0.0}
    assert report["losses"] == []
    assert report["checkpoints"]["newest"]["step"] == 40
    assert report["checkpoints"]["newest"]["durable"]
    assert report["checkpoints"]["durable"] <= report["checkpoints"]["made"]
    ends = [(e.data["why"], e.data["exit_code"]) for e in run.events("machine-down")]
    assert ends == [("ended", 0)] * 6


def test_a_second_ctrl_c_ends_the_run_at_once(tmp_path: Path) -> None:
    words = words_for(tmp_path, "run", 1000, "--step-s", "30", options=SELDOM)  # no step ends soon enough to be saved
    with running(tmp_path, words, name="run") as run:
        run.until_step(1)
        run.interrupt()
        with_error = run.process.stderr
        assert with_error is not None
        while "saving step" not in with_error.readline():
            pass
        run.process.send_signal(signal.SIGINT)
        code, out, _ = run.end(timeout_s=20.0)
    assert code == 130
    assert json.loads(out)["outcome"] == "interrupted"


@pytest.mark.parametrize(
    "wait_for",
    [
        pytest.param("machine-asked", marks=pytest.mark.chaos),
        "machine-up",
        pytest.param("group", marks=pytest.mark.chaos),
    ],
)
def test_ctrl_c_before_anything_trains_ends_the_run_without_a_word_of_saving(tmp_path: Path, wait_for: str) -> None:
    words = words_for(tmp_path, "run", 40, "--step-s", "0.05", options=SELDOM)
    with running(tmp_path, words, name="run") as run:
        run.until(lambda: run.events(wait_for), wait_for)
        if run.step() == 0:
            run.interrupt()
        code, out, err = run.end(timeout_s=60.0)
    assert code == 130, err
    assert json.loads(out)["outcome"] == "interrupted"
    assert "Traceback" not in err
