"""How soon a worker runs its own code with torch: forked from a template, and as a fresh interpreter that imports it.

Both run the same script, one after the other in each round, and it tells the time by the clock that all processes
share. The template has imported everything that templates do by default, which makes it larger and its forks slower.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from deepvm.runtime import Template
from deepvm.runtime.workers.forked_worker import run_script

TARGET = 0.02  # of a fresh interpreter's time
FRESH, FORKED = "fresh interpreter with import torch", "worker from a template"
_DEADLINE_S = 120.0
_SCRIPT = """\
import torch
torch.ones(1).item()
import time
print(repr(time.monotonic()))
"""


def measure(rounds: int) -> dict[str, list[float]]:
    """Seconds from asking for a worker until its script has used torch, by way; the ways take turns."""
    taken: dict[str, list[float]] = {FRESH: [], FORKED: []}
    with tempfile.TemporaryDirectory(prefix="deepvm-bench-") as directory, Template() as template:
        script = str(Path(directory) / "enter.py")
        Path(script).write_text(_SCRIPT, encoding="utf-8")
        template.ready()
        ways: dict[str, Callable[[], float]] = {
            FRESH: lambda: _fresh_s(script),
            FORKED: lambda: _forked_s(template, script),
        }
        for way in ways.values():  # the first of each fills the page cache
            way()
        for turn in range(rounds):
            for name in list(ways)[:: 1 if turn % 2 else -1]:
                taken[name].append(ways[name]())
    return taken


def _fresh_s(script: str) -> float:
    asked = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-u", script], stdout=subprocess.PIPE, text=True, timeout=_DEADLINE_S, check=True
    )
    return float(done.stdout) - asked


def _forked_s(template: Template, script: str) -> float:
    told, theirs = os.pipe()
    try:
        asked = time.monotonic()
        worker = template.start(run_script, [script, [], False], stdout=theirs)
        code = worker.wait(timeout_s=_DEADLINE_S)
        if code != 0:
            raise RuntimeError(f"a worker ended with exit code {code}")
        return float(os.read(told, 100)) - asked
    finally:
        os.close(told)
        os.close(theirs)


def main(rounds: int) -> int:
    taken = measure(rounds)
    for name, values in taken.items():
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        print(f"{name}: {median * 1e3:.1f} ms ({low * 1e3:.1f} to {high * 1e3:.1f}, {rounds} rounds)")
    ratio = statistics.median(taken[FORKED]) / statistics.median(taken[FRESH])
    print(f"ratio: {ratio:.4f}, at most {TARGET} wanted")
    return 0 if ratio <= TARGET else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 9))
