"""The search under a market: a space and its spot markets in; judged trials, the best first, out.

Three rounds: the analytic screen chooses some 200 clusters; replays rank them; the best are changed a little, and
judged again on other draws of the market, so that luck in the first ones does not decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from deepvm.market.trace import Trace
from deepvm.plan.risk.replays import Judged, Progress, Replays
from deepvm.plan.risk.screen import Pick, Screen, Screened, picks, trial_of
from deepvm.plan.risk.spot import Spot
from deepvm.plan.risk.trial import Trial, with_replicas
from deepvm.plan.search.space import Space

MOST_TRIALS = 200
MOST_OF_A_GROUP = 6
FINALISTS = 24
FEW_STARTS, MANY_STARTS = 64, 384
MANY_WORLDS = 16
NEIGHBOURS = (-2, -1, 1, 2)


@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """What was judged on the last draws, the best first. ``late`` fails the deadline, the least late first."""

    replays: Replays  # of the last draws
    traces: Mapping[str, Sequence[Trace]] | None
    best: tuple[Judged, ...]
    late: tuple[Judged, ...]
    judged: tuple[Judged, ...]  # on the first draws, all of them


def search(
    space: Space, traces: Mapping[str, Sequence[Trace]] | None = None, progress: Progress | None = None
) -> Found | None:
    """Find the best plans. None if no cluster is within the budget, ends the job and keeps its deadline."""
    spot = Spot.of(space.board, traces)
    screen = Screen(space=space, spot=spot)
    groups = list(screen.groups())
    ranked = picks(screen, groups)
    if not ranked:
        return None
    first = Replays(screen.market, FEW_STARTS)
    judged = first.all(trials_of(screen, groups, _spread(ranked)), progress)
    if not any(one.kept for one in judged):
        judged += first.all(trials_of(screen, groups, fastest(groups)), progress)
    kept = sorted((one for one in judged if one.kept), key=lambda one: one.rank)
    near = first.all(_variants(screen, groups, kept[:4]), progress)
    kept = sorted([*kept, *(one for one in near if one.kept)], key=lambda one: one.rank)

    afresh = Screen(space=space, spot=spot.afresh(MANY_WORLDS))
    last = Replays(afresh.market, MANY_STARTS)
    late = sorted((one for one in judged if not one.kept), key=lambda one: (one.risk.missed, one.rank))
    most = max(FINALISTS, 2 * space.board.request.top)
    final = last.all((one.trial for one in _finalists(kept, late, most)), progress)
    best = sorted((one for one in final if one.kept), key=lambda one: one.rank)
    late = sorted((one for one in final if not one.kept), key=lambda one: (one.risk.missed, one.rank))
    if not best:  # kept by luck alone
        return None
    return Found(replays=last, traces=traces, best=tuple(best), late=tuple(late), judged=tuple(kept))


def estimate(space: Space, traces: Mapping[str, Sequence[Trace]] | None = None) -> tuple[Trial, float] | None:
    """Return the most promising cluster of the screen and its estimated value, without replays."""
    screen = Screen(space=space, spot=Spot.of(space.board, traces))
    groups = list(screen.groups())
    for pick in picks(screen, groups)[:1]:
        for trial in trials_of(screen, groups, [pick]):
            return trial, pick.value
    return None


def _spread(ranked: Sequence[Pick]) -> list[Pick]:
    """Return the most promising clusters, not too many that differ in their size alone."""
    taken: dict[int, int] = {}
    chosen = []
    for pick in ranked:
        taken[pick.number] = taken.get(pick.number, 0) + 1
        if taken[pick.number] <= MOST_OF_A_GROUP:
            chosen.append(pick)
        if len(chosen) == MOST_TRIALS:
            break
    return chosen


def fastest(groups: Sequence[Screened]) -> list[Pick]:
    """Return the fastest cluster of every group."""
    found = []
    for number, rows in enumerate(groups):
        at = int(np.argmin(rows.hours))
        found.append(
            Pick(value=float(rows.hours[at]), usd=float(rows.usd[at]), number=number, nodes=int(rows.nodes[at]), at=at)
        )
    return sorted(found)[:MOST_TRIALS]


def trials_of(screen: Screen, groups: Sequence[Screened], chosen: Iterable[Pick]) -> Iterator[Trial]:
    """Make trials. Where a fallback to on-demand machines is allowed, it is used: it never costs what it does not
    save."""
    for pick in chosen:
        rows = groups[pick.number]
        trial = trial_of(screen, rows, pick.nodes, fallback=bool(rows.fallback[pick.at]))
        if trial is not None:
            yield trial


def _variants(screen: Screen, groups: Sequence[Screened], best: Sequence[Judged]) -> Iterator[Trial]:
    """Change the best trials a little: other sizes, a smaller least gang, intervals by age, replicas, no fallback."""
    for one in best:
        trial = one.trial
        choice = trial.choice
        rows = next(r for r in groups if _same_group(screen, r, trial))
        nodes = trial.candidate.nodes
        for other in NEIGHBOURS:
            at = np.flatnonzero(rows.nodes == nodes + other)
            if at.size:
                changed = trial_of(screen, rows, nodes + other, fallback=bool(rows.fallback[at[0]]))
                if changed is not None:
                    yield changed
        least_nodes = int(trial.board.workers.least_nodes[trial.candidate.worker])
        if choice.least is not None and choice.least > max(least_nodes, nodes // 4, 1):
            yield trial.changed(least=max(least_nodes, nodes // 4, 1))
        law = None if trial.market is None else trial.spells()
        if law is not None:
            yield trial.changed(by_age=law)
        if choice.fallback:  # the confidence may allow to be late at times
            yield trial.changed(fallback=False)
        if choice.replicas == 1:
            double = with_replicas(trial.candidate, 2)
            if trial.affordable(double):
                yield trial.changed(double, replicas=2)


def _same_group(screen: Screen, rows: Screened, trial: Trial) -> bool:
    architecture = trial.candidate.architecture
    return (
        screen.space.architectures[rows.architecture] is architecture
        and rows.worker == trial.candidate.worker
        and rows.columns == trial.choice.columns
        and rows.tier == trial.tier
        and rows.shrink == (trial.choice.least is not None)
        and (rows.market is None) == (trial.market is None)
    )


def _finalists(kept: Sequence[Judged], late: Sequence[Judged], most: int) -> list[Judged]:
    """Return the best, and the best of each shape, type and place: for recommendations and the failover list."""
    chosen = {id(one): one for one in kept[: most // 2]}
    seen = set()
    for one in (*kept, *late):
        key = shape_of(one.trial)
        if key not in seen and len(chosen) < most:
            seen.add(key)
            chosen[id(one)] = one
    return list(chosen.values())


def shape_of(trial: Trial) -> tuple[str, int, int]:
    """Return the architecture, and what ``place_of`` returns."""
    return trial.candidate.architecture.name, *place_of(trial)


def place_of(trial: Trial) -> tuple[int, int]:
    """Return the machine type and the place where it starts."""
    workers = trial.board.workers
    return int(workers.instance[trial.candidate.worker]), int(workers.place[trial.candidate.worker])
