"""Runs tests in a scratch copy: requests come on stdin, one JSON line each; answers go to stdout.

Packages that are slow to import are loaded once; each request is a fork that imports deepvm afresh and calls pytest.
A request: {"tests": [ids], "limit_s": seconds, "times": {id: seconds}, "observe": bool}. The answer: {"results": [{id,
outcome, seconds, lines}], "code": pytest's or null at a time-out, "tail": end of the output}.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import mmap
import os
import signal
import sys
import time
import traceback
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

_PRELOAD = (
    "pytest", "numpy", "scipy.optimize", "scipy.sparse", "torch", "torch.distributed", "torch.utils.data",
    "safetensors.torch", "xxhash", "rich.console", "rich.table", "typer", "asyncio", "sqlite3", "unittest.mock",
)  # fmt: skip
_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36
_FOLDER = Path(sys.prefix).parent


def main() -> None:
    """Answer requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.chdir(_FOLDER / "tree")
    for name in _PRELOAD:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), file=answers, flush=True)


def _run(request: dict[str, Any]) -> dict[str, Any]:
    results, output = _FOLDER / "results", _FOLDER / "output"
    results.write_text("")
    pid = os.fork()
    if not pid:
        _child(request, results, output)
    code, deadline = None, time.monotonic() + request["limit_s"]
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            break
        time.sleep(0.005)
    _end_descendants()
    return {
        "results": [json.loads(line) for line in results.read_text().splitlines() if line.endswith("}")],
        "code": code,
        "tail": output.read_bytes()[-3000:].decode(errors="replace"),
    }


def _child(request: dict[str, Any], results: Path, output: Path) -> None:
    code = 99
    try:
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        os.setsid()
        with output.open("wb") as log, Path(os.devnull).open("rb") as nothing:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            os.dup2(nothing.fileno(), 0)
        words = ["-x"] if not request["observe"] else []
        plugin = _Plugin(results, request)
        base = _FOLDER / "t"
        code = int(
            pytest.main(
                [*words, "-q", "-p", "no:cacheprovider", "--tb=line", f"--basetemp={base}", *request["tests"]],
                plugins=[plugin],
            )
        )
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _end_descendants() -> None:
    """Kill all that a request left: this process is their reaper."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        if not children:
            return
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.005)


class _Plugin:
    """Writes each test's outcome, time and executed lines; gives each test its own time-out."""

    def __init__(self, results: Path, request: dict[str, Any]) -> None:
        self.results = results
        self.observe = request["observe"]
        self.times = request.get("times", {})
        self.seconds: dict[str, float] = {}
        self.failed: dict[str, str] = {}
        self.hits: mmap.mmap | None = None
        self.shared: dict[Any, set[int]] = {}  # what fixtures of several tests executed, for each of these tests
        self.fixtures: list[Any] = []  # of the present test
        if self.observe:
            with (_FOLDER / "recorder" / "hits").open("r+b") as file:
                self.hits = mmap.mmap(file.fileno(), 0)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        for item in items:
            if item.nodeid in self.times:
                item.add_marker(pytest.mark.timeout(20 + 8 * self.times[item.nodeid]), append=False)

    def pytest_runtest_logstart(self) -> None:
        if self.hits is not None:
            self.hits[:] = bytes(len(self.hits))

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, object, object]:
        if self.hits is None or fixturedef.scope == "function":
            return (yield)
        before = np.frombuffer(self.hits[:], np.uint8)
        self.hits[:] = bytes(len(self.hits))
        try:
            return (yield)
        finally:
            ran = np.frombuffer(self.hits[:], np.uint8)
            self.shared[fixturedef] = set(np.flatnonzero(ran).tolist())
            self.hits[:] = (before | ran).tobytes()

    def pytest_runtest_call(self, item: Any) -> None:
        self.fixtures = [one for several in item._fixtureinfo.name2fixturedefs.values() for one in several]

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0) + report.duration
        if report.outcome != "passed":
            self.failed.setdefault(report.nodeid, report.outcome)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        lines: list[int] = []
        if self.hits is not None:
            own = {number for number, hit in enumerate(self.hits[:]) if hit}
            lines = sorted(own.union(*(self.shared.get(fixture, ()) for fixture in self.fixtures)))
        self.fixtures = []
        told = {
            "id": nodeid,
            "outcome": self.failed.get(nodeid, "passed"),
            "seconds": round(self.seconds.get(nodeid, 0), 3),
            "lines": lines,
        }
        with self.results.open("a") as file:
            file.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
