"""Scripts as users start them, forked from the template of processes.py."""

from __future__ import annotations

import json
import os
import runpy
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support.checkpoint.processes import Forked
from tests.support.waiting import wait_until


def _script(pipe: Connection, path: str, words: list[str], environment: dict[str, str], output: str) -> None:
    os.environ.update(environment)
    out = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.argv = [path, *words]
    runpy.run_path(path, run_name="__main__")
    sys.stdout.flush()
    pipe.send("done")


class Script:
    """``environment`` names files in ``folder``: the same folder, the same run."""

    def __init__(self, path: Path, folder: Path, *words: str, **environment: str) -> None:
        folder.mkdir(exist_ok=True)
        self._events, self._output = folder / "events", folder / "output"
        told = {"DEEPVM_STORE": f"file://{folder / 'kept'}", "DEEPVM_EVENTS": str(self._events), **environment}
        self._forked = Forked(_script, str(path), list(words), told, str(self._output))

    @property
    def output(self) -> str:
        return self._output.read_text()

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = self._events.read_text().splitlines() if self._events.exists() else []
        return [event for event in map(json.loads, lines) if event["kind"] == kind]

    def wait_for_step(self, step: int) -> None:
        wait_until(lambda: any(event["step"] >= step for event in self.events("step")), f"step {step}")

    def finish(self) -> str:
        """What it has said."""
        try:
            assert self._forked.receive() == "done"
        except EOFError:
            raise AssertionError(self.output) from None
        finally:
            self.kill()
        return self.output

    def kill(self) -> None:
        self._forked.kill()
