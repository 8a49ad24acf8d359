"""The search under a market: a space and its spot markets in; judged trials, the best first, out.

Three rounds: the analytic screen chooses some 200 clusters; replays rank them, and the best are changed a little until
no change helps; so are the best of these on other draws of the market, so that luck in the first ones does not decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from deepvm.market.trace import Trace
from deepvm.plan.risk.replays import Judged, Progress, Replays
from deepvm.plan.risk.screen import Pick, Screen, Screened, picks, trial_of, trial_of_choice
from deepvm.plan.risk.spot import Spot
from deepvm.plan.risk.trial import Trial, fallback_allowed, with_replicas
from deepvm.plan.search.space import Space

MOST_TRIALS = 200
MOST_OF_A_GROUP = 6
FINALISTS = 24
CLIMBERS, LAST_CLIMBERS, MOST_ROUNDS = 3, 1, 5
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
    kept = _climbed(first, screen, kept, CLIMBERS, progress)

    afresh = Screen(space=space, spot=spot.afresh(MANY_WORLDS))
    last = Replays(afresh.market, MANY_STARTS)
    late = sorted((one for one in judged if not one.kept), key=lambda one: (one.risk.missed, one.rank))
    most = max(FINALISTS, 2 * space.board.request.top)
    final = last.all((one.trial for one in _finalists(kept, late, most)), progress)
    best = sorted((one for one in final if one.kept), key=lambda one: one.rank)
    best = _climbed(last, afresh, best, LAST_CLIMBERS, progress)
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


def _climbed(
    replays: Replays, screen: Screen, kept: Sequence[Judged], climbers: int, progress: Progress | None
) -> list[Judged]:
    """Change the best trials a little, and the best of these again, until no change helps; return all that are kept."""
    found, known, expanded = list(kept), {_identity(one.trial) for one in kept}, set[int]()
    for _ in range(MOST_ROUNDS):
        starts = [one for one in found[:climbers] if id(one) not in expanded]
        if not starts:
            break
        expanded |= {id(one) for one in starts}
        fresh = {_identity(trial): trial for one in starts for trial in _variants(screen, one.trial)}
        new = replays.all([trial for key, trial in fresh.items() if key not in known], progress)
        known |= fresh.keys()
        found = sorted([*found, *(one for one in new if one.kept)], key=lambda one: one.rank)
    return found


def _identity(trial: Trial) -> tuple[object, ...]:
    return trial.candidate.architecture.name, trial.candidate.cluster, trial.choice


def _variants(screen: Screen, trial: Trial) -> Iterator[Trial]:
    """Yield other sizes, zones, least gangs, intervals by age, replicas, and the other way with on-demand machines."""
    nodes, choice = trial.candidate.nodes, trial.choice
    shrink = choice.least is not None
    for other in NEIGHBOURS:
        yield from _remade(screen, trial, nodes + other, choice.columns, shrink=shrink)
    for columns in _other_zones(trial):
        yield from _remade(screen, trial, nodes, columns, shrink=shrink)
    if trial.market is not None:
        yield from _remade(screen, trial, nodes, choice.columns, shrink=not shrink)
        yield from _remade(screen, trial, nodes, choice.columns, shrink=shrink)
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


def _remade(screen: Screen, trial: Trial, nodes: int, columns: tuple[int, ...], *, shrink: bool) -> Iterator[Trial]:
    """Yield the cluster of another size or in other zones, with and without on-demand machines before a deadline."""
    space, market, worker = screen.space, trial.market, trial.candidate.worker
    rows = [worker] if market is None else [market.columns[column].row for column in columns]
    a = next(i for i, one in enumerate(space.architectures) if one is trial.candidate.architecture)
    if not 1 <= nodes <= len(space.nodes) or (shrink and nodes < 2) or not screen.possible[a, rows, nodes - 1].all():
        return
    made = trial_of_choice(screen, a, rows[0], market, columns, nodes, shrink=shrink, tier=trial.tier, fallback=False)
    if made is None:
        return
    due = trial.board.request.deadline_s is not None and market is not None
    if due and fallback_allowed(space, rows[0], made.keeper_usd, nodes).all():
        yield made.changed(fallback=True)
    yield made


def _other_zones(trial: Trial) -> Iterator[tuple[int, ...]]:
    """Yield the zones with a region more and with a region less."""
    if trial.market is None:
        return
    chosen, every = set(trial.choice.columns), range(len(trial.market.columns))
    regions = [column.region for column in trial.market.columns]
    whole = [{i for i in every if regions[i] == region} for region in dict.fromkeys(regions)]
    for change in whole:
        for other in (chosen | change, chosen - change):
            if other and other != chosen:
                yield tuple(sorted(other))


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
