"""Parameters that are written between save() and the optimizer's step, in ways that torch does not see: what is
committed is the state at save(), bit for bit, in every store; and a save that was disturbed is taken again."""

from __future__ import annotations

import ctypes
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deepvm.checkpoint import Checkpointer
from deepvm.checkpoint.snapshot import snapshotter
from deepvm.errors import CheckpointError
from deepvm.memnode import Limits, MemoryNode
from tests.support.checkpoint.huge_memory import in_huge_pages, watched

MIB = 2**20
NEVER = "every 1000000 steps"
WIDTH = 768  # a layer of 2.25 MiB, of which 2 are one huge page


@pytest.fixture
def node() -> Iterator[MemoryNode]:
    fields = {"capacity_bytes": 400 * MIB, "block_bytes": MIB, "buffers": 3, "limits": Limits(stop_s=0.0)}
    with MemoryNode(**fields) as running:
        yield running


class Training:
    """Two layers, their optimizer's state, and a moving average, all in huge pages."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH))
        self.average = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        for parameter in [*self.model.parameters(), self.average.weight]:
            if parameter.dim() == 2:
                parameter.data = in_huge_pages(*parameter.shape).copy_(parameter.data)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.step()
        for state in self.optimizer.state.values():
            found = state["momentum_buffer"]
            state["momentum_buffer"] = in_huge_pages(*found.shape).copy_(found)
        self.state = {"model": self.model, "optimizer": self.optimizer, "average": self.average}

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(2, WIDTH)).square().mean().backward()
        self.optimizer.step()

    def truth(self) -> list[torch.Tensor]:
        found = [*self.model.parameters(), self.average.weight]
        found += [state["momentum_buffer"] for state in self.optimizer.state.values()]
        return [t.detach().clone() for t in found]


# --- what users do; each returns what undoes it ---------------------------------------------------------------------


def clip_through_data(work: Training) -> None:
    for parameter in work.model.parameters():
        parameter.data.clamp_(-0.01, 0.01)


def swap_by_assignment(work: Training) -> Callable[[], None]:
    mine = [p.data for p in work.model.parameters()]
    for parameter in work.model.parameters():
        parameter.data = parameter.data * 0.5

    def undo() -> None:
        for parameter, data in zip(work.model.parameters(), mine, strict=True):
            parameter.data = data

    return undo


def swap_by_assignment_and_drop(work: Training) -> None:
    """The old memory is free as soon as nobody holds it, and is used for other things."""
    for parameter in work.model.parameters():
        parameter.data = parameter.data * 0.5
    for _ in range(4):
        torch.full((WIDTH, WIDTH), 3.0)


def swap_in_place(work: Training) -> Callable[[], None]:
    """As Lightning's EMAWeightAveraging swaps for validation."""
    mine = [p.detach().clone() for p in work.model.parameters()]
    for parameter in work.model.parameters():
        parameter.data.copy_(parameter.data * 0.5)

    def undo() -> None:
        for parameter, data in zip(work.model.parameters(), mine, strict=True):
            parameter.data.copy_(data)

    return undo


def exchange_with_the_average(work: Training) -> Callable[[], None]:
    """tmp = p; p = average; average = tmp: both are part of the state."""

    def exchange() -> None:
        theirs = work.average.weight.data.clone()
        work.average.weight.data.copy_(work.model[0].weight.data)
        work.model[0].weight.data.copy_(theirs)

    exchange()
    return exchange


def write_through_numpy(work: Training) -> None:
    work.model[1].weight.detach().numpy()[7:9] = 42.0


def write_by_address(work: Training) -> None:
    ctypes.memset(work.model[0].weight.data_ptr() + 5 * 4096, 1, 4)
    momentum = work.optimizer.state[work.model[1].weight]["momentum_buffer"]
    ctypes.memset(momentum.data_ptr() + 1000, 1, 4)


def write_from_the_kernel(work: Training) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"\x01" * 64)
    os.readv(reading, [(ctypes.c_char * 64).from_address(work.model[0].weight.data_ptr() + 9000)])
    os.close(reading)
    os.close(writing)


def write_a_momentum(work: Training) -> None:
    work.optimizer.state[work.model[0].weight]["momentum_buffer"].data.mul_(0.5)


IDIOMS = [
    clip_through_data, swap_by_assignment, swap_by_assignment_and_drop, swap_in_place, exchange_with_the_average,
    write_through_numpy, write_by_address, write_from_the_kernel, write_a_momentum,
]  # fmt: skip


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.view(torch.int32), right.view(torch.int32))


def committed_and_torn(url: str, change: Any, saves: int, seed: int = 0) -> tuple[int, int, int]:
    """How many saves were committed, how many of these are not the state at save(), and how many read in place."""
    chance = random.Random(seed)
    work, fresh = Training(), Training(1)
    committed = torn = in_place = 0
    with Checkpointer(work.state, url, run=change.__name__, policy=NEVER, on_busy="wait") as ckpt:
        for step in range(saves):
            truth = work.truth()
            handle = ckpt.save(step)
            in_place += bool(handle.bytes_in_place)
            if chance.random() < 0.7:
                time.sleep(chance.uniform(0.0, 0.02))
            undo = change(work)
            work.optimizer.zero_grad()
            work.model(torch.randn(2, WIDTH)).square().mean().backward()
            if undo is not None:
                undo()
            work.optimizer.step()
            try:
                handle.wait("remote", 30)
            except CheckpointError as error:
                assert "changed in place" in str(error)  # noqa: PT017 - not every time
                continue
            committed += 1
            with Checkpointer(fresh.state, url, run=change.__name__, policy=NEVER) as reader:
                assert reader.restore(step) == step
            torn += not all(map(same_bits, fresh.truth(), truth))
    return committed, torn, in_place


@watched
@pytest.mark.parametrize("kind", ["memory", "file"])
@pytest.mark.parametrize("change", IDIOMS, ids=lambda change: change.__name__)
def test_what_is_committed_is_the_state_at_save_whatever_writes(
    node: MemoryNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, change: Any
) -> None:
    monkeypatch.setattr(snapshotter, "MOST_DISTURBED", 10**9)  # or the fourth save, and all after it, would be copied
    url = f"memory://{node.address}?connections=2" if kind == "memory" else f"file://{tmp_path}"
    committed, torn, in_place = committed_and_torn(url, change, saves=4)
    assert (torn, committed >= 1, in_place >= 2) == (0, True, True)


@watched
@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["memory", "file"])
@pytest.mark.parametrize("change", IDIOMS, ids=lambda change: change.__name__)
def test_200_saves_are_the_state_at_save_whatever_writes(
    node: MemoryNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, change: Any
) -> None:
    monkeypatch.setattr(snapshotter, "MOST_DISTURBED", 10**9)
    url = f"memory://{node.address}?connections=2" if kind == "memory" else f"file://{tmp_path}"
    committed, torn, in_place = committed_and_torn(url, change, saves=200, seed=1)
    assert (torn, committed >= 60, in_place >= 60) == (0, True, True)


# --- what becomes of a save that was disturbed ----------------------------------------------------------------------


def slow(node: MemoryNode) -> str:
    """A store that takes seconds for what is in place: whatever comes next comes before it is sent."""
    return f"memory://{node.address}?connections=1&pace=4000000"


@watched
def test_a_disturbed_save_fails_with_a_reason_and_is_taken_again_at_the_next_step(
    node: MemoryNode, caplog: pytest.LogCaptureFixture
) -> None:
    work = Training()
    with Checkpointer(work.state, slow(node), run="again", policy=NEVER) as ckpt:
        handle = ckpt.save(1)
        assert handle.bytes_in_place
        clip_through_data(work)
        work.step()
        with pytest.raises(CheckpointError, match="changed in place before it was saved"):
            handle.wait("remote", 30)
        assert "step 1 was not saved" in caplog.text
        assert ckpt._saver.wait_idle(30)
        truth = work.truth()
        again = ckpt.step(2)
        assert again is not None, "the policy says never"
        clip_through_data(work)
        again.wait("remote", 60)
        assert ckpt.step(3) is None
        assert ckpt.restore() == 2
        assert all(map(same_bits, work.truth(), truth))


@watched
def test_after_several_disturbed_saves_all_are_copied_and_none_is_disturbed(
    node: MemoryNode, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshotter, "MOST_DISTURBED", 1)
    work = Training()
    with Checkpointer(work.state, slow(node), run="copied", policy=NEVER, on_busy="wait") as ckpt:
        assert ckpt.save(0).state == "taken"
        clip_through_data(work)
        work.step()
        assert ckpt._saver.wait_idle(60)
        assert "1 saves were disturbed by writes: from now on save() copies the state" in caplog.text
        for parameter in work.model.parameters():  # into new huge pages
            if parameter.dim() == 2:
                parameter.data = in_huge_pages(*parameter.shape).copy_(parameter.data)
        for step in (1, 2):
            handle = ckpt.save(step)
            assert not handle.bytes_in_place
            clip_through_data(work)
            handle.wait("remote", 60)


@watched
def test_settled_weights_may_be_swapped(node: MemoryNode) -> None:
    work = Training()
    with Checkpointer(work.state, slow(node), run="settled", policy=NEVER, on_error="raise") as ckpt:
        truth = work.truth()
        handle = ckpt.save(1)
        assert handle.bytes_in_place
        ckpt.settle()
        assert handle.state == "staged"
        clip_through_data(work)
        write_by_address(work)
        handle.wait("remote", 60)
        ckpt.settle()  # nothing is under way
        assert ckpt.restore() == 1
        assert all(map(same_bits, work.truth(), truth))


def test_without_live_reads_everything_is_copied_at_save(node: MemoryNode) -> None:
    work = Training()
    with Checkpointer(work.state, slow(node), run="copied", policy=NEVER, live=False) as ckpt:
        truth = work.truth()
        handle = ckpt.save(1)
        assert not handle.bytes_in_place
        clip_through_data(work)
        write_by_address(work)
        handle.wait("remote", 60)
        assert ckpt.restore() == 1
        assert all(map(same_bits, work.truth(), truth))


@watched
def test_bytes_that_were_sent_before_the_write_are_kept(node: MemoryNode) -> None:
    """The save is not disturbed: all of it was read, and proven, before."""
    work = Training()
    url = f"memory://{node.address}"
    with Checkpointer(work.state, url, run="sent", policy=NEVER, on_error="raise") as ckpt:
        truth = work.truth()
        handle = ckpt.save(1)
        assert handle.bytes_in_place
        handle.wait("staged", 30)  # all chunks are with the node
        clip_through_data(work)
        handle.wait("remote", 30)
        work.step()
        assert ckpt.restore() == 1
        assert all(map(same_bits, work.truth(), truth))
