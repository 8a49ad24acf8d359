"""State on a GPU, with a thread in the GPU's place; and with a real one where there is one."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from deepvm.checkpoint import Checkpointer
from deepvm.checkpoint.snapshot import device
from deepvm.checkpoint.snapshot.device import Cuda, Device, DeviceCopies
from deepvm.errors import CheckpointError
from deepvm.memnode import MemoryNode
from tests.support.checkpoint.thread_device import ThreadDevice
from tests.support.waiting import wait_until

MIB = 2**20


@pytest.fixture
def node() -> Iterator[MemoryNode]:
    with MemoryNode(listen="127.0.0.1:0", capacity_bytes=256 * MIB, block_bytes=MIB) as running:
        yield running


@pytest.fixture
def gpu() -> Iterator[ThreadDevice]:
    made = ThreadDevice()
    yield made
    made.close()


class Training:
    """A layer that an optimizer owns, and a buffer that it does not; both, and the optimizer's state, on the device."""

    def __init__(self, width: int = 700) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.width = width
        self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, self.width)).square().sum().backward()
        self.optimizer.step()

    def tensors(self) -> list[torch.Tensor]:
        state = [v for values in self.optimizer.state.values() for v in values.values()]
        return [*self.model.parameters(), *self.model.buffers(), *state]

    def truth(self) -> dict[str, Any]:
        return copy.deepcopy({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})

    def checkpointer(self, url: str, gpu: Device | None = None) -> Checkpointer:
        made = Checkpointer({"model": self.model, "optimizer": self.optimizer}, url)
        if gpu is not None:
            made._snapshotter.device_copies = DeviceCopies(gpu)
        return made


def equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left.cpu(), right.cpu())
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(equal(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right)


def restored(url: str) -> dict[str, Any]:
    fresh = Training()
    with fresh.checkpointer(url) as ckpt:
        ckpt.restore()
        return fresh.truth()


def test_the_optimizer_waits_for_slow_copies_and_what_is_saved_is_what_was(node: MemoryNode, gpu: ThreadDevice) -> None:
    url, training = f"memory://{node.address}", Training()
    gpu.owns(*training.tensors())
    with training.checkpointer(url, gpu) as ckpt:
        for step in range(3):
            truth = training.truth()
            gpu.copy_s = 0.02
            handle = ckpt.save(step)
            training.step()  # changes buffers in the forward pass, and everything else in the optimizer's step
            handle.wait("remote", 20)
            assert equal(restored(url), truth)
    assert gpu.calls.count("register") == 1  # once, not at every save
    assert gpu.registered == {}  # and let go at the end


def test_a_save_returns_before_anything_is_copied(node: MemoryNode, gpu: ThreadDevice) -> None:
    url, training = f"memory://{node.address}", Training()
    gpu.owns(*training.model.parameters(), *[v for s in training.optimizer.state.values() for v in s.values()])
    truth = training.truth()
    with training.checkpointer(url, gpu) as ckpt:
        gpu.open.clear()
        handle = ckpt.save(0)
        wait_until(lambda: "copy" in gpu.calls, "a copy that is asked for")
        assert handle.state == "taken"
        gpu.open.set()
        handle.wait("remote", 20)
        assert "hold" not in gpu.calls  # everything had left before the optimizer asked
        assert equal(restored(url), truth)


def test_what_no_optimizer_owns_is_waited_for_at_once(node: MemoryNode, gpu: ThreadDevice) -> None:
    url, training = f"memory://{node.address}", Training()
    gpu.owns(*training.tensors())
    with training.checkpointer(url, gpu) as ckpt:
        ckpt.save(0).wait("remote", 20)
        first_hold = gpu.calls.index("hold")
        assert gpu.calls[first_hold - 3 : first_hold] == ["copy"] * 3  # the buffers of the batch norm
        assert gpu.calls[first_hold + 1 :].count("copy") == len(training.tensors()) - 3


def test_a_change_other_than_by_the_optimizer_tears_no_checkpoint(node: MemoryNode, gpu: ThreadDevice) -> None:
    url, training = f"memory://{node.address}", Training()
    gpu.owns(*training.tensors())
    with training.checkpointer(url, gpu) as ckpt:
        ckpt.save(0).wait("remote", 20)
        gpu.copy_s = 0.02
        handle = ckpt.save(1)
        with torch.no_grad():
            training.model[0].weight.mul_(2)
        with pytest.raises(CheckpointError, match="changed in place"):
            handle.wait("remote", 20)
        assert ckpt.restore() == 0


@pytest.mark.parametrize("way", ["settle", "live=False"])
def test_copies_that_were_waited_for_are_not_torn_by_writes_that_torch_does_not_see(
    node: MemoryNode, gpu: ThreadDevice, way: str
) -> None:
    url, training = f"memory://{node.address}", Training()
    gpu.owns(*training.tensors())
    state = {"model": training.model, "optimizer": training.optimizer}
    with Checkpointer(state, url, live=way != "live=False") as ckpt:
        ckpt._snapshotter.device_copies = DeviceCopies(gpu)
        gpu.copy_s = 0.02
        truth = training.truth()
        handle = ckpt.save(0)
        if way == "settle":
            ckpt.settle()
        for parameter in training.model.parameters():
            parameter.data.mul_(2)
        handle.wait("remote", 20)
        assert equal(restored(url), truth)


def test_a_chunk_leaves_when_its_own_group_has_arrived(
    node: MemoryNode, gpu: ThreadDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "GROUP_BYTES", 2 * MIB)
    large = torch.randn(5 * MIB // 4 * 2)  # 10 MiB: in five groups, though it is one tensor
    gpu.owns(large)
    model = torch.nn.ParameterList([torch.nn.Parameter(large)])
    optimizer = torch.optim.SGD(model.parameters())
    gpu.owns(*model.parameters())
    with Checkpointer({"model": model, "optimizer": optimizer}, f"memory://{node.address}") as ckpt:
        ckpt._snapshotter.device_copies = DeviceCopies(gpu)
        gpu.copy_s = 0.2
        snapshot, _ = ckpt._snapshotter.take(ckpt.state)
        arrived: dict[int, float] = {}

        def wait_for(chunk: int) -> None:
            snapshot.wait(chunk)
            arrived[chunk] = time.monotonic()

        waiters = [threading.Thread(target=wait_for, args=(chunk,)) for chunk in (1, 9)]
        for waiter in waiters:
            waiter.start()
        for waiter in waiters:
            waiter.join(20)
        assert arrived[9] - arrived[1] > 0.4  # at least two groups later
        assert gpu.calls.count("copy") == 5


def test_growing_staging_memory_is_registered_anew(node: MemoryNode, gpu: ThreadDevice) -> None:
    holder = {"value": torch.ones(1000)}
    with Checkpointer({"holder": holder}, f"memory://{node.address}") as ckpt:
        ckpt._snapshotter.device_copies = DeviceCopies(gpu)
        for step, size in enumerate((1000, 3 * MIB)):
            holder["value"] = torch.full((size,), 3.0)
            gpu.owns(holder["value"])
            ckpt.save(step).wait("remote", 20)
            (registered,) = gpu.registered.values()
            assert registered >= 4 * size
        assert [call for call in gpu.calls if "register" in call] == ["register", "unregister", "register"]
        holder["value"] = torch.zeros(3 * MIB)
        assert ckpt.restore() == 1
        assert torch.equal(ckpt.state["holder"]["value"], torch.full((3 * MIB,), 3.0))


def test_memory_that_cannot_be_pinned_is_used_as_it_is(node: MemoryNode, caplog: pytest.LogCaptureFixture) -> None:
    gpu = ThreadDevice(can_pin=False)
    url, training = f"memory://{node.address}", Training()
    gpu.owns(*training.tensors())
    truth = training.truth()
    with caplog.at_level(logging.WARNING), training.checkpointer(url, gpu) as ckpt:
        ckpt.save(0).wait("remote", 20)
    assert "not pinned" in caplog.text
    assert equal(restored(url), truth)
    gpu.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_real_gpu_trains_on_while_its_state_is_saved(node: MemoryNode) -> None:
    url, training = f"memory://{node.address}", Training()
    training.model.cuda()
    training.optimizer = torch.optim.AdamW(training.model.parameters())

    def step() -> None:
        training.optimizer.zero_grad()
        training.model(torch.randn(4, training.width, device="cuda")).square().sum().backward()
        training.optimizer.step()

    step()
    with training.checkpointer(url, Cuda()) as ckpt:
        for number in range(5):
            truth = training.truth()
            handle = ckpt.save(number)
            step()
            handle.wait("remote", 20)
            assert equal(restored(url), truth)
