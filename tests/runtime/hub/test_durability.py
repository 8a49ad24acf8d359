"""Whether a run's newest checkpoint is durable, asked of a directory that nodes copy to."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepvm.events import Event
from deepvm.runtime.hub.durability import Durability, unsafe_step
from deepvm.runtime.hub.progress import Progress
from deepvm.store import open_store
from tests.support.store.checkpoints import payload, save


def saved(step: int = 1) -> Progress:
    return Progress(saved_step=step, saved_at_s=1.0)


def kept(folder: Path) -> str:
    store = open_store(str(folder))
    try:
        save(store, payload(1000))
        return store.url
    finally:
        store.close()


def durability(tmp_path: Path, *, nodes: list[str] | None = None) -> Durability:
    found = ["127.0.0.1:1"] if nodes is None else nodes
    return Durability("run-a", nodes=lambda: found, token="", durable=str(tmp_path))


def test_a_checkpoint_in_the_durable_store_is_an_event_with_its_place(tmp_path: Path) -> None:
    url = kept(tmp_path)
    event = durability(tmp_path).await_newest(saved(), lambda: pytest.fail("it is there at once"))

    assert event is not None
    assert (event.kind, event.data) == ("save", {"step": 1, "state": "durable", "place": url})


def test_a_checkpoint_that_comes_later_is_awaited(tmp_path: Path) -> None:
    pauses: list[int] = []

    def pause() -> bool:
        pauses.append(1)
        if len(pauses) == 3:
            kept(tmp_path)
        return True

    assert durability(tmp_path).await_newest(saved(), pause) is not None
    assert len(pauses) == 3


def test_waiting_ends_as_soon_as_nobody_wants_to_wait(tmp_path: Path) -> None:
    pauses: list[int] = []

    def pause() -> bool:
        pauses.append(1)
        return len(pauses) < 2

    assert durability(tmp_path).await_newest(saved(), pause) is None
    assert len(pauses) == 2


def test_nothing_is_awaited_without_nodes_or_a_new_checkpoint(tmp_path: Path) -> None:
    def pause() -> bool:
        raise AssertionError("nothing to wait for")

    assert durability(tmp_path, nodes=[]).await_newest(saved(), pause) is None
    assert durability(tmp_path).await_newest(Progress(saved_step=1), pause) is None
    assert durability(tmp_path).place_of(1) is None


@pytest.mark.parametrize(
    ("progress", "step"),
    [
        (Progress(), None),
        (Progress(saved_step=5), None),  # an earlier session's
        (Progress(saved_step=5, saved_at_s=1.0), 5),
        (Progress(saved_step=5, saved_at_s=1.0, durable_step=4), 5),
        (Progress(saved_step=5, saved_at_s=1.0, durable_step=5), None),
        (Progress(saved_step=5, saved_at_s=1.0, durable_step=6), None),
    ],
)
def test_a_step_is_unsafe_until_it_is_known_to_be_durable(progress: Progress, step: int | None) -> None:
    assert unsafe_step(progress) == step


def test_progress_follows_the_events_of_trainers() -> None:
    progress = Progress()
    progress.recall(
        [
            Event(at_s=1.0, kind="save", data={"step": step, "state": state})
            for step, state in ((4, "remote"), (3, "durable"), (9, "failed"))
        ]
    )
    assert (progress.saved_step, progress.alive) == (4, False)

    progress.observe(Event(at_s=2.0, kind="restored", data={"step": 4, "place": "memory://a"}))
    assert (progress.step, progress.saved_step, progress.saved_place, progress.alive) == (4, 4, "memory://a", True)

    progress.observe(Event(at_s=3.0, kind="save", data={"step": 6, "state": "remote", "seconds": 2.5}))
    assert (progress.saved_step, progress.saved_at_s, progress.save_s, progress.saved_place) == (
        6,
        3.0,
        2.5,
        "memory://a",
    )

    progress.observe(Event(at_s=4.0, kind="save", data={"step": 6, "state": "durable"}))
    assert (progress.durable_step, progress.saved_step) == (6, 6)


@pytest.mark.parametrize(("step", "kept"), [(4, None), (5, 4)])
def test_training_that_began_again_has_no_checkpoint_of_earlier_sessions(step: int, kept: int | None) -> None:
    progress = Progress(saved_step=4)
    progress.observe(Event(at_s=1.0, kind="step", data={"step": step}))
    assert progress.saved_step == kept
