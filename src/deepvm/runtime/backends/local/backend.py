"""A run's machines as process trees of this host, which can be preempted as in a cloud."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from deepvm.errors import DeepvmError, UnknownName, UsageError
from deepvm.fetch import segment_files
from deepvm.runtime.agent.interfaces import VARIABLES
from deepvm.runtime.agent.prefetch import segment_of
from deepvm.runtime.backends.base import Change
from deepvm.runtime.backends.local.network import INTERFACE, Network
from deepvm.runtime.backends.local.process_tree import ProcessTree
from deepvm.runtime.cluster import Machine
from deepvm.runtime.notices.files import write_notice
from deepvm.runtime.run_spec import RunSpec

LOOPBACK = "127.0.0.1"
_KILL_S = 10.0  # for SIGKILL to take effect


@dataclass
class _LocalMachine:
    machine: Machine
    tree: ProcessTree
    why: str | None = None  # of its end, if this process ended it
    ended: bool = False


class LocalBackend:
    """For one thread. Its machines end with this process. After a SIGKILL, only empty network namespaces are left,
    which the next run removes."""

    def __init__(
        self,
        spec: RunSpec,
        *,
        network: Network | None = None,
        command: Callable[[Machine], Sequence[str]] | None = None,
    ) -> None:
        """``command`` returns what a machine runs, instead of deepvm's agent."""
        self.spec = spec  # read by up(); replaced before that, when the hub's address is known
        self._command = command or self.machine_command
        self._network = network
        self._machines: dict[str, _LocalMachine] = {}
        self._changes: list[Change] = []
        self._stopping_now = False

    @property
    def hub_address(self) -> str:
        """Return the address where the hub must listen."""
        return LOOPBACK if self._network is None else self._network.address

    def address_of(self, name: str) -> str:
        return LOOPBACK if self._network is None else self._network.address_of(name)

    def folder_of(self, name: str) -> Path:
        """Return the folder of a machine's log, notice and spilled checkpoints."""
        return self.spec.folder / "machines" / name.replace("/", "-")

    def notice_file(self, name: str) -> Path:
        return self.folder_of(name) / "notice.json"

    def machine_command(self, machine: Machine) -> list[str]:
        return [
            sys.executable, "-m", "deepvm.runtime.agent",
            "--hub", self.spec.hub,
            "--name", machine.name,
            "--token-file", str(self.spec.token_file),
            "--folder", str(self.folder_of(machine.name)),
            "--address", self.address_of(machine.name),
            "--notices", f"file:{self.notice_file(machine.name)}",
        ]  # fmt: skip

    def up(self, machines: Sequence[Machine]) -> None:
        self._poll_trees()
        names = [machine.name for machine in machines]
        for name in names:
            if names.count(name) > 1 or self._runs(name):
                raise UsageError(f"{name} is up already: end it before it is requested again")
        for machine in machines:
            self._machines[machine.name] = _LocalMachine(machine, self._start(machine))
            self._add_change(machine.name, "up")

    def poll(self) -> Sequence[Change]:
        self._poll_trees()
        changes, self._changes = self._changes, []
        return changes

    def preempt(self, name: str, *, notice_s: float) -> None:
        """Preempt a machine. One that leaves after its notice, before it is killed, counts as preempted, too."""
        if not (math.isfinite(notice_s) and notice_s >= 0):
            raise UsageError(f"notice_s is {notice_s}: it must be finite and not negative")
        local = self._machine(name)
        self._poll_trees()
        if local.ended:
            raise UsageError(f"{name} is down already: only a machine that is up can be preempted")
        if notice_s > 0:
            write_notice(self.notice_file(name), seconds_left=notice_s)
        local.why = "preempted"
        local.tree.kill(after_s=notice_s)

    def down(self, names: Sequence[str] | None = None, *, within_s: float = 10.0) -> None:
        chosen = list(self._machines) if names is None else list(names)
        self._poll_trees()
        running = [local for name in chosen if not (local := self._machine(name)).ended]
        for local in running:
            local.why = local.why or "stopped"
            if within_s > 0:
                local.tree.terminate()
            local.tree.kill(after_s=0.0 if self._stopping_now else max(0.0, within_s))
        deadline = time.monotonic() + max(0.0, within_s) + _KILL_S
        for local in running:
            try:
                local.tree.wait(timeout_s=max(0.0, deadline - time.monotonic()))
            except TimeoutError as error:
                raise DeepvmError(f"{local.machine.name} cannot be ended: {error}; end it by hand") from None
        self._poll_trees()
        if self._network is not None:
            for name in chosen:
                self._network.leave(name)
            if names is None:
                self._network.close()

    def stop_now(self) -> None:
        """Kill all machines now, also those that ``down`` waits for; a signal handler may call it."""
        self._stopping_now = True
        for local in list(self._machines.values()):
            if not local.ended:
                local.why = local.why or "stopped"
                local.tree.kill()

    def _start(self, machine: Machine) -> ProcessTree:
        folder = self.folder_of(machine.name)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.notice_file(machine.name).unlink(missing_ok=True)  # of the machine that it replaces
        segment_files.remove(segment_of(folder))
        namespace = None if self._network is None else self._network.join(machine.name)
        interfaces = {} if namespace is None else dict.fromkeys(VARIABLES, INTERFACE)
        env = {**os.environ, **interfaces, **self.spec.env}
        return ProcessTree(
            self._command(machine), env=env, log=folder / "log.txt", namespace=namespace, cwd=self.spec.cwd or None
        )

    def _poll_trees(self) -> None:
        """Add a change for each machine that has ended."""
        for name, local in self._machines.items():
            if local.ended or (code := local.tree.poll()) is None:
                continue
            local.ended = True
            segment_files.remove(segment_of(self.folder_of(name)))
            by_itself = "ended" if code == 0 else "failed" if code > 0 else "lost"
            self._add_change(name, "down", why=local.why or by_itself, exit_code=code)

    def _add_change(
        self, name: str, state: Literal["up", "down"], *, why: str = "", exit_code: int | None = None
    ) -> None:
        address = self.address_of(name)
        self._changes.append(
            Change(machine=name, state=state, why=why, exit_code=exit_code, at_s=time.time(), address=address)
        )

    def _runs(self, name: str) -> bool:
        return name in self._machines and not self._machines[name].ended

    def _machine(self, name: str) -> _LocalMachine:
        if name not in self._machines:
            raise UnknownName("machine", name, self._machines)
        return self._machines[name]
