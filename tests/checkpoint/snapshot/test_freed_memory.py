"""Tensors that get other memory between two saves, or during one: no address is read that is not theirs any more.

Each case runs in a process of its own, since reading freed memory ends it.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from deepvm.checkpoint import Checkpointer
from deepvm.checkpoint.buffers.guarded_copy import GuardedCopy, GuardedMove, MemoryGone
from deepvm.checkpoint.buffers.staging import Staging
from deepvm.checkpoint.buffers.write_watch import collapse
from deepvm.checkpoint.snapshot.snapshot import Snapshot
from deepvm.checkpoint.snapshot.snapshotter import Snapshotter
from tests.support.checkpoint.huge_memory import HUGE, watched
from tests.support.checkpoint.processes import Forked

MIB = 2**20
LARGE = 34 * MIB // 4  # numbers; malloc maps what is larger than 32 MiB, and unmaps it when it is freed


class Training:
    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.randn(LARGE))
        self.bias = torch.nn.Parameter(torch.randn(8))
        self.optimizer = torch.optim.SGD([self.weight, self.bias], lr=0.1)
        self.state = {"weight": self.weight, "bias": self.bias, "optimizer": self.optimizer}


def share(tensor: torch.Tensor) -> None:
    """As ``mp.Queue.put(model.state_dict())`` does in its thread."""
    tensor.share_memory_()


def resize(tensor: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    storage.resize_(2 * storage.nbytes())
    tensor.data.fill_(2.0)


def free(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


# --- between two saves ----------------------------------------------------------------------------------------------


def save_twice(store: str, move: Callable[[torch.Tensor], None], live: bool) -> None:
    work = Training()
    with Checkpointer(work.state, store=store, policy="every 1000 steps", live=live) as ckpt:
        for step in (1, 2):
            ckpt.save(step).wait("remote")
        move(work.weight)
        move(work.bias)
        ckpt.save(3).wait("remote")
    saved = work.weight.detach().clone(), work.bias.detach().clone()
    fresh = Training()
    with Checkpointer(fresh.state, store=store) as ckpt:
        assert ckpt.restore() == 3
    assert torch.equal(fresh.weight, saved[0])
    assert torch.equal(fresh.bias, saved[1])


def shared_between(store: str) -> None:
    save_twice(store, share, live=True)


def shared_between_copies(store: str) -> None:
    save_twice(store, share, live=False)


def resized_between(store: str) -> None:
    save_twice(store, resize, live=True)


def resized_between_copies(store: str) -> None:
    save_twice(store, resize, live=False)


# --- while a save reads in place ------------------------------------------------------------------------------------


def snapshot_of(work: Training) -> Snapshot:
    start = -(-work.weight.data_ptr() // HUGE) * HUGE
    assert collapse(start, (work.weight.data_ptr() + work.weight.nbytes - start) // HUGE * HUGE)
    taken = Snapshotter(lambda: MIB, lambda chunks: [1] * chunks.count, 1).take(work.state)[0]
    assert taken.bytes_in_place > LARGE
    return taken


def read_in_place(read: Callable[[Snapshot], object], move: Callable[[torch.Tensor], None] = free) -> None:
    work = Training()
    snapshot = snapshot_of(work)
    move(work.weight)
    with pytest.raises(MemoryGone, match="freed"):
        read(snapshot)
    assert snapshot.torn is not None
    assert "freed" in snapshot.torn


def hash_all(snapshot: Snapshot) -> object:
    return [snapshot.digest(chunk) for chunk in range(snapshot.chunk_map.count)]


def hashed(_: str) -> None:
    read_in_place(hash_all)


def hashed_after_sharing(_: str) -> None:
    read_in_place(hash_all, share)


def handed_over(_: str) -> None:
    def send(groups: object) -> int:
        return sum(one.bytes for one in groups)  # type: ignore[attr-defined]

    read_in_place(lambda snapshot: [snapshot.hand_over(chunk, 0, send) for chunk in range(snapshot.chunk_map.count)])


def handed_over_as_a_whole(_: str) -> None:
    read_in_place(lambda snapshot: [snapshot.whole(chunk, print) for chunk in range(snapshot.chunk_map.count)])


def frozen(_: str) -> None:
    """The optimizer steps: what is not sent yet is copied."""
    work = Training()
    snapshot = snapshot_of(work)
    free(work.weight)
    snapshot.freeze()
    assert snapshot.torn is not None
    assert "freed" in snapshot.torn


CASES = {
    "between saves": [shared_between, shared_between_copies, resized_between, resized_between_copies],
    "in place": [hashed, hashed_after_sharing, handed_over, handed_over_as_a_whole, frozen],
}


def perform(pipe: Connection, name: str, store: str) -> None:
    """In the process of a case: send what went wrong, or nothing."""
    logging.disable(logging.CRITICAL)
    try:
        next(case for cases in CASES.values() for case in cases if case.__name__ == name)(store)
    except BaseException:
        pipe.send(traceback.format_exc())
        raise
    pipe.send("")


def run(case: Callable[[str], None], tmp_path: Path) -> None:
    forked = Forked(perform, case.__name__, f"file://{tmp_path}")
    try:
        assert forked.receive(300) == ""
    except EOFError:
        forked.process.join(60)
        pytest.fail(f"the process ended with {forked.process.exitcode}")
    finally:
        forked.kill()


@pytest.mark.parametrize("case", CASES["between saves"], ids=lambda case: case.__name__)
def test_a_tensor_gets_other_memory_between_saves(case: Callable[[str], None], tmp_path: Path) -> None:
    run(case, tmp_path)


@watched
@pytest.mark.parametrize("case", CASES["in place"], ids=lambda case: case.__name__)
def test_a_tensor_gets_other_memory_while_a_save_reads_it_in_place(case: Callable[[str], None], tmp_path: Path) -> None:
    run(case, tmp_path)


# --- the copies themselves ------------------------------------------------------------------------------------------


def test_guarded_copies_gather_and_scatter() -> None:
    source, to = Staging(3 * MIB), Staging(3 * MIB)
    source.view[:] = bytes(range(256)) * (3 * MIB // 256)
    GuardedCopy([(source.address + 5, 10), (source.address + MIB, MIB)]).into(to.address)
    assert to.view[: 10 + MIB] == bytes(source.view[5:15]) + bytes(source.view[MIB : 2 * MIB])
    GuardedMove([(to.address + 7, source.address + 1, 3), (to.address, source.address + MIB, 7)])()
    assert to.view[:10] == bytes(source.view[MIB : MIB + 7]) + bytes(source.view[1:4])


def test_memory_that_is_gone_is_an_error() -> None:
    size = 1 << 20
    held = mmap.mmap(-1, size)  # kept, so that no other thread gets this address; but nobody may read it any more
    address = ctypes.addressof(ctypes.c_char.from_buffer(held))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), 0) == 0
    to = Staging(size)
    with pytest.raises(MemoryGone, match="freed"):
        GuardedCopy([(address, size)]).into(to.address)
