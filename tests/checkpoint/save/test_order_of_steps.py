"""Which steps a session may delete: its own and older ones, never another training's, in every kind of store."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deepvm.checkpoint import Checkpointer
from deepvm.errors import CheckpointError, UsageError
from deepvm.memnode import MemoryNode
from deepvm.store.urls import open_store

MIB = 2**20


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/store"
        return
    with MemoryNode(listen="127.0.0.1:0", capacity_bytes=64 * MIB, block_bytes=MIB, spill=tmp_path) as running:
        yield f"memory://{running.address}"


def checkpointer(url: str | list[str], number: float = 0.0, **options: Any) -> Checkpointer:
    return Checkpointer({"weight": torch.full((8,), number)}, url, policy="every 100 steps", **options)


def steps(url: str) -> list[int]:
    store = open_store(url)
    try:
        return store.steps("default")
    finally:
        store.close()


def train(url: str, *numbers: int, restore: bool = True) -> None:
    with checkpointer(url) as ckpt:
        if restore:
            ckpt.restore()
        for number in numbers:
            ckpt.save(number).wait("durable", 30)


def resumed(url: str | list[str]) -> int | None:
    with checkpointer(url) as ckpt:
        return ckpt.restore()


def spoil(folder: Path, step: int) -> None:
    (data,) = folder.rglob(f"step-{step:012d}.safetensors")
    data.write_bytes(b"\xff" * data.stat().st_size)


def warnings(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [r.message for r in caplog.records if r.levelno == logging.WARNING and words in r.message]


# --- another training's checkpoints -------------------------------------------------------------------------------


def test_a_save_below_steps_that_were_not_restored_fails_and_deletes_nothing(url: str) -> None:
    train(url, 10, 20)
    with checkpointer(url) as ckpt:
        for number in (1, 2, 3):
            with pytest.raises(CheckpointError) as raised:
                ckpt.save(number).wait("durable", 30)
            assert (
                f'run "default" in {url} has step 20, newer than step {number} and not restored: '
                "call restore() first, or choose another run=" in str(raised.value)
            )
        assert ckpt.status().failed == 3
    assert steps(url) == [10, 20]
    assert resumed(url) == 20


def test_a_save_above_what_the_store_has_needs_no_restore(url: str) -> None:
    train(url, 10, 20)
    train(url, 30, 40, restore=False)
    assert steps(url) == [30, 40]


def test_a_session_may_count_anew_in_an_empty_store(url: str) -> None:
    train(url, 20, 3, restore=False)
    assert 3 in steps(url)


def test_the_store_is_asked_once(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    asked: list[int] = []

    class Counting(type(store)):  # type: ignore[misc]
        def steps(self, run: str) -> list[int]:
            asked.append(1)
            return list(super().steps(run))

    counting = Counting(tmp_path)
    with checkpointer(counting) as ckpt:
        ckpt.save(1).wait("durable", 30)
        first = len(asked)
        ckpt.save(2).wait("durable", 30)
        assert len(asked) - first == 1  # retention alone
        assert first == 2


# --- going back ---------------------------------------------------------------------------------------------------


def test_what_was_gone_back_from_is_removed_at_the_first_commit(url: str, caplog: pytest.LogCaptureFixture) -> None:
    train(url, 10, 20)
    with checkpointer(url) as ckpt:
        assert ckpt.restore(10) == 10
        assert steps(url) == [10, 20]
        ckpt.save(11).wait("durable", 30)
        assert 20 not in steps(url)
        assert 11 in steps(url)
        ckpt.save(12).wait("durable", 30)
    assert steps(url) == [11, 12]
    assert resumed(url) == 12
    (told,) = warnings(caplog, "deleted step 20 of run default")
    assert url in told


def test_a_session_goes_back_behind_its_own_steps(url: str) -> None:
    with checkpointer(url) as ckpt:
        for number in (10, 20):
            ckpt.save(number).wait("durable", 30)
        ckpt.restore(10)
        ckpt.save(11).wait("durable", 30)
    assert resumed(url) == 11


def test_saves_after_a_damaged_newest_step_stay(tmp_path: Path) -> None:
    url = f"file://{tmp_path}"
    train(url, 10, 20)
    spoil(tmp_path, 20)
    with checkpointer(url) as ckpt:
        assert ckpt.restore() == 10
        for number in (11, 12, 13):
            ckpt.save(number).wait("durable", 30)
            assert number in steps(url)
    assert steps(url) == [12, 13]
    assert resumed(url) == 13


def test_the_store_behind_keeps_to_the_new_branch_too(tmp_path: Path) -> None:
    with MemoryNode(listen="127.0.0.1:0", capacity_bytes=64 * MIB, block_bytes=MIB) as node:
        near, far = f"memory://{node.address}", f"file://{tmp_path}"
        train([near, far], 10, 20)  # type: ignore[arg-type]
        with checkpointer([near, far]) as ckpt:
            ckpt.restore(10)
            ckpt.save(11).wait("durable", 30)
        assert steps(far) == [10, 11]
        assert 20 not in steps(near)
        assert resumed([near, far]) == 11


def test_newer_steps_that_were_never_restored_are_kept_and_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"file://{tmp_path}/here"
    train(url, 10)
    train(f"file://{tmp_path}/there", 50)
    with checkpointer(url) as ckpt:
        ckpt.restore()
        ckpt.save(11).wait("durable", 30)
        for file in (tmp_path / "there" / "default").glob("step-*"):  # as when a network file system comes back
            file.rename(tmp_path / "here" / "default" / file.name)
        for number in (12, 13, 14):
            ckpt.save(number).wait("durable", 30)
    assert steps(url) == [13, 14, 50]
    assert len(warnings(caplog, "step 50")) == 1


# --- notebooks ----------------------------------------------------------------------------------------------------


def test_a_cell_that_is_run_again_closes_the_checkpointer_of_the_first_run(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = checkpointer(url, 1.0)
    for number in range(1, 6):
        first.step(number)
    with checkpointer(url) as again:
        assert again.restore() == 5
        assert again.state["weight"][0] == 1.0
        again.step(6)
        assert len(warnings(caplog, "closes the older one")) == 1
        with pytest.raises(UsageError, match="closed"):
            first.save(6)


def test_one_that_only_restores_leaves_the_training_one_open(url: str) -> None:
    with checkpointer(url) as training:
        training.save(1).wait("durable", 30)
        assert resumed(url) == 1
        training.save(2).wait("durable", 30)


def test_a_checkpointer_of_another_run_stays_open(url: str) -> None:
    with checkpointer(url, run="one") as one, checkpointer(url, run="two") as two:
        for ckpt in (one, two):
            ckpt.save(1).wait("durable", 30)


def test_checkpointers_that_share_a_store_object_do_not_close_it(url: str) -> None:
    store = open_store(url)
    first = Checkpointer({"weight": torch.ones(8)}, store, policy="every 100 steps")
    first.step(3)
    with Checkpointer({"weight": torch.zeros(8)}, store) as again:
        assert again.restore() == 3
        again.save(4).wait("durable", 30)
