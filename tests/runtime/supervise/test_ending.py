"""How ``deepvm run`` ends: what was trained is saved, what is saved is durable, and machines that end well say so."""

from __future__ import annotations

import json
import os
import pty
import random
import select
import signal
import time
from pathlib import Path

import pytest

from tests.support.runtime.whole_runs import running, words_for, write_plan

pytestmark = pytest.mark.timeout(300)  # whole runs, on machines that may be busy

SELDOM = ["--save", "every 1000 steps", "--json"]


def test_ctrl_c_saves_first_loses_no_step_and_the_run_continues_to_a_durable_end(tmp_path: Path) -> None:
    words = words_for(tmp_path, "run", 40, "--step-s", "0.05", options=SELDOM)
    with running(tmp_path, words, name="run") as run:
        run.until_step(8)
        run.interrupt()
        code, out, err = run.end()
    assert code == 130, err
    assert "the run is interrupted: saving step" in err
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
    ends = [(e.data["why"] in ("ended", "stopped"), e.data["exit_code"]) for e in run.events("machine-down")]
    assert ends == [(True, 0)] * 6  # by themselves, or asked to


def test_a_second_ctrl_c_ends_the_run_at_once(tmp_path: Path) -> None:
    # no further step ends that could be saved
    words = words_for(tmp_path, "run", 1000, "--hang-after", "1", options=SELDOM, workers=1)
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
    words = words_for(tmp_path, "run", 40, "--step-s", "0.05", options=SELDOM, workers=1)
    with running(tmp_path, words, name="run") as run:
        run.until(lambda: run.events(wait_for), wait_for)
        if run.step() == 0:
            run.interrupt()
        code, out, err = run.end(timeout_s=60.0)
    assert code == 130, err
    assert json.loads(out)["outcome"] == "interrupted"
    assert "Traceback" not in err


STRANGER = """
import sys
sys.stderr.write("\\r 50%|#####     |\\r100%|##########|\\n")  # in one piece: nobody can read between them
print("trained without deepvm")
"""


def test_a_script_that_never_calls_deepvm_ends_well_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(STRANGER, encoding="utf-8")
    words = [str(write_plan(tmp_path)), "--name", "run", "--workers", "1", "--", "./plain.py"]
    with running(tmp_path, words, name="run") as run:
        code, out, err = run.end()
    assert code == 0, err
    assert "100%|##########|" in err
    assert " 50%|" not in err
    assert "trained without deepvm" in err
    assert err.count("the script never called deepvm, so nothing was checkpointed") == 1
    assert "warning: the script never called deepvm" in out.replace("\n", " ")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("import nothing_of_that_name", "ModuleNotFoundError: No module named 'nothing_of_that_name'"),
        pytest.param("def main(:\n    pass", "SyntaxError", marks=pytest.mark.chaos),
        pytest.param(
            "import argparse; argparse.ArgumentParser(prog='x').parse_args(['--bogus'])",
            "x: error: unrecognized arguments: --bogus",
            marks=pytest.mark.chaos,
        ),
    ],
)
def test_what_fails_before_the_first_step_is_tried_once(tmp_path: Path, script: str, said: str) -> None:
    (tmp_path / "plain.py").write_text(script, encoding="utf-8")
    words = [str(write_plan(tmp_path)), "--name", "run", "--workers", "2", "--", "python", "plain.py"]
    with running(tmp_path, words, name="run") as run:
        code, _, err = run.end()
    assert code == 1
    assert len(run.events("group")) == 1
    assert len(run.events("worker-failed")) == 1
    assert said in err
    assert "last output of" in err


def test_a_script_that_exits_alike_twice_before_its_first_step_is_not_started_a_third_time(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("import sys; print('only this'); sys.exit(3)", encoding="utf-8")
    words = [str(write_plan(tmp_path)), "--name", "run", "--workers", "1", "--", "python", "plain.py"]
    with running(tmp_path, words, name="run") as run:
        code, _, err = run.end()
    assert code == 1
    assert len(run.events("group")) == 2
    assert "failed twice in the same way before the first step: exit code 3" in err
    assert err.count("  only this") == 2


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_ctrl_c_at_any_moment_in_a_terminal_ends_the_run_and_loses_no_step(tmp_path: Path) -> None:
    """The first key at a random moment after the run's first line; what is resumed repeats nothing."""
    chance = random.Random(16)
    for number in range(8):
        folder = tmp_path / str(number)
        folder.mkdir()
        words = words_for(folder, "run", 400, "--step-s", "0.03", options=["--save", "every 20 steps"])
        ours, theirs = pty.openpty()
        with running(folder, words, name="run", stdin=theirs, stderr=theirs, start_new_session=True) as run:
            os.close(theirs)
            drawn = _read_until(ours, b"run run", b"")
            delay_s = chance.uniform(0.0, 15.0)
            drawn = _read_until(ours, b"", drawn, within_s=delay_s)
            run.process.send_signal(signal.SIGINT)
            drawn = _read_until(ours, b"", drawn, within_s=60.0)
            code, _, _ = run.end(timeout_s=60.0)
        os.close(ours)
        assert code == 130, drawn[-3000:]
        assert b"Traceback" not in drawn, drawn[-3000:]
        events = run.events()
        last = max((e.data["step"] for e in events if e.kind == "step"), default=0)
        saved = max((e.data["step"] for e in events if e.kind == "save" and e.data["state"] == "durable"), default=0)
        assert last - saved <= 1, f"{last} steps were made and {saved} are durable, {delay_s:.1f} s after the start"


def _read_until(terminal: int, wanted: bytes, before: bytes, within_s: float = 60.0) -> bytes:
    """What is drawn until something is, until the other side is closed, or for that time."""
    drawn, until_s = before, time.monotonic() + within_s
    while time.monotonic() < until_s and not (wanted and wanted in drawn):
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                drawn += os.read(terminal, 65536)
            except OSError:  # closed
                break
    return drawn
