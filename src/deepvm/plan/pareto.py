"""The Pareto front: a catalogue and a request in, the clusters that no cheaper and faster one beats out."""

from __future__ import annotations

from dataclasses import replace

from deepvm.catalog import Catalog
from deepvm.plan import objectives
from deepvm.plan.infeasible import infeasible
from deepvm.plan.planner import recommendation
from deepvm.plan.request import Request
from deepvm.plan.result import Recommendation
from deepvm.plan.search.instances import analyse_instances
from deepvm.units import USD_TOLERANCE


def pareto(catalog: Catalog, request: Request) -> tuple[Recommendation, ...]:
    """Return the front within the budget, cheapest first, of the architectures that the plan's decision allows."""
    allowed = request.architectures_of(catalog)
    board = analyse_instances(catalog, replace(request, objective="throughput", policy="deepvm", architectures=allowed))
    space = objectives.build_space(board)
    front = space.frontier()
    within = front.cell[: int((front.hourly_usd <= request.budget_usd + USD_TOLERANCE).sum())]
    if not within.size:
        raise infeasible(board)
    return tuple(
        recommendation(board, space.expand(int(cell), request.budget_usd, 1)[0], rank)
        for rank, cell in enumerate(within, start=1)
    )
