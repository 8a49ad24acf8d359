"""``deepvm run --on local``: a plan -> its machines as processes of this host -> the run's report."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from deepvm.errors import DeepvmError, UsageError
from deepvm.events import Event
from deepvm.market.market import Market
from deepvm.market.trace import region_of
from deepvm.performance.profile import Profile
from deepvm.policy import parse_after_loss
from deepvm.protocol.credentials import read_token
from deepvm.runtime.backends.base import Backend
from deepvm.runtime.backends.local.backend import LocalBackend
from deepvm.runtime.backends.local.network import Network
from deepvm.runtime.backends.local.played_market import PlayedMarket, load_markets, split_rules
from deepvm.runtime.cluster import Cluster, cluster_of, scaled
from deepvm.runtime.hub.durability import Durability
from deepvm.runtime.hub.hub import Hub
from deepvm.runtime.ledger.ledger import Ledger
from deepvm.runtime.ledger.measured import measured_profile
from deepvm.runtime.ledger.report import Report, make_report
from deepvm.runtime.log_tail import tail_text
from deepvm.runtime.run_spec import RunSpec
from deepvm.runtime.supervise.fault_injection import Faults, parse_faults
from deepvm.runtime.supervise.gang import Gang
from deepvm.runtime.supervise.local_supervisor import RECONSIDER_S, RETRY_S, Outcome, Supervisor
from deepvm.runtime.supervise.moves.last_moment import lacks_for_deadline, last_moment_of
from deepvm.runtime.supervise.policies import (
    conduct_facts,
    losses_per_h,
    replicas_of,
    scaled_after_loss,
    with_hazard,
)
from deepvm.runtime.supervise.replan import Replanner
from deepvm.runtime.supervise.run_folder import RunFolder
from deepvm.runtime.supervise.run_state import View
from deepvm.runtime.this_machine import here_and_now

STATES_IN_MEMORY = 2.2  # two buffers, and the rest of their last blocks
MOST_OF_MEMORY = 0.25  # of this host, for all memory nodes
PLAYED_RETRY_S, PLAYED_RECONSIDER_S = 0.1, 0.5  # of a played market, whose clock is faster than that of others
LEAST_MEMORY_BYTES = 64_000_000
TAIL_BYTES = 1_000  # of the log of a machine that does not start
CHANGEABLE = (
    "policy", "after_loss", "batch", "seed", "workers", "memory_bytes", "durable", "max_restarts", "isolate",
    "bandwidth_bits_per_s", "replan_threshold", "steps",
)  # fmt: skip
# of a run that is resumed


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a run ended, and its folder."""

    run: str
    folder: Path
    outcome: Outcome
    report: Report


OnView = Callable[[View], None]
Begun = Callable[[RunFolder, Cluster, Supervisor], None]


def run_local(
    cluster: Cluster,
    spec: RunSpec,
    *,
    name: str | None = None,
    watch: OnView = lambda _: None,
    begun: Begun = lambda *_: None,
) -> Ended:
    """Run a plan on this machine until it is finished, failed or interrupted."""
    local, faults, played = checked(cluster, spec)
    spec = spec.with_absolute_paths()
    kept = {"plan": cluster.plan, "settings": spec.to_settings(), "on": "local"}
    folder = RunFolder.create(name or spec.new_name(), kept)
    with Ledger.create(folder.ledger, run=folder.name, cluster=local) as ledger:
        try:
            return _run(folder, local, spec, faults, played, ledger, watch, begun, resumed=False)
        except UsageError:
            if not any(ledger.events()):  # it never began
                folder.remove()
            raise


def resume(
    name: str, *, preempt: str = "", watch: OnView = lambda _: None, begun: Begun = lambda *_: None, **changes: Any
) -> Ended:
    """Continue an interrupted or failed run from its newest checkpoint, in its folder and with its settings.
    ``changes`` are fields of ``RunSpec``, and are kept from now on."""
    folder = RunFolder.find(name)
    found = folder.checked_settings()
    if found["on"] != "local":
        raise UsageError(f"run {name} is on {found['on']} and continues there by itself: only local runs are resumed")
    if fixed := [key for key in changes if key not in CHANGEABLE]:
        raise UsageError(f"a run is resumed with its own {', '.join(fixed)}: leave that out, or start another run")
    spec = replace(RunSpec.from_settings({**found["settings"], "preempt": preempt}), **changes).with_absolute_paths()
    chosen: dict[str, str] = {field: "command line" for field in ("policy", "after_loss") if field in changes}
    spec = replace(spec, origins={**spec.origins, **chosen})
    cluster = cluster_of(found["plan"], folder.path, rank=spec.rank)
    local, faults, played = checked(cluster, spec)
    with Ledger.open(folder.ledger, write=True) as ledger:
        ends = [event.data.get("outcome") for event in ledger.events("run-ended")]
        if ends[-1:] == ["finished"] and not changes and not preempt:  # no machine is needed to find that out
            report = make_report(ledger.events(), ledger.cluster, run=folder.name)
            return Ended(run=folder.name, folder=folder.path, outcome=Outcome(outcome="finished"), report=report)
        folder.keep({"plan": cluster.plan, "settings": replace(spec, preempt="").to_settings(), "on": "local"})
        return _run(folder, local, spec, faults, played, ledger, watch, begun, resumed=True)


MakeMarket = Callable[[Backend], PlayedMarket]


def checked(cluster: Cluster, spec: RunSpec) -> tuple[Cluster, Faults, MakeMarket | None]:
    """Return the part of the cluster that this host can run, its faults and its market. Raise before anything is
    started."""
    spec.check()
    local = scaled(cluster, most_trainers=spec.workers or max(2, os.cpu_count() or 1))
    local = replace(local, notes=(*local.notes, *lacks_for_deadline(local, spec.steps)))
    if not local.keepers and spec.durable is None:
        raise UsageError(
            f"the {local.architecture} plan has no machine that keeps checkpoints: give a durable store with "
            "--durable, or plan with --architecture tiering or single-anchor"
        )
    rules, rest = split_rules(spec.preempt)
    faults = parse_faults(rest, local.machines, spec.seed) if rest else Faults(iter(()), [])
    if not rules:
        return local, faults, None
    markets = load_markets(rules, local.machines)
    local = replace(local, notes=(*local.notes, *_strange_zones(local, [market for market, _ in markets.values()])))
    return local, faults, lambda backend: PlayedMarket(backend, markets)


def _strange_zones(cluster: Cluster, markets: Sequence[Market]) -> Iterator[str]:
    """Yield a note if the plan names zones, and the markets have none of them."""
    planned = cluster.conduct.zones if cluster.conduct is not None else ()
    offered = list(dict.fromkeys(zone for market in markets for zone in market.zones))
    if planned and not any(zone in planned or region_of(zone) in planned for zone in offered):
        yield (
            f"the plan trains in {', '.join(planned)}, and the played market has {', '.join(offered)} only: "
            "the gang stays in one zone"
        )


def _run(
    folder: RunFolder,
    cluster: Cluster,
    spec: RunSpec,
    faults: Faults,
    played: MakeMarket | None,
    ledger: Ledger,
    watch: OnView,
    begun: Begun,
    *,
    resumed: bool,
) -> Ended:
    threads = max(1, (os.cpu_count() or 1) // len(cluster.trainers))
    started = folder.started(
        spec,
        policy=with_hazard(spec.policy, losses_per_h(cluster)),
        after_loss=scaled_after_loss(spec, cluster),
        replicas=replicas_of(cluster.conduct),
        planned_world_size=len(ledger.cluster.trainers),  # at the run's first start: batches are shared by it
        memory_bytes=spec.memory_bytes or _memory_bytes(cluster),
        env={} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(threads)},
    )
    with contextlib.ExitStack() as stack:
        network = Network.create(spec.bandwidth_bits_per_s) if spec.isolate else None
        backend = LocalBackend(started, network=network)
        stack.callback(backend.down)
        token = read_token(folder.token_file) or ""
        hub = Hub(cluster.machines, started, token=token, listen=f"{backend.hub_address}:0").start()
        stack.callback(hub.close)
        if resumed:
            hub.progress.recall(ledger.events("save"))
        backend.spec = replace(started, hub=hub.address)
        durability = Durability(folder.name, nodes=lambda: hub.stores, token=token, durable=spec.durable)
        market, measured = None if played is None else played(backend), partial(_measured, folder, spec, ledger)
        gang = None
        if market is not None:
            after_loss = parse_after_loss(started.after_loss)
            gang = Gang(market, after_loss, threshold=spec.replan_threshold, measured=measured)
            cluster = gang.begin(cluster)
        last_moment = last_moment_of(
            cluster, started, market=market, gang=gang,
            read_earlier=lambda: make_report(ledger.events(), ledger.cluster, run=folder.name),
        )  # fmt: skip
        supervisor = Supervisor(
            cluster, backend=market or backend, hub=hub, ledger=ledger, faults=faults,
            replanner=Replanner(measured=measured, gang=gang, threshold=spec.replan_threshold), watch=watch,
            end_now=backend.stop_now, durability=durability,
            tail_text=lambda name: tail_text(folder.log_of(name), most_bytes=TAIL_BYTES),
            start_facts={
                "resumed": resumed, "script": spec.script, "settings": spec.to_settings(),
                "conduct": conduct_facts(spec, cluster),
            },
            quote=(lambda machine: machine) if market is None else market.quote,
            retry_s=RETRY_S if market is None else PLAYED_RETRY_S, stop_requested=folder.stop_requested,
            reconsider_s=RECONSIDER_S if market is None else PLAYED_RECONSIDER_S, last_moment=last_moment,
        )  # fmt: skip
        folder.stop_requested()  # one of an earlier session, which came too late
        begun(folder, cluster, supervisor)
        outcome = supervisor.follow()
    report = _with_profile(folder, spec, ledger, supervisor.unwritten)
    return Ended(run=folder.name, folder=folder.path, outcome=outcome, report=report)


def _with_profile(folder: RunFolder, spec: RunSpec, ledger: Ledger, unwritten: Sequence[Event]) -> Report:
    """Write what the run measured into its folder, and return its report, which names the file."""
    report = make_report(chain(ledger.events(), unwritten), ledger.cluster, run=folder.name)
    try:
        profile = _measured(folder, spec, ledger, unwritten, report)
        if profile is not None:
            profile.write(folder.profile, private=True)
    except DeepvmError as error:
        return replace(report, warnings=(*report.warnings, f"what was measured is not written: {error}"))
    return replace(report, profile=None if profile is None else str(folder.profile))


def _measured(
    folder: RunFolder,
    spec: RunSpec,
    ledger: Ledger,
    unwritten: Sequence[Event] = (),
    report: Report | None = None,
) -> Profile | None:
    report = report or make_report(ledger.events(), ledger.cluster, run=folder.name)
    workload = spec.script if spec.module else Path(spec.script).stem
    return measured_profile(chain(ledger.events(), unwritten), report, workload=workload, provenance=here_and_now())


def _memory_bytes(cluster: Cluster) -> int:
    wanted = (cluster.checkpoint_bytes or 0) * STATES_IN_MEMORY
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * MOST_OF_MEMORY / max(1, len(cluster.keepers))
    return max(LEAST_MEMORY_BYTES, int(min(wanted, most)))
