"""Templates: a process that has imported torch once and forks workers, which need no import.

    with Template() as template:
        worker = template.start("package.module:function", ["an argument"])
        worker.wait(timeout_s=60)

A worker is like a fresh interpreter with the same modules: it has its own environment, directory, streams, process
group, random numbers and exit code. It ends with its template, and the template with its owner.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deepvm.errors import TemplateError
from deepvm.runtime.workers import fd_messages, template_server
from deepvm.runtime.workers.worker import ForkedProcess, Worker

# Everything that the first training step of a fresh process imports.
DEFAULT_PRELOAD = ("torch", "torch.distributed", "deepvm.checkpoint", "deepvm.runtime.workers.preload_torch")

# Read when the interpreter, libc, OpenMP or torch are loaded: too late in a worker.
_READ_AT_START = (
    "LD_", "MALLOC_", "GLIBC_", "PYTHON", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH_", "PYTORCH_",
)  # fmt: skip
_READ_LATER = ("OMP_NUM_THREADS", "TORCH_NCCL_")  # the first is set again in the worker

_START_S = 120.0  # importing torch from a cold disk takes 4 s, from a network disk a minute
_FORK_S = 30.0
_END_S = 15.0  # a template gives its workers 5 s to end, and 5 more to be killed


class Template:
    """Starts at once and imports in the background; ``ready`` and the first ``start`` wait for it."""

    def __init__(
        self,
        *,
        preload: Sequence[str] = DEFAULT_PRELOAD,
        env: Mapping[str, str] | None = None,
        first_path: str | None = None,
        label: Sequence[str] = (),
        timeout_s: float = _START_S,
        forked: tuple[socket.socket, ForkedProcess] | None = None,
    ) -> None:
        """``first_path`` is searched first for modules, as ``python script`` searches the script's directory; ``label``
        is shown in the process list; ``forked`` is for ``fork_here``."""
        self.preload = tuple(preload)
        self.env = dict(os.environ if env is None else env)
        self.import_s: float | None = None  # what every worker saves
        self._settings = json.dumps({"preload": self.preload, "first_path": first_path})
        self._label, self._timeout_s = tuple(label), timeout_s
        self._lock = threading.RLock()
        self._workers: list[Worker] = []
        self._ready = False
        self._closed = False
        self._process: subprocess.Popen[bytes] | ForkedProcess
        if forked is None:
            self._launch()
        else:
            self._socket, self._process = forked
            self._ready = True

    @staticmethod
    def fork_here(
        *,
        preload: Sequence[str] = DEFAULT_PRELOAD,
        first_path: str | None = None,
        in_fork: Callable[[], None] = lambda: None,
    ) -> Template | None:
        """Import in this process and fork a template off it: one import for both. Call it before any thread starts, and
        outside of ``with`` and ``try``. In each worker of the template it returns None when the work is done; the
        worker must end then. ``in_fork`` closes what the template must not keep."""
        began = time.monotonic()
        refused, torch_seed = template_server.preload(preload)
        if refused is not None:
            raise TemplateError(refused)
        ours, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            ours.close()
            in_fork()
            template_server.serve_forked(theirs, first_path, torch_seed)
            return None
        theirs.close()
        template = Template(preload=preload, first_path=first_path, forked=(ours, ForkedProcess(pid)))
        template.import_s = time.monotonic() - began
        return template

    def _launch(self) -> None:
        self._socket, theirs = socket.socketpair()
        code = "from deepvm.runtime.workers.template_server import main; main()"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", code, str(theirs.fileno()), self._settings, *self._label],
                env=self.env,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # ^C is for the owner, which signals the workers
            )
        self._deadline = time.monotonic() + self._timeout_s
        self._ready = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def ready(self) -> Template:
        """Wait until the template can fork. Raise TemplateError, with the module's name, if a preloaded module forbids
        it."""
        with self._lock:
            self._check_open()
            if self._ready:
                return self
            self._socket.settimeout(max(0.001, self._deadline - time.monotonic()))
            try:
                answer = fd_messages.receive(self._socket)
            except TimeoutError:
                self.close()
                raise TemplateError(
                    f"the template did not import {', '.join(self.preload)} within {self._timeout_s:g} s"
                ) from None
            if answer is None:
                code = self._process.wait(timeout=_END_S)
                self.close()
                raise TemplateError(f"the template ended with exit code {code} during its imports; see its output")
            message, _ = answer
            if "refused" in message:
                self.close()
                raise TemplateError(message["refused"])
            self.import_s, self._ready = message["import_s"], True
            return self

    def start(
        self,
        target: str | Callable[..., object],
        args: Sequence[Any] = (),
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: int = 0,
        stdout: int = 1,
        stderr: int = 2,
    ) -> Worker:
        """Fork a worker that calls ``target(*args)``; the arguments must be JSON values. The streams are descriptors.

        A template that died is started again first."""
        name = target if isinstance(target, str) else _name_of(target)
        environment = dict(os.environ if env is None else env)
        request = {"do": "start", "target": name, "args": list(args), "env": environment, "cwd": cwd or os.getcwd()}
        with self._lock:
            self._check_open()
            check_environment(self.env, environment)
            if self._process.poll() is not None:
                self._socket.close()
                self._launch()
            self.ready()
            reports, theirs = os.pipe()
            worker = Worker(reports, self._signal)
            streams = [_open_or_null(descriptor) for descriptor in (stdin, stdout, stderr)]
            try:
                self._socket.settimeout(_FORK_S)
                fd_messages.send(self._socket, request, [*streams, theirs])
            except OSError as error:
                os.close(reports)
                raise TemplateError(f"the template takes no requests: {error}") from None
            finally:
                for descriptor in (*streams, theirs):
                    os.close(descriptor)
            answer = worker.receive(_FORK_S)
            if not worker.pid:
                worker.finish(-signal.SIGKILL)
                raise TemplateError(
                    answer.get("refused", f"the template died, or forked no worker within {_FORK_S:g} s")
                )
            self._workers = [w for w in self._workers if w.returncode is None] + [worker]
            return worker

    def close(self) -> None:
        """End the template and the workers that still run."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._socket.close()
            if not self._ready:  # it imports, and would notice only afterwards
                self._process.kill()
            try:
                self._process.wait(timeout=_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(timeout=_END_S)
            for worker in self._workers:
                if worker.poll() is None:
                    worker.finish(-signal.SIGKILL)

    def __enter__(self) -> Template:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _signal(self, pid: int, number: int) -> None:
        with self._lock:
            try:
                self._socket.settimeout(_FORK_S)
                fd_messages.send(self._socket, {"do": "signal", "pid": pid, "signal": int(number)})
            except OSError:
                return  # it has ended, and its workers with it

    def _check_open(self) -> None:
        if self._closed:
            raise TemplateError("the template is closed: create a new one")


def check_environment(template: Mapping[str, str], worker: Mapping[str, str]) -> None:
    """Raise TemplateError if a worker gets a variable that only takes effect at a process's start."""
    for name in sorted(template.keys() | worker.keys()):
        if not name.startswith(_READ_AT_START) or name.startswith(_READ_LATER):
            continue
        if template.get(name) != worker.get(name):
            found, has = _shown(worker.get(name)), _shown(template.get(name))
            raise TemplateError(
                f"{name} is {found} for the worker, but {has} for its template, which reads it at its start: "
                "start the template with it, or run without one (--no-template)"
            )


def _shown(value: str | None) -> str:
    return "not set" if value is None else repr(value)


def _name_of(target: Callable[..., object]) -> str:
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", "<locals>")
    if module in (None, "__main__") or "<" in name:
        raise TemplateError(
            f"{target!r} cannot be imported by a worker: it must be a function of a module, not of a script"
        )
    return f"{module}:{name}"


def _open_or_null(descriptor: int) -> int:
    try:
        return os.dup(descriptor)
    except OSError:  # a daemon's streams may be closed
        return os.open(os.devnull, os.O_RDWR)
