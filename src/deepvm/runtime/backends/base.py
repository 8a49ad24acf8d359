"""The interface of every source of machines, for ``supervise``; one contract test covers every backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from deepvm.errors import DeepvmError
from deepvm.runtime.cluster import Machine


class NoCapacity(DeepvmError):
    """The market has no such machine now; another type, or the same later, may be available."""

    def __init__(self, machine: Machine, why: str) -> None:
        self.machine = machine
        super().__init__(f"no {machine.market} capacity for {machine.instance} ({machine.name}): {why}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A change of a machine's state."""

    machine: str
    state: Literal["up", "down"]
    why: str = ""  # down: preempted, lost, failed, left, ended or stopped
    exit_code: int | None = None
    at_s: float = 0.0  # since 1970
    address: str | None = None


class Backend(Protocol):
    """Machines by name. No method blocks for longer than a request takes."""

    def up(self, machines: Sequence[Machine]) -> None:
        """Request these machines, all or some of a cluster. Raise UsageError for one that is up or requested already,
        and NoCapacity if the market has none now; those before it in the list stay requested."""
        ...

    def poll(self) -> Sequence[Change]:
        """Return the changes since the last call, in order: one ``down`` for each requested machine, and an ``up``
        before it if it started. Raise NoCapacity, once for each reason, if a cloud reports that only later."""
        ...

    def preempt(self, name: str, *, notice_s: float) -> None:
        """Preempt a machine on purpose: a notice, then its end. Raise UsageError if that is not possible."""
        ...

    def down(self, names: Sequence[str] | None = None, *, within_s: float = 10.0) -> None:
        """End these machines, or all, and leave nothing behind: first a request to stop, then a kill after
        ``within_s``."""
        ...
