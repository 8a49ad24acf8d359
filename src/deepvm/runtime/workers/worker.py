"""A worker as its owner sees it: pid, exit code, signals. ``template.py`` starts it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

from deepvm.runtime.line_buffer import LineBuffer


class Worker:
    """A process that a template forked. ``fileno()`` becomes readable when the template has reported about it."""

    def __init__(self, reports: int, send_signal: Callable[[int, int], None]) -> None:
        """``reports`` is a pipe's end, which this object owns; ``send_signal`` takes a pid and a signal."""
        self._reports, self._send_signal, self._lines = reports, send_signal, LineBuffer()
        self.pid = 0
        self.returncode: int | None = None  # negative: the signal that ended it, as in subprocess

    def fileno(self) -> int:
        return self._reports

    def poll(self) -> int | None:
        """Return the exit code, or None while the worker runs."""
        self.receive(0.0)
        return self.returncode

    def wait(self, *, timeout_s: float) -> int:
        """Return the exit code. Raise TimeoutError if the worker still runs then."""
        deadline = time.monotonic() + timeout_s
        while self.returncode is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"worker {self.pid} still runs after {timeout_s:g} s")
            self.receive(left)
        return self.returncode

    def signal(self, number: int) -> None:
        """Send a signal to the worker and its children, through the template, which knows whether it still runs."""
        if self.poll() is None:
            self._send_signal(self.pid, number)

    def terminate(self) -> None:
        self.signal(signal.SIGTERM)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """Read the template's next report, and set ``pid`` and ``returncode`` by it."""
        if self.returncode is not None or not select.select([self._reports], [], [], timeout_s)[0]:
            return {}
        got = os.read(self._reports, 2**16)
        if not got:  # the template has ended, and its workers are killed with it
            self.finish(-signal.SIGKILL)
        report: dict[str, Any] = {}
        for line in self._lines.feed(got):
            report |= json.loads(line)
        self.pid = report.get("pid", self.pid)
        if "exit" in report:
            self.finish(report["exit"])
        return report

    def finish(self, code: int) -> None:
        """Set the exit code, unless it is known, and close the pipe."""
        if self.returncode is None:
            self.returncode = code
            os.close(self._reports)


class ForkedProcess:
    """A forked child with the methods of ``subprocess.Popen`` that a template needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                self._code = -signal.SIGKILL
            else:
                self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("template", timeout)
            time.sleep(0.005)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
