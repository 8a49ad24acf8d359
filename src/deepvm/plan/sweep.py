"""Sweep budgets: a request, policies and budgets in, a Point for each out. One search serves all budgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from deepvm.catalog import Catalog
from deepvm.errors import UsageError
from deepvm.json_fields import json_fields
from deepvm.plan import objectives
from deepvm.plan.request import POLICIES, Request
from deepvm.plan.search.instances import analyse_instances

MOST_BUDGETS = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """What one policy recommends at one budget; None if nothing is feasible."""

    policy: str
    budget_usd: float
    architecture: str | None = None
    instance: str | None = None
    count: int | None = None
    hourly_usd: float | None = None
    performance: float | None = None

    def to_json(self) -> dict[str, Any]:
        cluster = json_fields(self, "architecture instance count hourly_usd performance")
        return {"policy": self.policy, "budget": self.budget_usd, **cluster}


def budgets(first_usd: float, last_usd: float, step_usd: float) -> list[float]:
    """List the budgets from first to last, both included, without the drift of repeated addition."""
    if not (np.isfinite([first_usd, last_usd, step_usd]).all() and step_usd > 0 and 0 <= first_usd <= last_usd):
        raise UsageError(
            f"cannot sweep from {first_usd} to {last_usd} by {step_usd}: "
            "start at 0 or more, end at the same or a larger budget, with a step above 0"
        )
    count = int((last_usd - first_usd) / step_usd + 1e-9) + 1
    if count > MOST_BUDGETS:
        raise UsageError(f"a sweep of {count} budgets is too long (at most {MOST_BUDGETS}): use a larger step")
    return [round(first_usd + i * step_usd, 9) for i in range(count)]


def sweep(
    catalog: Catalog, request: Request, at_usd: Sequence[float], policies: Sequence[str] = POLICIES
) -> list[Point]:
    """Return the points by policy, then by budget as passed, if spot machines stay.

    The request's own budget, policy and market are ignored."""
    if not at_usd:
        return []
    still = replace(request, budget_usd=max(at_usd), market="none")
    return [point for policy in policies for point in _sweep_policy(catalog, replace(still, policy=policy), at_usd)]


def _sweep_policy(catalog: Catalog, request: Request, at_usd: Sequence[float]) -> list[Point]:
    space = objectives.build_space(analyse_instances(catalog, request))
    frontier = space.frontier()
    points = []
    for budget in at_usd:
        cell = frontier.at(budget)
        if cell is None:
            points.append(Point(policy=request.policy, budget_usd=budget))
            continue
        a, w, n = space.indices(cell)
        points.append(
            Point(
                policy=request.policy,
                budget_usd=budget,
                architecture=space.architectures[a].name,
                instance=catalog.instances[space.board.workers.instance[w]].name,
                count=int(space.nodes[n]),
                hourly_usd=float(space.hourly_usd[a, w, n]),
                performance=float(space.performance[w, n]),
            )
        )
    return points
