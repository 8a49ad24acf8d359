"""A node that evicted or lost its share of a committed step: the step is never taken for one that nobody committed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

import deepvm
from deepvm.checkpoint.save.commit import CommitClient
from deepvm.memnode import MemoryNode
from deepvm.store.files.store import FileStore
from deepvm.store.memory.store import MemoryStore
from tests.support.store.checkpoints import CHUNK, payload, read, save
from tests.support.waiting import wait_until

Start = Callable[..., MemoryNode]
RUN = "run-a"


def start_training_again(addresses: list[str]) -> None:
    with closing(MemoryStore(addresses)) as store:
        client = CommitClient(store, RUN, 0, 1)
        client.connect()
        client.delete_leftovers()
        client.close()


def save_durably(store: MemoryStore, step: int) -> None:
    save(store, payload(6 * CHUNK, seed=step), step=step)
    wait_until(lambda: "durable" in store.watch(RUN).states(step).values())


def test_steps_that_one_node_evicted_stay_where_they_are_whole(
    start_node: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spill, durable = tmp_path / "spill", tmp_path / "durable"
    first = start_node(spill=spill, spill_keep=9, durable=f"file://{durable}")
    addresses = [first.address, start_node().address]
    with closing(MemoryStore(addresses)) as store:
        for step in range(1, 7):
            save_durably(store, step)
            wait_until(lambda step=step: step in FileStore(spill).steps(RUN))  # a newer one would replace it
        start_training_again(addresses)
        assert store.steps(RUN) == [1, 2, 3, 4, 5, 6]
        assert read(store, step=1) == payload(6 * CHUNK, seed=1)
    assert FileStore(spill).steps(RUN) == FileStore(durable).steps(RUN) == [1, 2, 3, 4, 5, 6]
    assert "never committed" not in caplog.text


def test_durable_steps_stay_when_a_node_comes_back_empty(
    start_node: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    durable = tmp_path / "durable"
    first, second = start_node(durable=f"file://{durable}"), start_node()
    addresses = [first.address, second.address]
    with closing(MemoryStore(addresses)) as store:
        for step in (1, 2, 3):
            save_durably(store, step)
    second.stop()
    start_node(listen=addresses[1])
    start_training_again(addresses)
    assert FileStore(durable).steps(RUN) == [1, 2, 3]
    with closing(MemoryStore(addresses)) as store, caplog.at_level(logging.WARNING):
        assert store.steps(RUN) == []  # its memory has half of each
    assert "step 3 of run run-a was committed" in caplog.text


def test_a_spilled_step_is_restored_when_a_node_comes_back_empty(start_node: Start, tmp_path: Path) -> None:
    durable = tmp_path / "durable"
    first, second = start_node(spill=tmp_path / "spill", durable=f"file://{durable}"), start_node()
    addresses = [first.address, second.address]
    url = f"memory://{','.join(addresses)}"
    model = torch.nn.Linear(300, 300)
    with deepvm.Checkpointer({"model": model}, [url, f"file://{durable}"], run=RUN) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step).wait("durable", 30)
        wait_until(lambda: not first.writeback.status()["spill_waiting"])
    second.stop()
    start_node(listen=addresses[1])
    resumed = torch.nn.Linear(300, 300)
    with deepvm.Checkpointer({"model": resumed}, url, run=RUN) as ckpt:
        assert ckpt.restore() == 3
        assert torch.equal(resumed.weight, model.weight)
        ckpt.save(4).wait("durable", 30)
    assert FileStore(durable).steps(RUN)[-3:] == [2, 3, 4]


def test_a_step_that_only_one_node_published_is_still_deleted(start_node: Start, tmp_path: Path) -> None:
    first, second = start_node(spill=tmp_path / "spill"), start_node()
    addresses = [first.address, second.address]
    with closing(MemoryStore(addresses)) as store:
        for step in (1, 2):
            save(store, payload(6 * CHUNK), step=step)
        wait_until(lambda: not first.writeback.status()["spill_waiting"])
        (run,) = first.runs
        run.delete(2, None)
        start_training_again(addresses)
        assert store.steps(RUN) == [1]
        assert [list(run.checkpoints) for run in second.runs] == [[1]]
