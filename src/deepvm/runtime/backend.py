"""The seam between a run and where its machines come from; one contract test is for every backend."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from deepvm.errors import DeepvmError
from deepvm.policy.batch import KEEP_GLOBAL
from deepvm.runtime.cluster import Machine


class NoCapacity(DeepvmError):
    """There are no such machines now: others may do, or the same later."""

    def __init__(self, machine: Machine, why: str) -> None:
        self.machine = machine
        super().__init__(f"no {machine.market} {machine.instance} is to be had for {machine.name}: {why}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What every machine of a run is told."""

    run: str
    script: str
    args: tuple[str, ...]
    folder: Path  # of the run: ledger, logs, token; on the machine where deepvm run was started
    hub: str  # HOST:PORT where machines meet
    token_file: Path
    policy: str  # when to save
    after_loss: str = "wait"
    batch: str = KEEP_GLOBAL
    planned_world_size: int = 1
    memory_bytes: int = 0  # for checkpoints, on each machine that keeps them; 0: as much as its role can spare
    durable: str | None = None  # a store's URL
    max_restarts: int = 3  # of a worker that fails by itself
    env: Mapping[str, str] = field(default_factory=dict)
    module: bool = False  # the script is a module's name
    cwd: str = ""  # of the workers, on machines played here; empty: that of deepvm run


TOLD = (
    "run", "script", "args", "policy", "after_loss", "batch", "planned_world_size", "memory_bytes", "durable",
    "max_restarts", "env", "module",
)  # fmt: skip
# of a job, to each machine that joins


def job_document(job: Job, machines: Iterable[Machine], **there: Any) -> dict[str, Any]:
    """The job as the hub of a cluster reads it from a file on its own machine; ``there`` is what is different there."""
    told = {name: getattr(job, name) for name in TOLD}
    return {
        **told,
        "args": list(job.args),
        "env": dict(job.env),
        "machines": [asdict(machine) for machine in machines],
        **there,
    }


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
