"""The machines of a run: what a plan says, and what of it this machine can hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from deepvm.errors import MalformedFile, UsageError
from deepvm.plan.result import FORMAT as PLAN_FORMAT

RoleName = Literal["worker", "anchor", "memory"]
Market = Literal["spot", "on-demand"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One place in the cluster. What replaces a lost machine has the same name: ``worker/2``."""

    name: str
    role: RoleName
    instance: str
    market: Market
    usd_per_hour: float
    on_demand_usd_per_hour: float | None  # of the same type
    region: str | None = None
    zone: str | None = None

    @property
    def trains(self) -> bool:
        return self.role != "memory"

    @property
    def keeps(self) -> bool:
        """Whether checkpoints are in its memory."""
        return self.role != "worker"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    machines: tuple[Machine, ...]
    architecture: str
    catalog: str
    checkpoint_bytes: int | None
    restore_s: float | None  # the plan's forecast of how long training stands still after a loss
    notes: tuple[str, ...] = ()  # in what it differs from the plan
    plan: Mapping[str, Any] = field(default_factory=dict, repr=False)  # the document that it comes from

    @property
    def hourly_usd(self) -> float:
        return sum(machine.usd_per_hour for machine in self.machines)

    @property
    def trainers(self) -> tuple[Machine, ...]:
        return tuple(machine for machine in self.machines if machine.trains)

    @property
    def keepers(self) -> tuple[Machine, ...]:
        return tuple(machine for machine in self.machines if machine.keeps)


def billing_facts(machine: Machine) -> dict[str, Any]:
    """What events of a machine tell of it, and its bill needs."""
    return {
        "role": machine.role,
        "instance": machine.instance,
        "market": machine.market,
        "usd_per_hour": machine.usd_per_hour,
        "on_demand_usd_per_hour": machine.on_demand_usd_per_hour,
    }


def load_cluster(path: Path | str, *, rank: int = 1) -> Cluster:
    """The recommendation of that rank in a file that ``deepvm plan -o`` wrote."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise MalformedFile(
            path, f"it is no JSON ({error}); make a plan with: deepvm plan --budget 3 -o plan.json"
        ) from None
    return cluster_of(document, path, rank=rank)


def cluster_of(document: Any, path: Path | str, *, rank: int = 1) -> Cluster:
    found = document.get("format") if isinstance(document, dict) else None
    if found != PLAN_FORMAT:
        what = f"its format is {found!r}" if found else "it has no format"
        raise MalformedFile(path, f"{what}, this deepvm reads {PLAN_FORMAT!r}: make the plan again with deepvm plan -o")
    try:
        ranked = {row["rank"]: row for row in document["recommendations"]}
        if rank not in ranked:
            raise UsageError(f"{path} has no plan of rank {rank}: it has {', '.join(map(str, ranked)) or 'none'}")
        chosen = ranked[rank]
        on_demand = {row["instance"]: row["on_demand_usd"] for row in document["instances"]}
        machines: list[Machine] = []
        counted: dict[str, int] = {}
        for role in chosen["roles"]:
            own = role["usd_per_hour"] if role["market"] == "on-demand" else on_demand.get(role["instance"])
            for _ in range(role["count"]):
                number = counted.setdefault(role["role"], 0)
                counted[role["role"]] += 1
                machines.append(
                    Machine(
                        name=f"{role['role']}/{number}",
                        role=role["role"],
                        instance=role["instance"],
                        market=role["market"],
                        usd_per_hour=float(role["usd_per_hour"]),
                        on_demand_usd_per_hour=None if own is None else float(own),
                        region=role["region"],
                        zone=role["zone"],
                    )
                )
        restore = chosen.get("restore") or {}
        return Cluster(
            machines=tuple(machines),
            architecture=chosen["architecture"],
            catalog=document["catalog"],
            checkpoint_bytes=document["request"].get("checkpoint_bytes"),
            restore_s=restore.get("on_demand_total_s"),
            plan=document,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MalformedFile(path, f"it is no whole plan ({type(error).__name__}: {error})") from None


def scaled(cluster: Cluster, *, most_trainers: int, most_memory: int = 1) -> Cluster:
    """As much of the cluster as a machine can hold that plays all of it: the first machines of each role."""
    if most_trainers < 1:
        raise UsageError(f"{most_trainers} machines that train: at least one must be left")
    anchors = [m for m in cluster.machines if m.role == "anchor"][:most_trainers]
    workers = [m for m in cluster.machines if m.role == "worker"][: most_trainers - len(anchors)]
    memory = [m for m in cluster.machines if m.role == "memory"][:most_memory]
    kept = tuple(m for m in cluster.machines if m in {*anchors, *workers, *memory})
    if len(kept) == len(cluster.machines):
        return cluster
    note = f"the plan has {_counts(cluster.machines)}; here {_counts(kept)} run"
    return replace(cluster, machines=kept, notes=(*cluster.notes, note))


def _counts(machines: tuple[Machine, ...]) -> str:
    roles = [machine.role for machine in machines]
    named = {"worker": "workers", "anchor": "anchors", "memory": "memory nodes"}
    words = [f"{roles.count(r)} {named[r] if roles.count(r) != 1 else named[r][:-1]}" for r in named if r in roles]
    return ", ".join(words)
