"""The decision under a market: a catalogue and a request in, a plan out whose recommendations have been replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from deepvm.catalog import Catalog
from deepvm.errors import Infeasible
from deepvm.market.trace import Trace
from deepvm.plan import objectives
from deepvm.plan.infeasible import infeasible
from deepvm.plan.planner import MOST_FAILOVERS, instance_rows, recommendation
from deepvm.plan.rehearsal.written import Replay
from deepvm.plan.request import Request
from deepvm.plan.result import Expected, Plan, Recommendation
from deepvm.plan.risk.advice import advice_of
from deepvm.plan.risk.deadline import never_ends, nothing_keeps
from deepvm.plan.risk.replays import Judged, Progress
from deepvm.plan.risk.search import estimate, place_of, search, shape_of
from deepvm.plan.risk.trial import Trial
from deepvm.plan.search.instances import analyse_instances
from deepvm.plan.search.space import Space
from deepvm.simulate.notices import counted_on
from deepvm.units import USD_TOLERANCE

Traces = Mapping[str, Sequence[Trace]]


def plan_under_market(catalog: Catalog, request: Request, traces: Traces | None, progress: Progress | None) -> Plan:
    board = analyse_instances(catalog, request)
    space = objectives.build_space(board)
    found = search(space, traces, progress)
    if found is None:
        raise _impossible(space, traces)
    best = found.best[0]
    ranked = _distinct(found.best, shape_of)
    places = _distinct((*found.best, *found.late), place_of)
    elsewhere = [one for one in places if place_of(one.trial) != place_of(best.trial)]
    shapes = _distinct(found.best, lambda trial: (trial.candidate.architecture.name,))
    return Plan(
        request=replace(request, architectures=request.architectures_of(catalog)),
        catalog=catalog.name,
        instances=instance_rows(board),
        architectures=tuple(judged_recommendation(one, 1) for one in shapes),
        recommendations=_ranked(ranked[: request.top]),
        left_out=board.left_out,
        failover=_ranked(elsewhere[:MOST_FAILOVERS]),
        notes=tuple(catalog.notes),
        advice=advice_of(found),
        found=found,
    )


def _impossible(space: Space, traces: Traces | None) -> Infeasible:
    board = space.board
    late = nothing_keeps(board, traces)
    if late is not None:
        return late
    affordable = (space.score > -np.inf) & (space.hourly_usd <= board.request.budget_usd + USD_TOLERANCE)
    return never_ends(board) if affordable.any() else infeasible(board)


def _distinct(ranked: Iterable[Judged], key: Callable[[Trial], tuple[object, ...]]) -> list[Judged]:
    """Return the first of each key, in their order."""
    found: dict[tuple[object, ...], Judged] = {}
    for one in ranked:
        found.setdefault(key(one.trial), one)
    return list(found.values())


def _ranked(judged: Sequence[Judged]) -> tuple[Recommendation, ...]:
    return tuple(judged_recommendation(one, rank) for rank, one in enumerate(judged, start=1))


def judged_recommendation(one: Judged, rank: int) -> Recommendation:
    """Return a trial as a recommendation: its conduct, and what to expect of it."""
    made = recommendation(one.trial.board, one.trial.candidate, rank)
    value = one.value if made.objective != "throughput" else made.performance
    figures, share = one.trial.figures, one.trial.board.request.notices
    notes = () if one.trial.market is None else (*one.trial.market.notes, *counted_on(share, figures.notice_s))
    return replace(
        made,
        objective_value=value,
        expected=Expected(risk=one.risk, notes=notes),
        conduct=one.trial.conduct(),
        replay=Replay(figures=figures, market=one.market, starts=len(one.risk.outcomes.hours)),
    )


def first_estimate(catalog: Catalog, request: Request, traces: Traces | None) -> Recommendation | None:
    """Return the best cluster by the analytic estimate, without replays."""
    guess = estimate(objectives.build_space(analyse_instances(catalog, request)), traces)
    if guess is None:
        return None
    trial, value = guess
    made = recommendation(trial.board, trial.candidate, 1)
    return replace(made, objective_value=made.performance if made.objective == "throughput" else value)
