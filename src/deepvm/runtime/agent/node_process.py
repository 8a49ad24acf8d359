"""A machine's settings -> its memory node, a process that is started again if it ends.

The new process has the old address and serves the checkpoints of the spill directory, so trainers continue to save.
If it ends again and again, ``failed`` says so, and the machine must be replaced.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from deepvm.errors import DeepvmError
from deepvm.protocol.addresses import join_address
from deepvm.runtime.hub.failures import ended_by

log = logging.getLogger("deepvm.runtime")

READY_S, STOP_S = 60.0, 60.0
POLL_S = 0.1
ENDING_S = 0.5  # the machine itself may be ending: its signal reaches all of its processes
MOST_ENDS, WITHIN_S = 3, 600.0  # the third end in ten minutes is the last: each one costs a save


class NodeProcess:
    """``listens`` is called with the node's address, at each start. ``report`` takes sentences for the run's ledger.
    ``failed`` is called with the reason if the node is not started again. The last two are called in another thread."""

    def __init__(
        self,
        folder: Path,
        host: str,
        options: Sequence[str],
        *,
        name: str,
        listens: Callable[[str], None],
        report: Callable[[str], None],
        failed: Callable[[str], None],
    ) -> None:
        self._folder, self._options, self._name = folder, tuple(options), name
        self._listens, self._report, self._failed = listens, report, failed
        self._any_port = join_address(host, 0)
        self._ends_s: deque[float] = deque(maxlen=MOST_ENDS)
        self._closing = threading.Event()
        self._lock = threading.Lock()  # guards the process against a start during close()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._watch, name="deepvm-node", daemon=True)

    def __enter__(self) -> None:
        try:
            self._address = self._start(self._any_port)
            self._listens(self._address)
        except BaseException:
            self.close()
            raise
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the node; it writes back what is committed first."""
        self._closing.set()
        with self._lock:
            process = self._process
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        process.kill()
        process.wait()

    def _start(self, listen: str) -> str:
        """Start the process, wait until it listens, and return its address."""
        spill = self._folder / "spill"
        spill.mkdir(mode=0o700, exist_ok=True)
        ready, written = os.pipe()  # a full disk cannot hold up the address
        os.set_blocking(ready, False)
        command = [
            sys.executable, "-m", "deepvm", "memory-node", "--listen", listen, "--spill", str(spill),
            "--ready-file", f"/dev/fd/{written}", *self._options,
        ]  # fmt: skip
        try:
            with self._lock:
                if self._closing.is_set():
                    raise DeepvmError(f"{self._name} ends")
                self._process = process = subprocess.Popen(command, pass_fds=[written])
            return self._await_ready(process, ready)
        finally:
            os.close(ready)
            os.close(written)

    def _await_ready(self, process: subprocess.Popen[bytes], ready: int) -> str:
        deadline = time.monotonic() + READY_S
        text = b""
        while not text.endswith(b"\n"):
            if process.poll() is not None or time.monotonic() > deadline or self._closing.is_set():
                process.kill()
                process.wait()
                raise DeepvmError(f"the memory node of {self._name} did not start: see {self._folder}")
            time.sleep(0.02)
            with contextlib.suppress(BlockingIOError):
                text += os.read(ready, 4096)
        return text.decode().strip()

    def _watch(self) -> None:
        while not self._closing.wait(POLL_S):
            code = None if self._process is None else self._process.poll()
            if code is None:
                continue
            if self._closing.wait(ENDING_S):
                return
            why = f"the memory node of {self._name} {'exited' if code == 0 else ended_by(code)}"
            self._ends_s.append(time.monotonic())
            if len(self._ends_s) == MOST_ENDS and self._ends_s[-1] - self._ends_s[0] < WITHIN_S:
                self._failed(
                    f"{why}, for the {MOST_ENDS}rd time in {WITHIN_S / 60:.0f} minutes: the machine is given up"
                )
                return
            self._report(f"{why}: it is started again, with the checkpoints that it had spilled")
            try:
                self._restart()
            except DeepvmError as error:
                if not self._closing.is_set():
                    self._failed(f"{error}: the machine is given up")
                return

    def _restart(self) -> None:
        """Start it where trainers expect it; elsewhere if another process has the port now."""
        try:
            address = self._start(self._address)
        except DeepvmError as error:
            log.warning("%s", error)
            address = self._start(self._any_port)
        self._address = address
        self._listens(address)
