"""What `make test` says about the statements and branches that ran."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tools.coverage import count
from tools.recorder import Recorder

SOURCE = '''\
def function(items):
    """Doc."""
    for item in items:
        if item:
            return item
    while True:
        break
    if items:
        found = 1
    else:
        found = 2
    return found
'''


def recorded(folder: Path, calls: str) -> tuple[set[int], set[int]]:
    """Run calls of `function` in a process that then kills itself; return what it left."""
    src = folder / "src"
    (src / "deepvm").mkdir(parents=True)
    (src / "deepvm" / "__init__.py").write_text(SOURCE)
    recorder = Recorder(folder / "hits", src)
    end = f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})"
    done = subprocess.run(
        [sys.executable, "-c", f"from deepvm import function\n{calls}\n{end}"],
        env={**os.environ, "PYTHONPATH": f"{recorder.folder}{os.pathsep}{src}"}, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL
    ran, others = recorder.lines((recorder.folder / "hits").read_bytes()).get(str(src / "deepvm/__init__.py"), ([], []))
    return set(ran), set(others)


@pytest.mark.parametrize(
    ("calls", "missed"),
    [
        ("", ["3", "3->4", "3->after", "4", "4->5", "4->after", "5", "6", "7", "8", "8->9", "8->11", "9", "11", "12"]),
        ("function([1])", ["3->after", "4->after", "6", "7", "8", "8->9", "8->11", "9", "11", "12"]),
        ("function([0]); function([])", ["4->5", "5"]),
        ("function([0, 1]); function([0]); function([])", []),
    ],
)
def test_what_a_killed_process_ran_is_counted(tmp_path: Path, calls: str, missed: list[str]) -> None:
    counted = count("x", SOURCE, *recorded(tmp_path, calls))

    assert counted.total == 15
    assert sorted(counted.missed) == sorted(missed)
