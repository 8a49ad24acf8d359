"""The template's process: imports modules, checks that forking is safe, and forks a worker for every request.

``main`` returns in the template when its owner has ended, and in every worker when its work is done. A worker thus ends
as an interpreter does, with exit handlers, threads and exit code.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

from deepvm.runtime.workers import fd_messages, fork_safety, forked_worker

GRACE_S = 5.0  # for workers to end by themselves when their owner has ended
_RECEIVE_S = 30.0  # the rest of a message that has begun
_SET_PARENT_DEATH_SIGNAL = 1  # of prctl(2)
_DESCRIPTORS = 4  # stdin, stdout, stderr, and the pipe of reports


def main() -> None:
    """Run as ``python -c ... DESCRIPTOR SETTINGS [LABEL ...]``; the labels are for the process list."""
    descriptor, settings = int(sys.argv[1]), json.loads(sys.argv[2])
    started_env = dict(os.environ)
    with socket.socket(fileno=descriptor) as owner:
        owner.set_inheritable(False)
        forked_worker.put_first(settings["first_path"])
        began = time.monotonic()
        refused, torch_seed = preload(settings["preload"])
        if refused is not None:
            fd_messages.send(owner, {"refused": refused})
            return
        fd_messages.send(owner, {"ready": True, "import_s": time.monotonic() - began, "modules": len(sys.modules)})
        job = _Server(owner, started_env, torch_seed).serve()
    if job is not None:
        forked_worker.enter(job)


def serve_forked(owner: socket.socket, first_path: str | None, torch_seed: int | None) -> None:
    """Serve in a process that was forked off one that had preloaded. Return in workers only."""
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != owner.fileno():
            with contextlib.suppress(OSError):
                os.close(int(name))
    forked_worker.put_first(first_path)
    with owner:
        job = _Server(owner, dict(os.environ), torch_seed).serve()
    if job is None:
        os._exit(0)
    forked_worker.enter(job)


def preload(modules: Sequence[str]) -> tuple[str | None, int | None]:
    """Import modules in order. Return why one cannot be imported or forbids forking, and torch's own seed."""
    torch_seed: int | None = None
    unsupported = fork_safety.supported()
    if unsupported is not None:
        return f"templates are not supported here: {unsupported}; run without one (--no-template)", None
    for name in ("", *modules):
        if name:
            try:
                importlib.import_module(name)
            except Exception as error:
                return f"the template cannot preload {name}: {type(error).__name__}: {error}", None
        found = fork_safety.problem()
        if found is not None:
            who = f"preloading {name}" if name else "Python's own start"
            fix = "leave it out of the preloaded modules, or run without a template (--no-template)"
            return f"{who} {found}: {fix}", None
        torch = sys.modules.get("torch")
        if torch is not None and torch_seed is None:
            torch_seed = torch.initial_seed()
    gc.collect()
    gc.freeze()  # or a fork's garbage collector would copy all pages by looking at them, at its end at the latest
    return None, torch_seed


class _Server:
    """The server's loop. It has no thread, no lock and no buffer that a fork could corrupt."""

    def __init__(self, owner: socket.socket, started_env: dict[str, str], torch_seed: int | None) -> None:
        self._owner = owner
        self._torch_seed = torch_seed
        self._started_env = started_env
        self._preloaded_env = dict(os.environ)
        self._report_fds: dict[int, int] = {}  # by worker, the pipe of its reports
        self._libc = ctypes.CDLL(None, use_errno=True)

    def serve(self) -> forked_worker.WorkerJob | None:
        """Return the job in a worker, and None in the template when the owner has ended."""
        self._interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for workers and their owner
        self._child_ended = signal.signal(signal.SIGCHLD, lambda *_: None)
        self._wake = os.pipe()
        for descriptor in self._wake:
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(self._wake[1], warn_on_full_buffer=False)
        while True:
            ready = select.select([self._owner.fileno(), self._wake[0]], [], [])[0]
            if self._wake[0] in ready:
                self._reap()
            if self._owner.fileno() in ready:
                self._owner.settimeout(_RECEIVE_S)
                try:
                    request = fd_messages.receive(self._owner, _DESCRIPTORS)
                except OSError:  # it ended in the middle of a message
                    request = None
                if request is None:
                    self._end_all()
                    return None
                message, descriptors = request
                if message["do"] == "signal":
                    self._signal(message["pid"], message["signal"])
                    continue
                job = self._fork(message, descriptors)
                if job is not None:
                    return job

    def _fork(self, message: dict[str, Any], descriptors: list[int]) -> forked_worker.WorkerJob | None:
        *standard, report_fd = descriptors
        refused = fork_safety.problem()
        if refused is None:
            sys.stdout.flush()
            sys.stderr.flush()
            template = os.getpid()
            try:
                pid = os.fork()
            except OSError as error:
                refused = f"cannot fork: {error}"
            else:
                if pid == 0:
                    self._become_worker(template, standard, report_fd)
                    return forked_worker.WorkerJob(
                        target=message["target"],
                        args=tuple(message["args"]),
                        env=message["env"],
                        cwd=message["cwd"],
                        started_env=self._started_env,
                        preloaded_env=self._preloaded_env,
                        torch_seed=self._torch_seed,
                    )
        for descriptor in standard:
            os.close(descriptor)
        if refused is None:
            os.set_inheritable(report_fd, False)
            self._report_fds[pid] = report_fd
            _report(report_fd, {"pid": pid})
        else:
            _report(report_fd, {"refused": f"the template {refused}"})
            os.close(report_fd)
        return None

    def _become_worker(self, template: int, standard: list[int], report_fd: int) -> None:
        self._libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != template:  # it died before the line above
            os._exit(1)
        os.setsid()  # a process group of its own, so that a signal reaches its data loaders too
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, self._child_ended)
        signal.signal(signal.SIGINT, self._interrupt)
        for descriptor in (*self._wake, *self._report_fds.values(), report_fd):
            os.close(descriptor)
        for number, descriptor in enumerate(standard):
            os.dup2(descriptor, number)
            os.close(descriptor)

    def _reap(self) -> None:
        """Report workers that have ended."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake[0], 2**16)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            report_fd = self._report_fds.pop(pid, None)
            if report_fd is not None:
                _report(report_fd, {"exit": os.waitstatus_to_exitcode(status)})
                os.close(report_fd)

    def _signal(self, pid: int, number: int) -> None:
        if pid not in self._report_fds:  # it has ended, and its pid may belong to a new process
            return
        try:
            os.killpg(pid, number)
        except ProcessLookupError:  # it has not created its group yet
            os.kill(pid, number)

    def _end_all(self) -> None:
        """End all workers: their owner, which would restart or stop them, has ended."""
        for number, seconds in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
            for pid in self._report_fds:
                self._signal(pid, number)
            deadline = time.monotonic() + seconds
            while self._report_fds and time.monotonic() < deadline:
                select.select([self._wake[0]], [], [], 0.05)
                self._reap()


def _report(descriptor: int, message: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):  # the owner has closed it
        os.write(descriptor, json.dumps(message).encode() + b"\n")
