"""The Pareto front of price against performance: what the next dollar buys, all the way up to the budget."""

from __future__ import annotations

from dataclasses import replace

from deepvm.catalog import Catalog
from deepvm.plan import objectives
from deepvm.plan.decide import recommendation
from deepvm.plan.infeasible import infeasible
from deepvm.plan.request import Request
from deepvm.plan.result import Recommendation
from deepvm.plan.search.instances import analyse_instances


def pareto(catalog: Catalog, request: Request) -> tuple[Recommendation, ...]:
    """The clusters within the budget that nothing both cheaper and faster beats, cheapest first."""
    board = analyse_instances(catalog, replace(request, objective="throughput", policy="deepvm"))
    space = objectives.build_space(board)
    front = space.frontier()
    within = front.cell[: int((front.hourly_usd <= request.budget_usd + 1e-6).sum())]
    if not within.size:
        raise infeasible(board)
    return tuple(
        recommendation(board, space.spelled_out(int(cell), request.budget_usd, 1)[0], rank)
        for rank, cell in enumerate(within, start=1)
    )
