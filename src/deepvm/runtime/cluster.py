"""A plan file -> the machines of a run, and the part of them that one host can run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from deepvm import strict_json as strict
from deepvm.errors import MalformedFile, UsageError
from deepvm.plan.result import FORMAT as PLAN_FORMAT
from deepvm.policy.conduct import Conduct

RoleName = Literal["worker", "anchor", "memory"]
Market = Literal["spot", "on-demand"]
T = TypeVar("T")
MOST_PLAN_BYTES = 64 * 2**20
MOST_MACHINES = 10_000
MOST_ROWS = 100_000
MOST_S, MOST_WORK = 1e12, 1e18
_NAME = 200  # characters


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One machine of the cluster. The replacement of a lost one has the same name: ``worker/2``."""

    name: str
    role: RoleName
    instance: str
    market: Market
    usd_per_hour: float
    on_demand_usd_per_hour: float | None  # of the same type
    region: str | None = None
    zone: str | None = None
    cloud: str | None = None  # if the plan is over several

    @property
    def trains(self) -> bool:
        return self.role != "memory"

    @property
    def place(self) -> tuple[str | None, ...]:
        """Return what the market distinguishes: the type, the market, the region and the zone."""
        return self.instance, self.market, self.region, self.zone

    @property
    def keeps(self) -> bool:
        """True if it keeps checkpoints in its memory."""
        return self.role != "worker"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    machines: tuple[Machine, ...]
    architecture: str
    catalog: str
    checkpoint_bytes: int | None
    restore_s: float | None  # the plan's forecast of how long training stands still after a loss
    work_h: float | None = None  # the plan's forecast of how long the whole work takes without any loss
    deadline_s: float | None = None  # from the start of the run
    notes: tuple[str, ...] = ()  # how it differs from the plan
    conduct: Conduct | None = None  # what the plan says about the run
    failover: tuple[Machine, ...] = ()  # one of each role of the plan's failover list, in its order
    plan: Mapping[str, Any] = field(default_factory=dict, repr=False)  # the plan document

    @property
    def hourly_usd(self) -> float:
        return sum(machine.usd_per_hour for machine in self.machines)

    @property
    def trainers(self) -> tuple[Machine, ...]:
        return tuple(machine for machine in self.machines if machine.trains)

    @property
    def gang(self) -> tuple[Machine, ...]:
        """Return the machines that train and that the market may take."""
        return tuple(machine for machine in self.trainers if machine.market == "spot")

    @property
    def keepers(self) -> tuple[Machine, ...]:
        return tuple(machine for machine in self.machines if machine.keeps)


def billing_facts(machine: Machine) -> dict[str, Any]:
    """Return what events record about a machine, for the bill."""
    return {
        "role": machine.role,
        "instance": machine.instance,
        "market": machine.market,
        "usd_per_hour": machine.usd_per_hour,
        "on_demand_usd_per_hour": machine.on_demand_usd_per_hour,
        "region": machine.region,
        "zone": machine.zone,
    }


def hub_of(cluster: Cluster) -> Machine:
    """Return the machine with the hub in a cloud: the first on-demand one that keeps checkpoints, if there is one."""
    on_demand = [machine for machine in cluster.machines if machine.market == "on-demand"]
    if not on_demand:
        raise UsageError(
            f"the {cluster.architecture} plan has spot machines only, and the hub needs an on-demand one: "
            "plan with --architecture tiering or single-anchor"
        )
    return next((machine for machine in on_demand if machine.keeps), on_demand[0])


def load_cluster(path: Path | str, *, rank: int = 1) -> Cluster:
    """Read the recommendation of that rank from a file that ``deepvm plan -o`` wrote."""
    hint = "make a plan with: deepvm plan --budget 3 -o plan.json"
    return cluster_of(strict.read_file(path, most_bytes=MOST_PLAN_BYTES, hint=hint), path, rank=rank)


def cluster_of(document: Any, path: Path | str, *, rank: int = 1) -> Cluster:
    found = document.get("format") if isinstance(document, dict) else None
    if found != PLAN_FORMAT:
        what = f"its format is {strict.brief(found)}" if found else "it has no format"
        raise MalformedFile(path, f"{what}, this deepvm reads {PLAN_FORMAT!r}: make the plan again with deepvm plan -o")
    try:
        chosen = _recommendation(document, path, rank)
        request = strict.table(strict.member(document, "request"), "request")
        _optional(strict.number, request.get("budget_usd"), "budget_usd", 0, MOST_WORK)
        restore = strict.table(chosen.get("restore") or {}, "restore")
        machines = _machines(document, chosen)
        return Cluster(
            machines=machines,
            architecture=strict.text(strict.member(chosen, "architecture"), "architecture", _NAME),
            catalog=strict.text(strict.member(document, "catalog"), "catalog", _NAME),
            checkpoint_bytes=_optional(strict.integer, request.get("checkpoint_bytes"), "checkpoint_bytes", 0, 2**62),
            restore_s=_optional(strict.number, restore.get("on_demand_total_s"), "on_demand_total_s", 0, 1e9),
            failover=tuple(_failover(document)),
            work_h=_work_h(request, chosen),
            deadline_s=_optional(strict.number, request.get("deadline_s"), "deadline_s", 0, MOST_S),
            conduct=_conduct(chosen, machines),
            plan=document,
        )
    except strict.MalformedJson as error:
        raise MalformedFile(path, f"not a valid plan: {error}") from None


def _recommendation(document: Mapping[str, Any], path: Path | str, rank: int) -> dict[str, Any]:
    rows = strict.array(strict.member(document, "recommendations"), "recommendations", MOST_ROWS)
    if not rows:
        raise strict.MalformedJson("it has no recommendations")
    ranked = {
        strict.integer(strict.member(strict.table(row, "a recommendation"), "rank"), "rank", 1, MOST_ROWS): row
        for row in rows
    }
    if rank not in ranked:
        ranks = ", ".join(map(str, list(ranked)[:20]))
        raise UsageError(f"{path} has no plan of rank {rank}: choose one of {ranks}")
    return dict(ranked[rank])


def _conduct(chosen: Mapping[str, Any], machines: Sequence[Machine]) -> Conduct | None:
    if chosen.get("conduct") is None:
        return None
    conduct, roles = Conduct.from_json(chosen["conduct"]), [machine.role for machine in machines]
    memory = roles.count("memory")
    conduct.check_machines(trainers=len(roles) - memory, anchors=roles.count("anchor"), memory=memory)
    return conduct


def _work_h(request: Mapping[str, Any], chosen: Mapping[str, Any]) -> float | None:
    work = _optional(strict.number, request.get("work_eflops_h"), "work_eflops_h", 0, MOST_WORK)
    performance = _optional(strict.number, chosen.get("performance"), "performance", 0, MOST_WORK)
    return work / performance if work is not None and performance else None


def _machines(document: Mapping[str, Any], chosen: Mapping[str, Any]) -> tuple[Machine, ...]:
    on_demand = {}
    for row in strict.array(strict.member(document, "instances"), "instances", MOST_ROWS):
        name = strict.text(strict.member(strict.table(row, "an instance"), "instance"), "instance", _NAME, least=1)
        on_demand[name] = _optional(_price, strict.member(row, "on_demand_usd"), "on_demand_usd")
        _optional(strict.text, row.get("accelerator"), "accelerator", _NAME)  # runs read these from the plan
        _optional(strict.number, row.get("eflops"), "eflops", 0, MOST_WORK)
    machines: list[Machine] = []
    counted: dict[str, int] = {}
    for role in strict.array(strict.member(chosen, "roles"), "roles", MOST_MACHINES):
        one = _machine(strict.table(role, "a role"), on_demand)
        count = strict.integer(strict.member(role, "count"), "count", 0, MOST_MACHINES - len(machines))
        begin = counted.get(one.role, 0)
        counted[one.role] = begin + count
        machines += [replace(one, name=f"{one.role}/{number}") for number in range(begin, begin + count)]
    return tuple(machines)


def _failover(document: Mapping[str, Any]) -> Iterator[Machine]:
    for row in strict.array(document.get("failover") or [], "failover", MOST_ROWS):
        found = _machines(document, strict.table(row, "a failover"))
        roles = dict.fromkeys((machine.role, machine.market) for machine in found)
        yield from (next(machine for machine in found if (machine.role, machine.market) == role) for role in roles)


def _machine(role: Mapping[str, Any], on_demand: Mapping[str, float | None]) -> Machine:
    name, market = strict.member(role, "role"), strict.member(role, "market")
    if name not in get_args(RoleName) or market not in get_args(Market):
        raise strict.MalformedJson(f"role is {strict.brief(name)} and market is {strict.brief(market)}")
    instance = strict.text(strict.member(role, "instance"), "instance", _NAME, least=1)
    usd_per_hour = _price(strict.member(role, "usd_per_hour"), "usd_per_hour")
    return Machine(
        name=name,
        role=name,
        instance=instance,
        market=market,
        usd_per_hour=usd_per_hour,
        on_demand_usd_per_hour=usd_per_hour if market == "on-demand" else on_demand.get(instance),
        region=_optional(strict.text, strict.member(role, "region"), "region", _NAME),
        zone=_optional(strict.text, strict.member(role, "zone"), "zone", _NAME),
        cloud=_optional(strict.text, role.get("cloud"), "cloud", _NAME),
    )


def _price(value: Any, what: str) -> float:
    return strict.number(value, what, 0, 1e6)


def _optional(check: Callable[..., T], value: Any, what: str, *limits: float) -> T | None:
    return None if value is None else check(value, what, *limits)


def scaled(cluster: Cluster, *, most_trainers: int) -> Cluster:
    """Return the part of the cluster that one host can run: the first machines that train, and one memory node."""
    if most_trainers < 1:
        raise UsageError(f"most_trainers is {most_trainers}: at least one machine must train")
    anchors = [m for m in cluster.machines if m.role == "anchor"][:most_trainers]
    workers = [m for m in cluster.machines if m.role == "worker"][: most_trainers - len(anchors)]
    memory = [m for m in cluster.machines if m.role == "memory"][:1]
    kept = tuple(m for m in cluster.machines if m in {*anchors, *workers, *memory})
    if len(kept) == len(cluster.machines):
        return cluster
    note = f"the plan has {_counts(cluster.machines)}; this host runs {_counts(kept)}"
    return replace(cluster, machines=kept, notes=(*cluster.notes, note))


def _counts(machines: tuple[Machine, ...]) -> str:
    roles = [machine.role for machine in machines]
    named = {"worker": "workers", "anchor": "anchors", "memory": "memory nodes"}
    words = [f"{roles.count(r)} {named[r] if roles.count(r) != 1 else named[r][:-1]}" for r in named if r in roles]
    return ", ".join(words)
