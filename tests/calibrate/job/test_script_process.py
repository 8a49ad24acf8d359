"""A command with its descendants: its output, its end, and nothing that stays open."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from deepvm.calibrate.job.process import ScriptProcess
from tests.support.waiting import wait_until


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def started(tmp_path: Path, code: str) -> ScriptProcess:
    return ScriptProcess([sys.executable, "-c", code], env=dict(os.environ), scratch=tmp_path)


@pytest.fixture(params=["tree", "session"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With subreapers, as on Linux, and without."""
    if request.param == "session":
        monkeypatch.delattr(os, "pidfd_open")
    kind: str = request.param
    return kind


def test_exit_code_and_last_lines_are_known_and_nothing_stays_open(system: str, tmp_path: Path) -> None:
    before = open_files()
    code = "import sys; print('one\\rtwo\\n\\n  \\n' + 'x' * 400); print('three', file=sys.stderr, end=''); sys.exit(3)"
    process = started(tmp_path, code)
    assert process.wait(60) == 3
    process.end()
    assert process.lines(2) == ["x" * 300, "three"]
    assert process.lines(9) == ["one", "two", "x" * 300, "three"]
    assert process.printed_bytes == len(process.output) == len("one\rtwo\n\n  \n\n") - 1 + 401 + 5
    assert open_files() == before


def test_a_command_that_cannot_start_leaves_nothing_open(system: str, tmp_path: Path) -> None:
    before = open_files()
    with pytest.raises(ValueError, match="null byte"):
        ScriptProcess(["a\0b"], env=dict(os.environ), scratch=tmp_path)
    assert open_files() == before


def test_wait_returns_none_while_the_command_runs_and_end_ends_it(system: str, tmp_path: Path) -> None:
    process = started(tmp_path, "import os, time; print(os.getpid(), flush=True); time.sleep(1000)")
    wait_until(lambda: process.wait(0.01) is None and process.output.endswith(b"\n"), "its output")
    assert process.wait(0.0) is None
    pid = int(process.lines(1)[0])
    process.end()
    assert not alive(pid)


def test_a_session_is_ended_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    code = "import os, subprocess, sys, time\n"
    code += "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
    code += "print(os.getsid(0) == os.getpid(), child.pid, flush=True)\ntime.sleep(1000)"
    process = started(tmp_path, code)
    wait_until(lambda: process.wait(0.01) is None and process.output.endswith(b"\n"), "its output")
    leads, child = process.lines(1)[0].split()
    assert leads == "True"
    process.end()
    wait_until(lambda: not alive(int(child)))


def test_the_input_of_a_session_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    process = started(tmp_path, "import sys; print(repr(sys.stdin.read()))")
    assert process.wait(60) == 0
    process.end()
    assert process.lines(1) == ["''"]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
