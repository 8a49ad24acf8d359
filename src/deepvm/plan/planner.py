"""Stage 4, the decision, and the entry point of all stages: catalogue and request in, ranked recommendations out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from deepvm.catalog import Catalog
from deepvm.catalog.check import is_bid_floor
from deepvm.errors import UsageError
from deepvm.plan import architectures, objectives
from deepvm.plan.forecast import restore_forecast
from deepvm.plan.infeasible import infeasible
from deepvm.plan.request import Request
from deepvm.plan.result import Curve, InstanceAnalysis, Plan, Recommendation, role_of
from deepvm.plan.search import mixed
from deepvm.plan.search.board import Board
from deepvm.plan.search.instances import analyse_instances
from deepvm.plan.search.space import Candidate, Space
from deepvm.plan.search.tiers import failure_per_day

if TYPE_CHECKING:
    from deepvm.market.trace import Trace
    from deepvm.plan.risk.replays import Progress

    Traces = Mapping[str, Sequence[Trace]]

MOST_FAILOVERS = 5


def plan(
    catalog: Catalog,
    request: Request,
    *,
    traces: Traces | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Find the best clusters for a request. Infeasible if none fits, with the cheapest possible price.

    ``traces`` are recorded markets by name, as ``deepvm.market.load_traces`` reads them. ``progress`` is called with
    the number of clusters that have been replayed, and with that of all."""
    if request.under_market(catalog):
        from deepvm.plan.risk.decide import plan_under_market  # with the simulator, which other plans do not need

        return plan_under_market(catalog, request, traces, progress)
    if traces is not None:
        raise UsageError("traces have an effect under a spot market only: give --work, and not --market none")
    board = analyse_instances(catalog, request)
    space = objectives.build_space(board)
    found = space.best(request.budget_usd, request.top, once=True)
    if request.mixed:
        found = mixed.merge(found, mixed.search(board, space), request.top)
    if not found:
        raise infeasible(board)
    return Plan(
        request=replace(request, architectures=request.architectures_of(catalog)),
        catalog=catalog.name,
        instances=instance_rows(board),
        architectures=_best_of_each(space),
        recommendations=tuple(recommendation(board, c, rank) for rank, c in enumerate(found, start=1)),
        left_out=board.left_out,
        failover=_failover(space, found[0]),
        notes=tuple(catalog.notes),
    )


def first(catalog: Catalog, request: Request, traces: Traces | None = None) -> Recommendation | None:
    """Return the best cluster alone; under a market, by the analytic estimate. None if nothing fits."""
    if request.under_market(catalog):
        from deepvm.plan.risk.decide import first_estimate

        return first_estimate(catalog, request, traces)
    board = analyse_instances(catalog, request)
    found = objectives.build_space(board).best(request.budget_usd, 1)
    return recommendation(board, found[0], 1) if found else None


def _failover(space: Space, chosen: Candidate) -> tuple[Recommendation, ...]:
    """Return the best clusters of other types or places, each once."""
    workers = space.board.workers
    left = np.ones(len(workers), bool)
    taken, found = chosen, list[Recommendation]()
    while True:
        left &= (workers.instance != workers.instance[taken.worker]) | (workers.place != workers.place[taken.worker])
        best = space.best(space.board.request.budget_usd, 1, keep=left[None, :, None]) if left.any() else []
        if not best or len(found) == MOST_FAILOVERS:
            return tuple(found)
        taken = best[0]
        found.append(recommendation(space.board, taken, len(found) + 1))


def recommendation(board: Board, candidate: Candidate, rank: int) -> Recommendation:
    catalog, request = board.catalog, board.request
    trained = [part.instance for part in candidate.cluster if part.role != "memory"]
    of_ring = np.isin(board.workers.instance, trained)
    slowest, efa = float(board.workers.gbps[of_ring].min()), bool(board.workers.efa[of_ring].all())
    usd = architectures.hourly_usd(candidate.cluster)
    keepers = sum(part.count for part in candidate.cluster if part.role == "memory")
    return Recommendation(
        rank=rank,
        architecture=candidate.architecture.name,
        roles=tuple(role_of(catalog, part) for part in candidate.cluster if part.count > 0),
        nodes=candidate.nodes,
        hourly_usd=usd,
        performance=candidate.performance,
        objective=request.objective,
        objective_value=objectives.value(request.objective, board, candidate.worker, candidate.performance, usd),
        curves=tuple(_curve(board, instance, slowest, efa, candidate.nodes) for instance in dict.fromkeys(trained)),
        network=board.network_model,
        estimates=_estimates(board, candidate),
        restore=restore_forecast(board, candidate, slowest),
        traffic_usd_per_hour=sum(part.traffic_usd for part in candidate.cluster),
        memory_failure_per_day=failure_per_day(keepers) if keepers else None,
    )


def _estimates(board: Board, candidate: Candidate) -> tuple[str, ...]:
    """Name the estimated figures and doubtful prices, by machine type."""
    catalog, request = board.catalog, board.request
    marked = [
        f"{what} of {catalog.instances[i].name}"
        + (" (by its family)" if what == "bandwidth" and catalog.cloud_of(catalog.instances[i]) == "aws" else "")
        for what, marks in (("eFLOPS", board.eflops_estimated), ("bandwidth", board.gbps_estimated))
        for i in dict.fromkeys(part.instance for part in candidate.cluster)
        if marks[i]
    ]
    efa = all(board.links[part.instance].efa for part in candidate.cluster if part.role != "memory")
    trained = dict.fromkeys(part.instance for part in candidate.cluster if part.role != "memory")
    marked += [
        f"{what} of {catalog.instances[i].name}"
        for i in trained
        for what in board.unmeasured_links(i, efa=efa and candidate.nodes > 1)
    ]
    if request.global_batch is not None:
        marked.append("the time of steps with small batches")
    floors = [
        f"price of {catalog.instances[part.instance].name} (a bid floor)"
        for part in candidate.cluster
        if is_bid_floor(catalog.instances[part.instance], part.usd_per_hour)
    ]
    return (*marked, *dict.fromkeys(floors))


def _curve(board: Board, instance: int, slowest_gbps: float, efa: bool, nodes: int) -> Curve:
    curve = board.curve(instance, slowest_gbps, efa=efa)
    return Curve(
        instance=board.catalog.instances[instance].name,
        spec=curve.to_spec(),
        scaling=float(curve.scaling(np.array([nodes]))[0]),
        measured=curve.measured,
    )


def _best_of_each(space: Space) -> tuple[Recommendation, ...]:
    request = space.board.request
    found = []
    for a in range(len(space.architectures)):
        this_one = (np.arange(len(space.architectures)) == a)[:, None, None]
        best = space.best(request.budget_usd, 1, keep=this_one)
        found += [recommendation(space.board, candidate, 1) for candidate in best]
    return tuple(found)


def instance_rows(board: Board) -> tuple[InstanceAnalysis, ...]:
    """List every GPU type once, the best spot FLOPP first."""
    workers = board.workers
    with np.errstate(divide="ignore", invalid="ignore"):
        order = np.lexsort((workers.instance, workers.on_demand_usd, -workers.eflops / workers.spot_usd))
    _, first = np.unique(workers.instance[order], return_index=True)
    return tuple(_instance_row(board, row) for row in order[np.sort(first)])


def _instance_row(board: Board, row: int) -> InstanceAnalysis:
    workers, catalog = board.workers, board.catalog
    index = int(workers.instance[row])
    region, zone = catalog.places[workers.place[row]]
    return InstanceAnalysis(
        instance=catalog.instances[index].name,
        accelerator=catalog.instances[index].accelerator or "",
        eflops=float(workers.eflops[row]),
        eflops_estimated=bool(board.eflops_estimated[index]),
        region=region,
        zone=zone,
        spot_usd=_finite(workers.spot_usd[row]),
        on_demand_usd=_finite(workers.on_demand_usd[row]),
    )


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
