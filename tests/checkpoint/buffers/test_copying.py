"""The copies that a training step waits for: exact for every type and size, and no end of training where they fail."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from deepvm.checkpoint import Checkpointer
from deepvm.checkpoint.buffers import copying
from deepvm.checkpoint.buffers.copying import SMALL_BYTES, SMALL_COUNT, Copier, is_small
from deepvm.checkpoint.snapshot.live_tensors import LiveTensors
from deepvm.checkpoint.snapshot.snapshot import Snapshot
from deepvm.errors import CheckpointError
from deepvm.memnode import MemoryNode
from tests.support.checkpoint.huge_memory import in_huge_pages, watched

MIB = 2**20
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]
COUNTS = [1, 3, 257, SMALL_BYTES // 8, SMALL_BYTES // 4, SMALL_BYTES // 2 + 1, 600_000]


@pytest.fixture
def node() -> Iterator[MemoryNode]:
    with MemoryNode(capacity_bytes=200 * MIB, block_bytes=64 * 1024) as running:
        yield running


def trained(dtype: torch.dtype) -> tuple[torch.nn.ParameterList, torch.optim.Optimizer]:
    torch.manual_seed(3)
    parameters = torch.nn.ParameterList(torch.randn(count).to(dtype) for count in COUNTS)
    return parameters, torch.optim.SGD(parameters, lr=0.5)


def step(parameters: torch.nn.ParameterList, optimizer: torch.optim.Optimizer) -> None:
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_a_step_changes_at_once_is_saved_as_it_was(node: MemoryNode, dtype: torch.dtype) -> None:
    parameters, optimizer = trained(dtype)
    truth = [parameter.detach().clone() for parameter in parameters]
    with Checkpointer(
        {"model": parameters, "optimizer": optimizer}, f"memory://{node.address}", run="a", on_error="raise"
    ) as ckpt:
        handle = ckpt.save(1)
        step(parameters, optimizer)
        handle.wait("remote", timeout_s=30)
        assert all(not torch.equal(now, was) for now, was in zip(parameters, truth, strict=True))
        assert ckpt.restore() == 1
    for found, was in zip(parameters, truth, strict=True):
        assert torch.equal(found, was)


def test_what_no_optimizer_owns_is_saved_as_it_was_whatever_its_form(node: MemoryNode) -> None:
    values = {
        "needs a gradient": torch.randn(5, requires_grad=True),
        "strided": torch.randn(6, 7).t(),
        "every other": torch.arange(20)[::2],
        "one": torch.tensor(True),
        "none": torch.empty(0, 3),
        "of eight bits": torch.randn(9).to(torch.float8_e4m3fn),
        "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
        "a parameter": torch.nn.Parameter(torch.randn(3)),
    }
    with Checkpointer(values, f"memory://{node.address}", run="a", on_error="raise") as ckpt:
        for number in (1, 2):  # the second finds the places of the first
            truth = {name: value.detach().clone() for name, value in values.items()}
            handle = ckpt.save(number)
            with torch.no_grad():
                for value in values.values():
                    value.copy_(value == 0)
            handle.wait("remote", timeout_s=30)
            assert ckpt.restore() == number
            values.update(ckpt.state)
            for name, was in truth.items():
                assert torch.equal(values[name].to(torch.complex64), was.to(torch.complex64)), name


@watched
def test_a_copy_that_fails_fails_its_save_and_not_the_step(node: MemoryNode, monkeypatch: pytest.MonkeyPatch) -> None:
    stepped, hand_over = threading.Event(), Snapshot.hand_over

    def refuse(*_: object) -> int:
        raise RuntimeError("no copy today")

    def hand_over_later(*arguments: Any) -> int:
        assert stepped.wait(30)
        return hand_over(*arguments)

    parameters = torch.nn.ParameterList([in_huge_pages(1_000_000)])
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    with Checkpointer({"model": parameters, "optimizer": optimizer}, f"memory://{node.address}", run="a") as ckpt:
        with monkeypatch.context() as patched:
            patched.setattr(LiveTensors, "copy_chunks", refuse)
            patched.setattr(Snapshot, "hand_over", hand_over_later)
            handle = ckpt.save(1)
            step(parameters, optimizer)
            stepped.set()
            with pytest.raises(CheckpointError, match="could not be copied: no copy today"):
                handle.wait("remote", timeout_s=30)
        ckpt.save(2).wait("remote", timeout_s=30)
        assert ckpt.restore() == 2


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_a_failed_job_is_raised_and_the_next_ones_are_done(threads: int) -> None:
    def fail() -> None:
        raise ValueError("one of them")

    copier, done = Copier(threads), []
    try:
        with pytest.raises(ValueError, match="one of them"):
            copier.do([fail] * 3)
        copier.do([lambda n=n: done.append(n) for n in range(100)])  # type: ignore[misc]
    finally:
        copier.close()
    assert sorted(done) == list(range(100))


def test_a_copy_after_one_that_was_interrupted_is_whole_when_it_returns() -> None:
    """Ctrl-C during a save, and then a last save: common, and nothing of it may be half."""
    main = threading.current_thread()
    taken, helping, returned = threading.Event(), threading.Event(), threading.Event()
    ended = threading.Semaphore(0)
    done: list[int] = []

    def interrupted() -> None:
        if threading.current_thread() is main:
            taken.set()
            assert helping.wait(20)
            raise KeyboardInterrupt
        helping.set()
        assert taken.wait(20)
        ended.release()

    def slow_beside(number: int) -> None:
        if threading.current_thread() is not main:
            helping.set()
            returned.wait(0.2)  # which would be too early
        assert helping.wait(20)
        done.append(number)

    copier = Copier(threads=2)
    try:
        with pytest.raises(KeyboardInterrupt):
            copier.do([interrupted] * 20)
        assert all(ended.acquire(timeout=20) for _ in range(19)), "the helper has finished its part"
        helping.clear()
        copier.do([partial(slow_beside, number) for number in range(10)])
        assert sorted(done) == list(range(10))
        returned.set()
    finally:
        copier.close()


def test_a_copy_that_does_not_end_aborts_the_save(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "COPY_S", 0.0)
    copier, begun, release = Copier(2), threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        release.wait(60)

    work = copier.start([hang])
    begun.wait(60)
    with pytest.raises(CheckpointError, match="a copy of the state did not end within 0 s: the save is aborted"):
        copier.finish(work)
    release.set()
    copier.close()


def test_tensors_are_small_below_the_limits_and_only_plain_ones() -> None:
    count = min(SMALL_COUNT, SMALL_BYTES)
    assert is_small(torch.empty(count - 1, dtype=torch.uint8)) is True
    assert is_small(torch.empty(count, dtype=torch.uint8)) is False
    assert is_small(torch.empty(SMALL_BYTES // 8 - 1, dtype=torch.float64)) is (SMALL_BYTES // 8 - 1 < SMALL_COUNT)
    assert is_small(torch.empty(SMALL_BYTES // 8, dtype=torch.float64)) is False
    assert is_small(torch.empty(1, dtype=torch.complex64)) is False
    assert is_small(torch.nn.Parameter(torch.empty(1))) is False
