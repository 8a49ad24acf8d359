"""A plan file in, its conduct as ``plan.risk`` replayed it out: the same market, starts and strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from deepvm import strict_json as strict
from deepvm.catalog.model import LEAST, MOST_USD
from deepvm.errors import MalformedFile, UsageError
from deepvm.market.seeds import check_seed
from deepvm.market.trace import Trace
from deepvm.performance.profile import Profile
from deepvm.plan.rehearsal.written import Replay
from deepvm.plan.risk.overheads import measured_overheads
from deepvm.plan.risk.recorded import Recorded, recorded_markets
from deepvm.plan.risk.replays import Replays, on_demand_risk
from deepvm.plan.risk.screen import MOST_WORK_H
from deepvm.plan.risk.spot import MOST_ZONES, Column, Draw, TypeMarket, most_worlds
from deepvm.plan.risk.strategy import Figures, strategy_of
from deepvm.policy.conduct import Conduct
from deepvm.simulate.inputs.planned_cluster import MOST_BYTES, accelerator_of, first_recommendation
from deepvm.simulate.job import GangJob
from deepvm.simulate.risk import PATIENCE, Risk
from deepvm.simulate.strategy import Overheads, Strategy

HINT = "make a plan with: deepvm plan --budget 3 --work 24h@g4dn.xlarge -o plan.json"
MOST_STARTS = 100_000
_MOST_MACHINES, _MOST_S, _TEXT, _MOST_DRAWN = 10_000, 1e9, 500, 5000


@dataclass(frozen=True, kw_only=True, eq=False)
class Planned:
    """The first recommendation of a plan that was made under a market."""

    name: str  # of its architecture
    conduct: Conduct
    written: Replay
    job: GangJob
    notices: float  # the share of announced losses
    accelerator: str | None
    on_demand_usd: float  # an hour of one worker of an on-demand cluster
    spot_usd: float | None = None  # of the market beside an on-demand cluster; None: a share of the on-demand price
    expected_usd: float | None  # the means that the plan says
    expected_h: float | None

    def __post_init__(self) -> None:
        longest_h = max(self.job.work_h, (self.job.deadline_h or 0.0) / PATIENCE)
        if longest_h > MOST_WORK_H:
            raise UsageError(
                f"work of {self.job.work_h:,.0f} h, or a deadline of {self.job.deadline_h or 0:,.0f} h, is too long to "
                f"be replayed: at most {MOST_WORK_H:,.0f} h and {PATIENCE * MOST_WORK_H:,.0f} h"
            )

    @property
    def market(self) -> TypeMarket | None:
        return self.written.market

    @property
    def spot_machines(self) -> int:
        return self.written.figures.spot_machines

    @cached_property
    def columns(self) -> tuple[int, ...]:
        """The zones of the conduct, in its order, as numbers of the market's. Traces may lack some of them."""
        if self.market is None:
            return ()
        known, found = self.market.columns, list[int]()
        for name in self.conduct.zones:
            own = [i for i, column in enumerate(known) if name == (column.zone or column.region)]
            found += own or [i for i, column in enumerate(known) if name == column.region]
        if not found:
            here = ", ".join(dict.fromkeys(column.zone or column.region for column in known))
            raise UsageError(f"the plan trains in {', '.join(self.conduct.zones)}, and the market has {here} alone")
        return tuple(dict.fromkeys(found))

    @cached_property
    def strategy(self) -> Strategy:
        made = strategy_of(
            self.conduct, self.written.figures, name=self.name, zones=len(self.columns), notices=self.notices,
            most_usd=None if self.market is None else self.market.on_demand_usd,
        )  # fmt: skip
        return replace(made, name="planned")

    def risk(self) -> Risk:
        """Replay it as the plan was."""
        if self.market is None:
            return on_demand_risk(self.job, self.strategy, self.on_demand_usd)
        market = self.market
        return Replays(lambda _: market, self.written.starts).risk(self, market)

    def seeded(self, seed: int) -> Planned:
        """Return it on the draws that judge a plan with this seed."""
        check_seed(seed)
        if self.market is None:
            return self
        return self._in(replace(self.market.draw, seed=seed + 1))

    def on_traces(self, traces: Mapping[str, Sequence[Trace]]) -> Planned:
        """Return it on recorded capacity, as ``deepvm plan --traces`` replays it."""
        if self.market is None:
            raise UsageError("the plan has no spot machines, so traces change nothing: leave --traces out")
        accelerator = self.market.draw.accelerator or ""
        return self._in(self.market.draw, recorded_markets([accelerator], traces)[accelerator])

    def priced(self, spot_usd: float | None, on_demand_usd: float | None) -> Planned:
        """Return it with other prices of one machine, in all zones."""
        given = {"usd": spot_usd, "on_demand_usd": on_demand_usd}
        changed: dict[str, Any] = {name: usd for name, usd in given.items() if usd is not None}
        if not changed:
            return self
        found = replace(self, spot_usd=spot_usd)
        found = found if on_demand_usd is None else replace(found, on_demand_usd=on_demand_usd)
        if self.market is None:
            return found
        columns = tuple(replace(column, **changed) for column in self.market.columns)
        return found._with(replace(self.market, columns=columns))

    def told(self, notices: float | None, notice_s: float | None) -> Planned:
        """Return it with another share of announced losses, or another time of notices."""
        found = self if notices is None else replace(self, notices=notices)
        if notice_s is None:
            return found
        written = found.written
        return replace(found, written=replace(written, figures=replace(written.figures, notice_s=notice_s)))

    def measured(self, profiles: Sequence[Profile]) -> Planned:
        """Return it with what profiles measured instead of the overheads that it was planned with."""
        written = self.written
        over = measured_overheads(written.figures.overheads, profiles, self.job.checkpoint_bytes, self.conduct.tier)
        return replace(self, written=replace(written, figures=replace(written.figures, overheads=over)))

    def started(self, starts: int) -> Planned:
        return replace(self, written=replace(self.written, starts=starts))

    def _in(self, draw: Draw, recorded: Recorded | None = None) -> Planned:
        assert self.market is not None  # noqa: S101 - the callers check it
        columns = self.market.columns
        return self._with(TypeMarket.of(instance=0, columns=columns, draw=draw, recorded=recorded))

    def _with(self, market: TypeMarket) -> Planned:
        return replace(self, written=replace(self.written, market=market))


def read_planned(path: Path) -> Planned | None:
    """Read a plan. None if it was made without a market, and has no conduct. MalformedFile if it is something else."""
    document = strict.read_file(path, most_bytes=MOST_BYTES, hint=HINT)
    try:
        table = strict.table(document, "the plan")
        best = first_recommendation(table)
        if "conduct" not in best or "replay" not in best:
            return None
        request = strict.table(strict.member(table, "request"), "request")
        conduct = Conduct.from_json(strict.member(best, "conduct"))
        written = _replay(strict.member(best, "replay"), replicas=conduct.replicas)
        expected = strict.table(best.get("expected", {}), "expected")
        roles = [strict.table(role, "a role") for role in strict.array(strict.member(best, "roles"), "roles", 1000)]
        worker = next(role for role in roles if role.get("role") == "worker")
        return Planned(
            name=strict.text(strict.member(best, "architecture"), "architecture", _TEXT),
            conduct=_checked(conduct, written, roles, worker),
            written=written,
            job=_job(request, best, written.figures.machines),
            notices=strict.number(request.get("notices", 0.0), "notices", 0, 1),
            accelerator=accelerator_of(table, worker),
            on_demand_usd=_number(worker, "usd_per_hour", MOST_USD),
            expected_usd=_mean(expected, "cost_usd"),
            expected_h=_mean(expected, "hours"),
        )
    except (strict.MalformedJson, StopIteration) as error:
        raise MalformedFile(path, f"not a valid plan: {str(error) or 'it has no workers'}; {HINT}") from None


def _checked(
    conduct: Conduct, written: Replay, roles: Sequence[Mapping[str, Any]], worker: Mapping[str, Any]
) -> Conduct:
    """Return the conduct with its zones, or MalformedJson if the plan's replay is of something else."""
    workers, anchors, memory = (
        sum(_count(role) for role in roles if role.get("role") == name) for name in ("worker", "anchor", "memory")
    )
    trainers, figures = workers + anchors, written.figures
    if trainers != figures.machines:
        raise strict.MalformedJson(f"its replay has {figures.machines} machines, and its roles {trainers} that train")
    conduct.check_machines(trainers=trainers, anchors=anchors, memory=memory)
    if conduct.replicas != figures.replicas:
        raise strict.MalformedJson(f"replicas is {conduct.replicas}, and its replay is of {figures.replicas}")
    place = strict.text(strict.member(worker, "region"), "region", _TEXT), _optional_text(worker.get("zone"), "zone")
    places = [place] if written.market is None else [(c.region, c.zone) for c in written.market.columns]
    here = list(dict.fromkeys(zone or region for region, zone in places))
    known = {*here, *(region for region, _ in places)}
    wrong = next((name for name in conduct.zones if name not in known), None)
    if wrong is not None:
        raise strict.MalformedJson(f"zones has {strict.brief(wrong)}, and the plan's market has {', '.join(here)}")
    return conduct if conduct.zones else replace(conduct, zones=(place[1] or place[0],))


def _count(role: Mapping[str, Any]) -> int:
    return strict.integer(strict.member(role, "count"), "count", 0, _MOST_MACHINES)


def _optional_text(value: Any, name: str) -> str | None:
    return None if value is None else strict.text(value, name, _TEXT)


def _mean(expected: Mapping[str, Any], name: str) -> float | None:
    return _optional(strict.table(expected.get(name, {}), name), "mean", 1e15)


def _number(table: Mapping[str, Any], name: str, most: float) -> float:
    return strict.number(strict.member(table, name), name, 0, most)


def _optional(table: Mapping[str, Any], name: str, most: float) -> float | None:
    return None if table.get(name) is None else _number(table, name, most)


def _job(request: Mapping[str, Any], best: Mapping[str, Any], machines: int) -> GangJob:
    performance = strict.number(strict.member(best, "performance"), "performance", LEAST, 1e15)
    deadline_s = _optional(request, "deadline_s", _MOST_S)
    return GangJob(
        work_h=_number(request, "work_eflops_h", 1e15) / performance,
        machines=machines,
        checkpoint_bytes=strict.integer(strict.member(request, "checkpoint_bytes"), "checkpoint_bytes", 0, 2**60),
        deadline_h=None if deadline_s is None else deadline_s / 3600,
        usd_per_hour_of_waiting=strict.number(request.get("usd_per_hour_of_waiting", 0.0), "usd_per_hour", 0, MOST_USD),
    )


def _replay(document: Any, *, replicas: int) -> Replay:
    """Read it. Plans that do not say of how many replicas its overheads are had those of their conduct."""
    table = strict.table(document, "replay")
    over = strict.table(strict.member(table, "overheads"), "overheads")
    machines = strict.integer(strict.member(table, "machines"), "machines", 1, _MOST_MACHINES)
    speeds = strict.numbers(strict.member(table, "speeds"), "speeds", 0, 1)
    if len(speeds) != machines + 1 or speeds[-1] != 1:
        raise strict.MalformedJson(f"speeds has {len(speeds)} figures: it needs {machines + 1}, the last of them 1")
    market = strict.member(table, "market")
    return Replay(
        figures=Figures(
            overheads=Overheads(**{field.name: _number(over, field.name, _MOST_S) for field in fields(Overheads)}),
            machines=machines,
            spot_machines=strict.integer(
                strict.member(table, "spot_machines"), "spot_machines", 0 if market is None else 1, machines
            ),
            keeper_usd=_number(table, "keeper_usd", MOST_USD),
            speeds=tuple(float(speed) for speed in speeds),
            losses_per_h=_number(table, "losses_per_h", _MOST_S),
            notice_s=_number(table, "notice_s", _MOST_S),
            replicas=strict.integer(table.get("replicas", replicas), "replicas", 0, _MOST_MACHINES),
        ),
        market=None if market is None else _market(strict.table(market, "market")),
        starts=strict.integer(strict.member(table, "starts"), "starts", 1, MOST_STARTS),
    )


def _market(table: Mapping[str, Any]) -> TypeMarket:
    draw = strict.table(strict.member(table, "draw"), "draw")
    regions = list[str]()
    for row in strict.array(strict.member(draw, "regions"), "regions", _MOST_DRAWN):
        pair = strict.array(row, "a region", 2)
        left = _MOST_DRAWN - len(regions)
        count = strict.integer(pair[-1] if pair else None, "a region's zones", 1, left)
        regions += [strict.text(pair[0], "a region", _TEXT)] * count
    if not regions:
        raise strict.MalformedJson("its draw has no zones")
    made = Draw(
        accelerator=_optional_text(draw.get("accelerator"), "accelerator"),
        regions=tuple(regions),
        seed=strict.integer(strict.member(draw, "seed"), "seed", 0, 2**63),
        worlds=strict.integer(strict.member(draw, "worlds"), "worlds", 1, most_worlds(len(regions))),
    )
    rows = strict.array(strict.member(table, "zones"), "zones", MOST_ZONES)
    columns = tuple(_column(strict.table(row, "a zone"), i, len(regions)) for i, row in enumerate(rows))
    if not columns:
        raise strict.MalformedJson("its market has no zones")
    found = TypeMarket.of(instance=0, columns=columns, draw=made)
    return replace(found, traces=_optional_text(table.get("traces"), "traces"))


def _column(table: Mapping[str, Any], row: int, drawn: int) -> Column:
    on_demand = _optional(table, "on_demand_usd", MOST_USD)
    return Column(
        row=row,
        drawn=strict.integer(strict.member(table, "drawn"), "drawn", 0, drawn - 1),
        region=strict.text(strict.member(table, "region"), "region", _TEXT),
        zone=_optional_text(table.get("zone"), "zone"),
        name=strict.text(strict.member(table, "name"), "name", _TEXT),
        usd=_number(table, "usd", MOST_USD),
        on_demand_usd=float("inf") if on_demand is None else on_demand,
    )
