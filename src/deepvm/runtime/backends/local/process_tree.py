"""A command and all of its descendants, ended together: the owner's side of ``subreaper.py``."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from deepvm.errors import DeepvmError, UsageError

MARK = "DEEPVM_TREE"  # in the environment of a tree's processes, to find them if their keeper was killed
_END_S = 10.0  # SIGKILL takes milliseconds; a process that waits for a broken disk may never end
_KEEPER = Path(__file__).with_name("subreaper.py")


class ProcessTree:
    """Starts at once, as ``subprocess.Popen`` does. It ends with its command, and with this process even if that is
    killed."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path,
        namespace: Path | None = None,
        cwd: str | None = None,
    ) -> None:
        """Output is appended to ``log``; ``namespace`` is the file of a network namespace."""
        if not hasattr(os, "pidfd_open"):
            raise UsageError("local machines need Linux: run this there, or use another --on")
        self._mark = f"{MARK}={secrets.token_hex(16)}"
        name, _, value = self._mark.partition("=")
        self._code: int | None = None
        self._control, theirs = socket.socketpair()
        self._control.settimeout(_END_S)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(output, 0o600)  # an existing file may be readable by others
            words = [str(theirs.fileno()), str(os.getpid()), str(namespace or ""), *command]
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_KEEPER), *words],
                env={**env, name: value},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # ^C is for the owner
            )
        except BaseException:
            self._control.close()
            raise
        finally:
            os.close(output)
            theirs.close()

    @property
    def pid(self) -> int:
        """Return the keeper's pid; the command is its first child."""
        return self._keeper.pid

    def poll(self) -> int | None:
        """Return the command's exit code once no process of the tree is left; negative: the signal that ended it."""
        if self._code is None and self._keeper.poll() is not None:
            self._code = self._exit_code()
        return self._code

    def wait(self, *, timeout_s: float) -> int:
        """Return the exit code. Raise TimeoutError if the tree still runs then."""
        if self._code is None:
            listening = select.poll()
            listening.register(self._control, select.POLLIN)  # the code, or the keeper's end without it
            if not listening.poll(timeout_s * 1e3):
                raise TimeoutError(f"process tree {self.pid} still runs after {timeout_s:g} s")
            self._code = self._exit_code()
        return self._code

    def terminate(self) -> None:
        """Ask the command to end (SIGTERM)."""
        self._send("terminate")

    def kill(self, *, after_s: float = 0.0) -> None:
        """End the whole tree after that time, or earlier if an earlier call asked for it. Do not wait."""
        self._send(f"kill {after_s}")

    def _send(self, line: str) -> None:
        with contextlib.suppress(OSError):  # the keeper may have ended; poll() detects it
            self._control.sendall(f"{line}\n".encode())

    def _exit_code(self) -> int:
        received = b""
        with contextlib.suppress(OSError):
            while got := self._control.recv(64):
                received += got
        self._control.close()
        ended = self._keeper.wait(_END_S)
        if received:
            return int(received)
        self._sweep()  # the keeper was killed, and its command with it, but not their children
        return ended

    def _sweep(self) -> None:
        deadline = time.monotonic() + _END_S
        while marked := _marked(self._mark.encode()):
            if time.monotonic() > deadline:
                raise DeepvmError(f"processes {', '.join(map(str, marked))} cannot be ended: end them by hand")
            for pid in marked:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.001)


def _marked(mark: bytes) -> list[int]:
    """Return the processes with this variable in their environment; an ended process has none."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                environment = Path(f"/proc/{name}/environ").read_bytes()
            except OSError:  # it has just ended, or belongs to another user
                continue
            if mark in environment.split(b"\0"):
                found.append(int(name))
    return found
