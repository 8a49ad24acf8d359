"""Which steps of a store a session deletes, and which keep it from saving: on a store in memory."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from deepvm.checkpoint.save.step_order import StepOrder
from deepvm.errors import CheckpointError, StoreUnavailable
from deepvm.policy import Retention


class Steps:
    """A store that has steps and nothing else."""

    def __init__(self, *steps: int, url: str = "file:///a") -> None:
        self.held, self.url = list(steps), url
        self.asked = 0
        self.silent = False

    def steps(self, run: str) -> list[int]:
        self.asked += 1
        if self.silent:
            raise StoreUnavailable("silent")
        return sorted(self.held)

    def delete(self, run: str, step: int) -> None:
        if self.silent:
            raise StoreUnavailable("silent")
        if step in self.held:
            self.held.remove(step)


def order(*stores: Any, keep: int = 2, world_size: int = 1) -> StepOrder:
    return StepOrder(stores, "run", Retention(keep_last=keep), 0, world_size)


def commit(steps: StepOrder, store: Any, step: int, attempt: int = 1) -> list[int]:
    store.held.append(step)
    deleted = steps.committed(store, step, attempt)
    steps.prune(store)
    return deleted


def test_a_save_below_what_is_there_is_refused_and_above_it_is_not() -> None:
    store = Steps(10, 20)
    steps = order(store)
    for _ in range(2):
        with pytest.raises(CheckpointError, match='run "run" in file:///a has step 20, newer than step 19'):
            steps.check_alone(19)
    assert store.asked == 1
    steps.check_alone(20)
    steps.check_alone(3)  # from then on it counts as it likes
    assert store.asked == 1


def test_a_store_that_does_not_answer_is_asked_again() -> None:
    silent, other = Steps(5), Steps(url="file:///b")
    silent.silent = True
    steps = order(silent, other)
    steps.check_alone(1)
    silent.silent = False
    with pytest.raises(CheckpointError, match="has step 5"):
        steps.check_alone(1)
    steps.check_alone(5)
    assert (silent.asked, other.asked) == (2, 1)


def test_after_a_restore_nothing_is_asked_and_superseded_steps_go_at_the_first_commit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Steps(10, 20, 30)
    steps = order(store, keep=9)
    steps.restored(20, {store.url: [10, 20, 30]}, 4)
    steps.check_alone(1)
    assert store.asked == 0
    assert commit(steps, store, 21, attempt=5) == [30]
    assert store.held == [10, 20, 21]
    assert "deleted step 30 of run run from file:///a: training continued from an older step" in caplog.text
    assert commit(steps, store, 22, attempt=6) == []


def test_before_any_restore_each_commit_is_a_step_of_this_branch() -> None:
    store = Steps()
    steps = order(store, keep=2)
    assert [commit(steps, store, step, attempt=1) for step in (1, 2, 3)] == [[], [], []]
    assert store.held == [2, 3]
    assert commit(steps, store, 9, attempt=2) == []
    assert store.held == [3, 9]


def test_superseded_steps_that_cannot_be_deleted_are_tried_again() -> None:
    store = Steps(10, 20, 30)
    steps = order(store, keep=9)
    steps.restored(10, {store.url: [10, 20, 30]}, 0)
    store.silent = True
    assert steps.committed(store, 11, 1) == []
    store.silent = False
    assert steps.committed(store, 12, 2) == [20, 30]
    assert store.held == [10]


def test_a_superseded_step_that_is_saved_again_stays() -> None:
    store = Steps(10, 20, 30)
    steps = order(store, keep=9)
    steps.restored(10, {store.url: [10, 20, 30]}, 0)
    store.held.remove(20)
    assert commit(steps, store, 20) == [30]
    assert store.held == [10, 20]


def test_a_save_that_was_under_way_at_a_restore_is_superseded_too() -> None:
    store = Steps(10)
    steps = order(store, keep=9)
    steps.restored(10, {store.url: [10]}, 3)
    assert commit(steps, store, 15, attempt=3) == []
    assert commit(steps, store, 11, attempt=4) == [15]
    assert store.held == [10, 11]
    steps.restored(11, {store.url: [10, 11]}, 4)
    assert commit(steps, store, 9, attempt=4) == [], "older than what was restored: it is just a commit"
    assert 9 in store.held


def test_a_restore_of_nothing_allows_everything_and_without_a_list_its_own_steps_count() -> None:
    store = Steps()
    steps = order(store, keep=9)
    steps.restored(None, {}, 0)
    for step in (1, 2, 3):
        commit(steps, store, step)
    steps.restored(2, {}, 3)
    assert commit(steps, store, 4, attempt=4) == [3]


def test_old_steps_expire_and_newer_ones_of_others_stay_and_are_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Steps(1, 2, 50)
    steps = order(store)
    steps.restored(2, {store.url: [1, 2]}, 0)
    with caplog.at_level(logging.WARNING):
        for step in (3, 4, 5):
            commit(steps, store, step)
    assert store.held == [50, 4, 5]
    assert caplog.text.count("has step 50 of run run, newer than step") == 1
    assert "newer than step 3 and not seen by restore()" in caplog.text


def test_several_ranks_are_not_checked_alone() -> None:
    store = Steps(20)
    order(store, world_size=2).check_alone(1)
    assert store.asked == 0
