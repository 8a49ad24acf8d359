"""What every machine of a run has to know: the job, and the document that carries it to the hub of a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deepvm.policy.batch import KEEP_GLOBAL
from deepvm.runtime.cluster import Machine


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


JOB_FIELDS = (
    "run", "script", "args", "policy", "after_loss", "batch", "planned_world_size", "memory_bytes", "durable",
    "max_restarts", "env", "module",
)  # fmt: skip
# of a job, to each machine that joins


def job_document(job: Job, machines: Iterable[Machine], **there: Any) -> dict[str, Any]:
    """The job as the hub of a cluster reads it from a file on its own machine; ``there`` is what is different there."""
    told = {name: getattr(job, name) for name in JOB_FIELDS}
    return {
        **told,
        "args": list(job.args),
        "env": dict(job.env),
        "machines": [asdict(machine) for machine in machines],
        **there,
    }
