"""A killed run, resumed, is the undisturbed one: bit for bit in losses, data, weights, optimizer and generators."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checkpoint.processes import nodes, url_of
from tests.support.checkpoint.resumed_runs import GENERATORS, Plan, Session, Story

PLANS = [
    Plan(workers=workers, ranks=ranks, optimizer=optimizer, accumulate=accumulate)
    for workers, ranks, optimizer, accumulate in itertools.product((0, 2), (1, 2), ("AdamW", "SGD"), (1, 2))
]
POINTS = 50
PACE_S = 0.015  # slow enough that a busy machine commits a save before the first kill


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with nodes(1) as started:
        yield url_of(started)


@pytest.fixture(scope="module")
def undisturbed(url: str, tmp_path_factory: pytest.TempPathFactory) -> dict[Plan, Story]:
    """Filled as they are needed."""
    return {}


def truth_of(plan: Plan, known: dict[Plan, Story], url: str, directory: Path) -> Story:
    if plan not in known:
        run = f"truth-{PLANS.index(plan)}-{time.monotonic_ns()}"
        known[plan] = Session(plan, directory, url=url, run=run, every=1000).finish()
        assert len(known[plan].steps) == plan.steps * plan.ranks
        assert known[plan].restored[0] is None
    return known[plan]


def kill_and_resume(plan: Plan, truth: Story, url: str, directory: Path, seed: int) -> list[int]:
    """Killed twice at points of chance, and resumed both times, the second time on demand; the steps from which it went
    on."""
    chance = random.Random(seed)
    run = f"killed-{seed}-{time.monotonic_ns()}"
    resumed_from, reached = [], 0
    for kill in range(3):
        session = Session(plan, directory, url=url, run=run, pace_s=PACE_S, lazy=kill == 2)
        try:
            if kill == 2:
                story = session.finish()
            else:
                session.wait_for(chance.randint(min(reached + 2, plan.steps - 2), plan.steps - 1 - 6 * (kill == 0)))
                time.sleep(chance.uniform(0.0, 2 * PACE_S))
                story = session.kill(apart_s=chance.choice((0.0, 0.01)))
        finally:
            session.kill()
        assert story.differs_from(truth) is None
        assert all(drift == [] for drift in story.drift.values()), story.drift
        if kill:
            resumed_from.append(story.restored.get(0) or 0)
        reached = max([reached, *(step for _, step in story.steps)])
    assert story.digests.keys() == truth.digests.keys()
    return resumed_from


@pytest.mark.parametrize("plan", [PLANS[1], PLANS[6], PLANS[8], PLANS[15]], ids=str)
def test_a_run_killed_twice_and_resumed_twice_is_the_undisturbed_one(
    plan: Plan, undisturbed: dict[Plan, Story], url: str, tmp_path: Path
) -> None:
    truth = truth_of(plan, undisturbed, url, tmp_path)
    resumed_from = kill_and_resume(plan, truth, url, tmp_path, PLANS.index(plan))
    assert max(resumed_from) > 0  # and not begun anew


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(POINTS))
def test_a_run_killed_at_any_point_is_the_undisturbed_one(
    seed: int, undisturbed: dict[Plan, Story], url: str, tmp_path: Path
) -> None:
    plan = PLANS[seed % len(PLANS)]
    truth = truth_of(plan, undisturbed, url, tmp_path)
    assert max(kill_and_resume(plan, truth, url, tmp_path, 1000 + seed)) > 0


PIECES = ("model", "optimizer", "schedule", "scaler", "loader", *GENERATORS)


@pytest.mark.parametrize("left_out", ["", *PIECES])
def test_each_piece_of_state_that_is_left_out_shows(
    left_out: str, undisturbed: dict[Plan, Story], url: str, tmp_path: Path
) -> None:
    plan = Plan(steps=16)
    run = f"without-{left_out or 'nothing'}"
    first = Session(plan, tmp_path, url=url, run=run, every=7, leave_out=left_out).finish()
    resumed = Session(plan, tmp_path, url=url, run=run, every=7, leave_out=left_out, from_step=14).finish()
    assert resumed.restored[0] == 14
    problem = resumed.differs_from(first)
    if left_out:
        assert problem is not None, f"the run goes on the same without {left_out}"
    else:
        assert problem is None
