"""Every policy at every budget. One search serves all budgets: the best cluster at a price is a running maximum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from deepvm.catalog import Catalog
from deepvm.errors import UsageError
from deepvm.plan import objectives
from deepvm.plan.request import POLICIES, Request
from deepvm.plan.search.instances import analyse_instances

MOST_BUDGETS = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """What one policy recommends at one budget; None where nothing is feasible."""

    policy: str
    budget_usd: float
    architecture: str | None = None
    instance: str | None = None
    count: int | None = None
    hourly_usd: float | None = None
    performance: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "budget": self.budget_usd,
            "architecture": self.architecture,
            "instance": self.instance,
            "count": self.count,
            "hourly_usd": self.hourly_usd,
            "performance": self.performance,
        }


def budgets(first_usd: float, last_usd: float, step_usd: float) -> list[float]:
    """From first to last, both included, without the drift that adding the step up would bring."""
    if not (np.isfinite([first_usd, last_usd, step_usd]).all() and step_usd > 0 and 0 <= first_usd <= last_usd):
        raise UsageError(
            f"a sweep goes from 0 or more up to a larger budget by a step above 0, "
            f"not from {first_usd} to {last_usd} by {step_usd}"
        )
    count = int((last_usd - first_usd) / step_usd + 1e-9) + 1
    if count > MOST_BUDGETS:
        raise UsageError(f"{count} budgets are more than a sweep takes ({MOST_BUDGETS}): use a larger step")
    return [round(first_usd + i * step_usd, 9) for i in range(count)]


def sweep(
    catalog: Catalog, request: Request, at_usd: Sequence[float], policies: Sequence[str] = POLICIES
) -> list[Point]:
    """The points, policy by policy, budgets in the order given. The request's own budget and policy do not count."""
    return [
        point
        for policy in policies
        for point in _sweep_policy(
            catalog, replace(request, policy=policy, budget_usd=max(at_usd, default=0.0)), at_usd
        )
    ]


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
