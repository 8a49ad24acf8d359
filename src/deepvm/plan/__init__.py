"""Job, budget and catalogue in, ranked plans out. Pure: no clock, no file, no global random numbers."""

from deepvm.plan.explain import Explanation, explain
from deepvm.plan.pareto import pareto
from deepvm.plan.planner import plan
from deepvm.plan.request import OBJECTIVES, POLICIES, Request
from deepvm.plan.result import Plan, Recommendation, Role
from deepvm.plan.sweep import Point, budgets, sweep

__all__ = [
    "OBJECTIVES",
    "POLICIES",
    "Explanation",
    "Plan",
    "Point",
    "Recommendation",
    "Request",
    "Role",
    "budgets",
    "explain",
    "pareto",
    "plan",
    "sweep",
]
