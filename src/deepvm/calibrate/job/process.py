"""A command -> its end, with the newest of its output: the observed script and everything that it starts."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from deepvm.runtime.backends.local.process_tree import ProcessTree

MOST_OUTPUT_BYTES = 64 * 1024
_POLL_S = 0.1
_END_S = 10.0


class _Tree(Protocol):
    def poll(self) -> int | None: ...

    def kill(self) -> None: ...


class ScriptProcess:
    """Runs a command with all of its descendants, and keeps the last bytes that they print. Leaves no process."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], scratch: Path) -> None:
        pipe = scratch / "output"
        os.mkfifo(pipe, 0o600)
        self._reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self.output, self.printed_bytes = b"", 0
        try:
            linux = hasattr(os, "pidfd_open")
            self._tree: _Tree = ProcessTree(command, env=env, log=pipe) if linux else _Session(command, env, pipe)
        except BaseException:
            os.close(self._reading)
            raise

    def wait(self, timeout_s: float) -> int | None:
        """Read output until the command ends or the time is over; return its exit code, or None."""
        ends_s = time.monotonic() + timeout_s
        while True:
            code = self._tree.poll()
            self._read(max(0.0, min(_POLL_S, ends_s - time.monotonic())) if code is None else 0.0)
            if code is not None or time.monotonic() >= ends_s:
                return code

    def end(self) -> None:
        """End every process that is left."""
        with contextlib.suppress(OSError):
            self._tree.kill()
            self.wait(_END_S)
        os.close(self._reading)

    def _read(self, timeout_s: float) -> None:
        ready = select.select([self._reading], [], [], timeout_s)[0]
        ends_s = time.monotonic() + _POLL_S  # of a script that prints faster than this reads
        while ready and time.monotonic() < ends_s:
            try:
                got = os.read(self._reading, MOST_OUTPUT_BYTES)
            except BlockingIOError:
                return
            if not got:  # no writer, or none yet
                time.sleep(min(timeout_s, 0.01))
                return
            self.printed_bytes += len(got)
            self.output = (self.output + got)[-MOST_OUTPUT_BYTES:]

    def lines(self, most: int) -> list[str]:
        """Return the last lines of the output that are not empty."""
        text = self.output.decode("utf-8", "replace").replace("\r", "\n")
        return [line.rstrip()[:300] for line in text.splitlines() if line.strip()][-most:]


class _Session:
    """A command in a session of its own, where the system has no subreapers: a process that leaves it is not found."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], output: Path) -> None:
        with output.open("wb") as writing:
            self._process = subprocess.Popen(
                list(command), env=dict(env), stdin=subprocess.DEVNULL, stdout=writing, stderr=writing,
                start_new_session=True,
            )  # fmt: skip

    def poll(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
