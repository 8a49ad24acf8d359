"""A deadline that nothing keeps: a board and its market in; an error that names the nearest that can be kept out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from deepvm.errors import Infeasible
from deepvm.market.trace import Trace
from deepvm.plan import objectives
from deepvm.plan.risk.replays import Judged, Replays
from deepvm.plan.risk.screen import MOST_WORK_H, Screen
from deepvm.plan.risk.search import FEW_STARTS, MANY_STARTS, MANY_WORLDS, fastest, search, trials_of
from deepvm.plan.risk.spot import Spot
from deepvm.plan.search.board import Board
from deepvm.units import format_usd

_TRIED = 30
_LATER = 1.02  # the next guess, if a deadline cannot be kept after all
_ROUNDS = 12


def nothing_keeps(board: Board, traces: Mapping[str, Sequence[Trace]] | None) -> Infeasible | None:
    """Return the error of a deadline that nothing keeps; None if the deadline is not the reason."""
    request = board.request
    if request.deadline_s is None:
        return None
    nearest_h = _nearest_h(board, traces)
    if nearest_h is None:
        return None
    asked = f"--deadline {request.deadline_s / 3600:g}h"
    return Infeasible(
        f"no plan for {format_usd(request.budget_usd)}/h keeps {asked} with a confidence of {request.confidence:g}: "
        f"the nearest that can be kept is {nearest_h:g}h; allow that, or raise --budget"
    )


def never_ends(board: Board) -> Infeasible:
    """Return the error of a market on which no allowed cluster finishes the work."""
    tried = "all-on-demand" in board.request.architectures_of(board.catalog)
    on_demand = "" if tried else " add --architecture all-on-demand,"
    return Infeasible(
        f"no plan for {format_usd(board.request.budget_usd)}/h finishes the work on this spot market, or within "
        f"{MOST_WORK_H:,.0f}h: raise --budget,{on_demand} or allow more types or places"
    )


def _nearest_h(board: Board, traces: Mapping[str, Sequence[Trace]] | None) -> float | None:
    free = replace(board, request=replace(board.request, deadline_s=None))
    found = [_kept_h(one, board.request.confidence) for one in _judged(free, traces)]
    nearest = min((hours for hours in found if math.isfinite(hours)), default=None)
    for _ in range(_ROUNDS if nearest is not None else 0):
        assert nearest is not None  # noqa: S101 - as the line above says
        rounded = math.ceil(nearest * 10 - 1e-9) / 10
        due = replace(board, request=replace(board.request, deadline_s=rounded * 3600))
        if search(objectives.build_space(due), traces) is not None:
            return rounded
        nearest = max(rounded + 0.1, nearest * _LATER)
    return None


def _judged(free: Board, traces: Mapping[str, Sequence[Trace]] | None) -> Iterator[Judged]:
    """Replay the fastest clusters without a deadline, on both draws that a search uses."""
    space, spot = objectives.build_space(free), Spot.of(free, traces)
    screen = Screen(space=space, spot=spot)
    groups = list(screen.groups())
    trials = list(trials_of(screen, groups, fastest(groups)[:_TRIED]))
    first = Replays(screen.market, FEW_STARTS).all(trials)
    last = Replays(Screen(space=space, spot=spot.afresh(MANY_WORLDS)).market, MANY_STARTS).all(trials)
    for one, other in zip(first, last, strict=True):
        yield max(one, other, key=lambda judged: _kept_h(judged, free.request.confidence))


def _kept_h(one: Judged, confidence: float) -> float:
    """Return the time within which the job ends with this confidence."""
    outcomes = one.risk.outcomes
    hours = np.sort(np.where(outcomes.finished, outcomes.hours, np.inf))
    return float(hours[len(hours) - 1 - int((1 - confidence) * len(hours) + 1e-9)])
