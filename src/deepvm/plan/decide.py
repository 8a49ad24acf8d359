"""Stage 4, the decision, and the whole: request and catalogue in, ranked recommendations out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from deepvm.catalog import Catalog
from deepvm.errors import Infeasible
from deepvm.plan import architectures, mixed, objectives
from deepvm.plan.board import Board
from deepvm.plan.forecast import restore_forecast
from deepvm.plan.instances import analyse_instances
from deepvm.plan.request import Request
from deepvm.plan.result import Curve, InstanceAnalysis, Plan, Recommendation, role_of
from deepvm.plan.space import Candidate, Space
from deepvm.units import format_usd


def plan(catalog: Catalog, request: Request) -> Plan:
    """The best clusters for a request, or Infeasible with the cheapest price at which there would be one."""
    board = analyse_instances(catalog, request)
    space = objectives.build_space(board)
    found = space.best(request.budget_usd, request.top)
    if request.mixed:
        found = mixed.merge(found, mixed.search(board, space), request.top)
    if not found:
        raise infeasible(board)
    return Plan(
        request=request,
        catalog=catalog.name,
        instances=instance_rows(board),
        architectures=_best_of_each(space),
        recommendations=tuple(recommendation(board, c, rank) for rank, c in enumerate(found, start=1)),
        left_out=board.left_out,
    )


def recommendation(board: Board, candidate: Candidate, rank: int) -> Recommendation:
    catalog, request = board.catalog, board.request
    trained = [part.instance for part in candidate.cluster if part.role != "memory"]
    slowest = float(board.workers.gbps[np.isin(board.workers.instance, trained)].min())
    usd = architectures.hourly_usd(candidate.cluster)
    return Recommendation(
        rank=rank,
        architecture=candidate.architecture.name,
        roles=tuple(role_of(catalog, part) for part in candidate.cluster if part.count > 0),
        nodes=candidate.nodes,
        hourly_usd=usd,
        performance=candidate.performance,
        objective=request.objective,
        objective_value=objectives.value(request.objective, board, candidate.worker, candidate.performance, usd),
        curves=tuple(_curve(board, instance, slowest, candidate.nodes) for instance in dict.fromkeys(trained)),
        network=board.network_model,
        estimates=tuple(
            f"{what} of {catalog.instances[i].name}"
            for what, marks in (("eFLOPS", board.eflops_estimated), ("bandwidth", board.gbps_estimated))
            for i in dict.fromkeys(part.instance for part in candidate.cluster)
            if marks[i]
        ),
        restore=restore_forecast(board, candidate, slowest),
    )


def _curve(board: Board, instance: int, slowest_gbps: float, nodes: int) -> Curve:
    curve = board.curve(instance, slowest_gbps)
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
    """Every GPU type once, the best spot FLOPP first."""
    workers, catalog = board.workers, board.catalog
    with np.errstate(divide="ignore", invalid="ignore"):
        order = np.lexsort((workers.instance, workers.on_demand_usd, -workers.eflops / workers.spot_usd))
    rows, seen = [], set()
    for row in order:
        instance = int(workers.instance[row])
        if instance in seen:
            continue
        seen.add(instance)
        region, zone = catalog.places[workers.place[row]]
        rows.append(
            InstanceAnalysis(
                instance=catalog.instances[instance].name,
                accelerator=catalog.instances[instance].accelerator or "",
                eflops=float(workers.eflops[row]),
                eflops_estimated=bool(board.eflops_estimated[instance]),
                region=region,
                zone=zone,
                spot_usd=_finite(workers.spot_usd[row]),
                on_demand_usd=_finite(workers.on_demand_usd[row]),
            )
        )
    return tuple(rows)


def infeasible(board: Board) -> Infeasible:
    """Why nothing fits: the price of the cheapest cluster, or the constraint that rules all of them out."""
    request = board.request
    if not len(board.workers):
        reasons = "; ".join(f"{x.count} × {x.reason}" for x in board.left_out[:4]) or "the catalogue has no GPU types"
        return Infeasible(f"no GPU type is left to plan with ({reasons}): allow more types or places")
    everything = replace(request, budget_usd=1e12)
    space = objectives.build_space(replace(board, request=everything))
    finite = space.possible
    if not finite.size:
        return Infeasible(
            "no cluster meets the quotas, the checkpoint's memory and network, and the deadline, at any price: "
            "raise a quota, save less often, or allow more types, places or architectures"
        )
    cheapest = float(space.hourly_usd.reshape(-1)[finite[0]])
    return Infeasible(
        f"the cheapest plan costs {format_usd(cheapest)}/h, the budget is {format_usd(request.budget_usd)}/h: "
        f"raise --budget or allow more instance types",
        cheapest_usd=cheapest,
    )


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
