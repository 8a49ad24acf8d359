"""``deepvm run --on local``: every role of a plan as processes of this machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from deepvm.errors import DeepvmError, UsageError
from deepvm.policy import parse_policy
from deepvm.policy.batch import BATCH_POLICIES, KEEP_GLOBAL
from deepvm.policy.loss import parse_after_loss
from deepvm.protocol.credentials import read_token
from deepvm.runtime.backends.local.backend import LocalBackend
from deepvm.runtime.backends.local.network import Isolation
from deepvm.runtime.cluster import Cluster, cluster_of, scaled
from deepvm.runtime.entry import Entry
from deepvm.runtime.hub.durability import Durability
from deepvm.runtime.hub.hub import Hub
from deepvm.runtime.ledger.ledger import Ledger
from deepvm.runtime.ledger.report import Report, make_report
from deepvm.runtime.log_tail import tail_text
from deepvm.runtime.run_spec import Job, job_document
from deepvm.runtime.supervise.fault_injection import Faults, parse_faults
from deepvm.runtime.supervise.replan import Replanner
from deepvm.runtime.supervise.run_folder import RunFolder, new_name
from deepvm.runtime.supervise.supervisor import Outcome, Supervisor
from deepvm.runtime.supervise.view import View
from deepvm.store.urls import open_store

STATES_IN_MEMORY = 2.2  # two buffers, and the last blocks' rest
MOST_OF_MEMORY = 0.25  # of this machine, for all memory nodes that it plays
LEAST_MEMORY_BYTES = 64_000_000
WORDS_BYTES = 1_000  # of a machine that does not start
CHANGEABLE = (
    "policy", "after_loss", "batch", "seed", "workers", "memory_bytes", "durable", "max_restarts", "isolate",
    "bandwidth_bits_per_s",
)  # fmt: skip
# of a run that is resumed


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """How a plan is run here; kept with the run, so that it can be resumed."""

    script: str
    args: tuple[str, ...] = ()
    module: bool = False  # the script is a module's name, as after ``python -m``
    cwd: str = ""  # where it runs; empty: where deepvm run was started
    rank: int = 1  # of the plan's recommendations
    policy: str = "every 10s or at notice"
    after_loss: str = "wait"
    batch: str = KEEP_GLOBAL
    preempt: str = ""
    seed: int = 0
    workers: int | None = None  # machines that train, at most
    memory_bytes: int | None = None  # of each memory node
    durable: str | None = None
    max_restarts: int = 3
    isolate: bool = False
    bandwidth_bits_per_s: int | None = None

    def check(self) -> RunSettings:
        """Before anything is run with them."""
        folder = self.cwd or os.getcwd()
        if not Path(folder).is_dir():
            raise UsageError(f"the run was started in {folder}, which is gone: make that folder again, or start anew")
        Entry(script=self.script, args=self.args, module=self.module).check(folder)
        parse_policy(self.policy)
        parse_after_loss(self.after_loss)
        if self.batch not in BATCH_POLICIES:
            raise UsageError(f"{self.batch!r} is no policy for batches: {' or '.join(BATCH_POLICIES)}")
        if self.workers is not None and self.workers < 1:
            raise UsageError(f"{self.workers} machines that train: at least one")
        if self.bandwidth_bits_per_s is not None and not self.isolate:
            raise UsageError("--bandwidth is for machines in networks of their own: give --isolate, too")
        if self.durable is not None:
            self._check_durable(self.durable)
        return self

    def new_name(self) -> str:
        """For a run of them."""
        return new_name(self.script.replace(".", "-") if self.module else self.script)

    def wherever(self) -> RunSettings:
        """The same for a process that was started in another folder."""
        folder = Path(self.cwd or os.getcwd()).resolve()
        script = self.script if self.module else str(Path(folder, self.script).resolve())
        durable = self.durable
        if durable is not None and "://" not in durable:
            durable = str(Path(folder, durable))
        return replace(self, script=script, cwd=str(folder), durable=durable)

    @staticmethod
    def _check_durable(url: str) -> None:
        if url.lower().startswith("memory:"):
            raise UsageError(f"--durable {url} is memory, too: give a directory, file:// or s3://")
        try:
            open_store(url).close()
        except DeepvmError as error:
            raise UsageError(f"--durable {url}: {error}") from None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "args": list(self.args)}

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> RunSettings:
        return RunSettings(**{**found, "args": tuple(found["args"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a run ended, and where what is left of it is."""

    run: str
    folder: Path
    outcome: Outcome
    report: Report


Watch = Callable[[View], None]
Begun = Callable[[RunFolder, Cluster, Supervisor], None]


def run_local(
    cluster: Cluster,
    settings: RunSettings,
    *,
    name: str | None = None,
    watch: Watch = lambda _: None,
    begun: Begun = lambda *_: None,
) -> Ended:
    """Run a plan on this machine until it is finished, failed or interrupted."""
    played, faults = _checked(cluster, settings)
    settings = settings.wherever()
    kept = {"plan": cluster.plan, "settings": settings.to_json(), "on": "local"}
    folder = RunFolder.create(name or settings.new_name(), kept)
    with Ledger.create(folder.ledger, run=folder.name, cluster=played) as ledger:
        try:
            return _run(folder, played, settings, faults, ledger, watch, begun, resumed=False)
        except UsageError:
            if not any(ledger.events()):  # it never began
                folder.remove()
            raise


def resume(
    name: str, *, preempt: str = "", watch: Watch = lambda _: None, begun: Begun = lambda *_: None, **changes: Any
) -> Ended:
    """Continue a run that was interrupted, or failed: from its newest checkpoint, in the folder where it was started,
    with its settings. ``changes`` are fields of ``RunSettings``, and hold from now on."""
    folder = RunFolder.find(name)
    found = folder.settings()
    if found["on"] != "local":
        raise UsageError(
            f"run {name} is not one of this machine: it runs on {found['on']}, and goes on there by itself"
        )
    if fixed := [key for key in changes if key not in CHANGEABLE]:
        raise UsageError(f"a run is resumed with its own {', '.join(fixed)}: leave that out, or start another run")
    settings = replace(RunSettings.from_json({**found["settings"], "preempt": preempt}), **changes).wherever()
    cluster = cluster_of(found["plan"], folder.path, rank=settings.rank)
    played, faults = _checked(cluster, settings)
    with Ledger.open(folder.ledger, write=True) as ledger:
        folder.keep({"plan": cluster.plan, "settings": replace(settings, preempt="").to_json(), "on": "local"})
        planned = len(ledger.cluster.trainers)
        return _run(folder, played, settings, faults, ledger, watch, begun, resumed=True, planned=planned)


def _checked(cluster: Cluster, settings: RunSettings) -> tuple[Cluster, Faults]:
    """What of the cluster is played here, and what is taken away from it; before anything is made."""
    settings.check()
    played = scaled(cluster, most_trainers=settings.workers or max(2, os.cpu_count() or 1))
    if not played.keepers:
        raise UsageError(
            f"the plan's {played.architecture} has no machine that keeps checkpoints: plan one with a memory node"
        )
    return played, parse_faults(settings.preempt, played.machines, settings.seed) if settings.preempt else Faults(
        iter(()), []
    )


def _run(
    folder: RunFolder,
    cluster: Cluster,
    settings: RunSettings,
    faults: Faults,
    ledger: Ledger,
    watch: Watch,
    begun: Begun,
    *,
    resumed: bool,
    planned: int | None = None,
) -> Ended:
    """``planned``: ranks at the run's first start, which batches are shared after."""
    job = _job(folder, cluster, settings, planned or len(cluster.trainers))
    isolate = Isolation(bandwidth_bits_per_s=settings.bandwidth_bits_per_s) if settings.isolate else None
    with contextlib.ExitStack() as stack:
        backend = LocalBackend(job, isolate=isolate)
        stack.callback(backend.down)
        token = read_token(folder.token_file) or ""
        hub = Hub(
            cluster.machines, token=token, job=job_document(job, ()),
            after_loss=parse_after_loss(settings.after_loss), listen=f"{backend.hub_address}:0",
        )  # fmt: skip
        stack.callback(hub.close)
        if resumed:
            hub.progress.recall(ledger.events("save"))
        backend.job = replace(job, hub=hub.address)
        durability = Durability(folder.name, nodes=lambda: hub.stores, token=token, durable=settings.durable)
        supervisor = Supervisor(
            cluster, run=folder.name, backend=backend, hub=hub, ledger=ledger, faults=faults,
            replanner=Replanner(), watch=watch, end_now=backend.stop_now, durability=durability,
            tail_text=lambda name: tail_text(folder.log_of(name), most_bytes=WORDS_BYTES),
            about={"resumed": resumed, "script": settings.script, "settings": settings.to_json()},
        )  # fmt: skip
        begun(folder, cluster, supervisor)
        outcome = supervisor.follow()
    report = make_report(chain(ledger.events(), supervisor.unwritten), ledger.cluster, run=folder.name)
    return Ended(run=folder.name, folder=folder.path, outcome=outcome, report=report)


def _job(folder: RunFolder, cluster: Cluster, settings: RunSettings, planned: int) -> Job:
    trainers = len(cluster.trainers)
    threads = max(1, (os.cpu_count() or 1) // trainers)
    return Job(
        run=folder.name,
        script=settings.script,
        args=settings.args,
        module=settings.module,
        cwd=settings.cwd,
        folder=folder.path,
        hub="",
        token_file=folder.token_file,
        policy=settings.policy,
        after_loss=settings.after_loss,
        batch=settings.batch,
        planned_world_size=planned,
        memory_bytes=settings.memory_bytes or _memory_bytes(cluster),
        durable=settings.durable,
        max_restarts=settings.max_restarts,
        env={} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(threads)},
    )


def _memory_bytes(cluster: Cluster) -> int:
    wanted = (cluster.checkpoint_bytes or 0) * STATES_IN_MEMORY
    here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * MOST_OF_MEMORY / max(1, len(cluster.keepers))
    return max(LEAST_MEMORY_BYTES, int(min(wanted, here)))
