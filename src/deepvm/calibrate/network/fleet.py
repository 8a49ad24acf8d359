"""The machines of a network calibration: workers and memory nodes as processes, each with its own link.

``measure`` tells them what to do. They end with this process, whatever ends it; ``close`` removes their networks."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from deepvm import variables
from deepvm.calibrate.network.settings import NetworkSettings
from deepvm.errors import DeepvmError
from deepvm.runtime.backends.local.network import Network
from deepvm.runtime.backends.local.process_tree import ProcessTree
from deepvm.runtime.log_tail import tail_text
from deepvm.store.regular_file import write_private

START_S = 120.0  # for a process with torch, on a busy machine
ANSWER_S = 900.0
STOP_S = 10.0
POLL_S = 0.02
BURST_S = 0.002  # what a link may send at once after a pause: little of a checkpoint


class Fleet:
    """Made by ``start``. Use it as a context manager."""

    def __init__(self, settings: NetworkSettings, scratch: Path, *, limited: bool) -> None:
        self._settings, self._scratch = settings, scratch
        self._network: Network | None = None
        self._trees: dict[str, ProcessTree] = {}
        self._controls: dict[str, _Control] = {}
        self._nodes: list[str] = []  # their addresses
        self._limited = limited
        self._token_file = scratch / "token"
        self._listener = socket.socket(socket.AF_UNIX)

    def __enter__(self) -> Fleet:
        try:
            write_private(self._token_file, secrets.token_hex(32))
            self._listen(self._scratch / "control")
            if self._limited:
                self._network = Network.create(burst_s=BURST_S)
            self._start_workers()
        except BaseException:
            self.close()
            raise
        return self

    def _listen(self, path: Path) -> None:
        try:
            self._listener.bind(str(path))
        except OSError as error:  # such as a path of more than 107 bytes
            raise DeepvmError(f"cannot listen at {path}: {error}: set TMPDIR to a folder with a short name") from error
        self._listener.listen()
        self._listener.setblocking(False)

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- machines -------------------------------------------------------------------------------------------------

    def _start_workers(self) -> None:
        names = [f"worker/{number}" for number in range(max(self._settings.workers))]
        for name in names:
            words = ["-m", "deepvm.calibrate.network.worker", str(self._scratch / "control"), name]
            self._start(name, [*words, str(self._settings.checkpoint_bytes)])
        deadline_s = time.monotonic() + START_S
        while len(self._controls) < len(names):
            self._check(deadline_s, "the workers did not start")
            if select.select([self._listener], [], [], POLL_S)[0]:
                control = _Control(self._listener.accept()[0])
                self._controls[str(control.receive(START_S, self._check)["worker"])] = control

    def start_nodes(self, count: int, listen_port: int = 0) -> None:
        """Start memory nodes instead of those that run."""
        self.stop_nodes()
        capacity = self._settings.capacity_bytes(count)
        waiting = {}
        for number in range(count):
            name = f"memory/{number}"
            ready = self._scratch / f"ready-{number}"
            words = ["-m", "deepvm", "memory-node", "--listen", f"{self._address(name)}:{listen_port}"]
            words += ["--capacity", str(capacity), "--block", str(self._settings.block_bytes)]
            self._start(name, [*words, "--token-file", str(self._token_file), "--ready-file", str(ready)])
            waiting[name] = ready
        deadline_s = time.monotonic() + START_S
        for name, ready in waiting.items():
            while not ready.exists():
                self._check(deadline_s, f"{name} did not start")
                time.sleep(POLL_S)
            self._nodes.append(ready.read_text(encoding="utf-8").strip())

    def stop_nodes(self) -> None:
        for name in _nodes(self._trees):
            if self._trees[name].poll() is not None:  # it ended by itself, which was reported
                del self._trees[name]
        for control in self._controls.values():
            control.send(do="close")
        for control in self._controls.values():
            control.receive(ANSWER_S, self._check)
        self._end([self._trees.pop(name) for name in _nodes(self._trees)])
        self._nodes.clear()

    def _start(self, name: str, words: Sequence[str]) -> None:
        env = {key: value for key, value in os.environ.items() if not key.startswith("DEEPVM_")}
        env[variables.TOKEN] = self._token_file.read_text(encoding="utf-8")
        env["OMP_NUM_THREADS"] = "1"
        namespace = None if self._network is None else self._network.join(name)
        self._trees[name] = ProcessTree([sys.executable, *words], env=env, log=self._log(name), namespace=namespace)

    @property
    def pids(self) -> dict[str, int]:
        """The keepers of the machines' processes, by name; a machine ends with its keeper."""
        return {name: tree.pid for name, tree in self._trees.items()}

    def _address(self, name: str) -> str:
        return "127.0.0.1" if self._network is None else self._network.address_of(name)

    def _log(self, name: str) -> Path:
        return self._scratch / f"{name.replace('/', '-')}.log"

    def _check(self, deadline_s: float, what: str) -> None:
        """Raise DeepvmError if a machine has ended, or if time is up."""
        for name, tree in self._trees.items():
            if (code := tree.poll()) is not None:
                tail = _last_line(tail_text(self._log(name), most_bytes=4000))
                why = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
                raise DeepvmError(f"{name} {why}{': ' + tail if tail else ''}; what was measured before is kept")
        if time.monotonic() > deadline_s:
            raise DeepvmError(f"{what} in time; what was measured before is kept: the same command continues")

    # --- measuring --------------------------------------------------------------------------------------------------

    def limit(self, gbps: float | None) -> None:
        """Limit every machine's link, in each direction."""
        if self._network is not None:
            self._network.limit(None if gbps is None else round(gbps * 1e9))

    def connect(self, workers: int, *, share: float) -> None:
        """Let these workers train, and save into the nodes that run; the others rest."""
        store = f"memory://{','.join(self._nodes)}"
        for number, (name, control) in enumerate(sorted(self._controls.items(), key=_by_number)):
            if number < workers:
                control.send(do="connect", store=store, run=f"calibrate-{name.replace('/', '-')}", share=share)
            else:
                control.send(do="close")
        for control in self._controls.values():
            self._answer(control)

    def save(self, workers: int, step: int) -> list[dict[str, Any]]:
        """Save on these workers at once. Return their answers when all checkpoints are remote."""
        controls = [control for _, control in sorted(self._controls.items(), key=_by_number)[:workers]]
        for control in controls:
            control.send(do="save", step=step)
        return [self._answer(control) for control in controls]

    def _answer(self, control: _Control) -> dict[str, Any]:
        answer = control.receive(ANSWER_S, self._check)
        if "error" in answer:
            raise DeepvmError(f"a worker failed: {answer['error']}; what was measured before is kept")
        return answer

    def close(self) -> None:
        """End every process and remove every network, whatever happens meanwhile."""
        for control in self._controls.values():
            control.close()
        self._controls.clear()
        trees = list(self._trees.values())
        self._trees.clear()
        try:
            self._end(trees, within_s=0.0)
        finally:
            self._listener.close()
            if self._network is not None:
                self._network.close()
                self._network = None

    def _end(self, trees: Sequence[ProcessTree], within_s: float = STOP_S) -> None:
        for tree in trees:
            tree.terminate()
            tree.kill(after_s=within_s)
        for tree in trees:
            with contextlib.suppress(TimeoutError):
                tree.wait(timeout_s=within_s + STOP_S)


def _nodes(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith("memory/")]


def _last_line(text: str) -> str:
    found = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
    return found.removeprefix("deepvm: ")[:300]


def _by_number(item: tuple[str, Any]) -> int:
    return int(item[0].partition("/")[2])


class _Control:
    """One worker's connection."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._received = sock, b""
        sock.settimeout(STOP_S)

    def send(self, **message: Any) -> None:
        try:
            self._sock.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise DeepvmError(f"a worker has ended ({error}); what was measured before is kept") from None

    def receive(self, within_s: float, check: Any) -> dict[str, Any]:
        """Return the next answer; ``check`` is called meanwhile, and raises if it cannot come any more."""
        deadline_s = time.monotonic() + within_s
        while b"\n" not in self._received:
            check(deadline_s, "a worker did not answer")
            if not select.select([self._sock], [], [], POLL_S)[0]:
                continue
            found = self._sock.recv(2**20)
            if not found:
                time.sleep(POLL_S)  # its tree ends in a moment, and says how
                check(deadline_s, "a worker did not answer")
            self._received += found
        line, _, self._received = self._received.partition(b"\n")
        return dict(json.loads(line))

    def close(self) -> None:
        self._sock.close()
