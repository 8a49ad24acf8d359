"""What holds for machines wherever they come from. A backend joins by a fixture of its own in ``BACKENDS``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from playing import changes, job, machine, marked, python

from deepvm.errors import UsageError
from deepvm.runtime.backend import Backend
from deepvm.runtime.cluster import Machine
from deepvm.runtime.local import LocalBackend

MACHINES = (machine("memory/0", "on-demand"), machine("worker/0"), machine("worker/1"))
NAMES = [m.name for m in MACHINES]


@dataclass(frozen=True, kw_only=True)
class Place:
    backend: Backend
    machines: tuple[Machine, ...]  # an on-demand one and two on spot, none of them up
    left: Callable[[], list[str]]  # what there is of the run now, in words
    preempts: bool = True


@contextmanager
def local(folder: Path) -> Iterator[Place]:
    given = job(folder)
    backend = LocalBackend(given, command=python("import time; time.sleep(600)"))
    try:
        yield Place(backend=backend, machines=MACHINES, left=lambda: [f"process {pid}" for pid in marked(given)])
    finally:
        backend.down(within_s=0)


BACKENDS: dict[str, Callable[[Path], AbstractContextManager[Place]]] = {"local": local}


@pytest.fixture(params=BACKENDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with BACKENDS[request.param](tmp_path) as made:
        yield made
        made.backend.down(within_s=0)
        assert made.left() == []


def test_machines_that_were_asked_for_come_up_once_with_an_address(place: Place) -> None:
    assert place.left() == []
    place.backend.up(place.machines)
    found = changes(place.backend, len(NAMES))
    assert sorted((change.machine, change.state) for change in found) == [(name, "up") for name in NAMES]
    assert all(change.address and change.at_s > 0 for change in found)
    assert place.backend.poll() == []
    assert place.left() != []


def test_some_of_a_cluster_can_be_asked_for_before_the_others(place: Place) -> None:
    place.backend.up(place.machines[:1])
    assert [change.machine for change in changes(place.backend, 1)] == NAMES[:1]
    place.backend.up(place.machines[1:])
    assert sorted(change.machine for change in changes(place.backend, 2)) == NAMES[1:]


def test_what_is_up_cannot_be_asked_for_again_and_nothing_else_is_begun(place: Place) -> None:
    place.backend.up(place.machines[:1])
    with pytest.raises(UsageError, match="memory/0"):
        place.backend.up(place.machines)
    assert [change.machine for change in changes(place.backend, 1)] == NAMES[:1]
    assert place.backend.poll() == []


def test_the_same_machine_twice_in_one_breath_is_refused(place: Place) -> None:
    with pytest.raises(UsageError, match="memory/0"):
        place.backend.up([place.machines[0], place.machines[0]])
    assert place.backend.poll() == []
    assert place.left() == []


def test_all_that_is_up_goes_down_and_nothing_is_left(place: Place) -> None:
    place.backend.up(place.machines)
    changes(place.backend, len(NAMES))
    place.backend.down()
    assert place.left() == []
    found = changes(place.backend, len(NAMES))
    assert sorted((change.machine, change.state, change.why) for change in found) == [
        (name, "down", "stopped") for name in NAMES
    ]


def test_going_down_twice_is_going_down(place: Place) -> None:
    place.backend.down()
    place.backend.up(place.machines)
    place.backend.down(NAMES[:1])
    place.backend.down(NAMES)
    place.backend.down()
    found = changes(place.backend, 2 * len(NAMES))
    assert sorted(change.machine for change in found if change.state == "down") == NAMES
    assert place.backend.poll() == []


def test_what_went_down_can_come_up_again_and_its_end_is_told_first(place: Place) -> None:
    place.backend.up(place.machines[:1])
    place.backend.down()
    place.backend.up(place.machines[:1])
    assert [change.state for change in changes(place.backend, 3)] == ["up", "down", "up"]


def test_a_machine_that_nobody_asked_for_is_refused(place: Place) -> None:
    place.backend.up(place.machines[:1])
    with pytest.raises(UsageError, match="worker/9"):
        place.backend.down(["worker/9"])
    with pytest.raises(UsageError, match="worker/9"):
        place.backend.preempt("worker/9", notice_s=0)
    assert [change.state for change in changes(place.backend, 1)] == ["up"]


def test_what_is_preempted_is_down_and_can_be_replaced(place: Place) -> None:
    if not place.preempts:
        pytest.skip("machines of this backend cannot be preempted on purpose")
    place.backend.up(place.machines)
    changes(place.backend, len(NAMES))
    place.backend.preempt("worker/1", notice_s=0)
    (gone,) = changes(place.backend, 1)
    assert (gone.machine, gone.state, gone.why) == ("worker/1", "down", "preempted")
    place.backend.up(place.machines[2:])
    assert [change.machine for change in changes(place.backend, 1)] == ["worker/1"]
