"""The seam between a run and where its machines come from; one contract test is for every backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from deepvm.errors import DeepvmError
from deepvm.runtime.cluster import Machine


class NoCapacity(DeepvmError):
    """There are no such machines now: others may do, or the same later."""

    def __init__(self, machine: Machine, why: str) -> None:
        self.machine = machine
        super().__init__(f"no {machine.market} {machine.instance} is to be had for {machine.name}: {why}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """What became of a machine."""

    machine: str
    state: Literal["up", "down"]
    why: str = ""  # down: preempted, lost, failed, left, ended or stopped
    exit_code: int | None = None
    at_s: float = 0.0  # since 1970
    address: str | None = None


class Backend(Protocol):
    """Machines by name. Nothing of it blocks for longer than it takes to ask."""

    def up(self, machines: Sequence[Machine]) -> None:
        """Ask for these machines, all or some of a cluster; those that are up already, or on their way, are refused
        (UsageError). NoCapacity where the market has none of them now: what was asked for before it stays asked."""
        ...

    def poll(self) -> Sequence[Change]:
        """What changed since the last call, in order: one ``down`` for each machine that was asked for, and an ``up``
        before it if it came to be. NoCapacity, once for each reason, where a cloud tells that only later."""
        ...

    def preempt(self, name: str, *, notice_s: float) -> None:
        """Take a machine away on purpose: a notice, then its end. UsageError where that cannot be done here."""
        ...

    def down(self, names: Sequence[str] | None = None, *, within_s: float = 10.0) -> None:
        """End these machines, or all, and leave nothing behind: asked to stop first, ended after ``within_s``."""
        ...
