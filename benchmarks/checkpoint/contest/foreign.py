"""Peers in environments of their own, each used as its documentation says, with what it offers on CPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.checkpoint.contest import Times
from benchmarks.checkpoint.contest.simple import fsync
from benchmarks.common.workloads import State

DEADLINE_S = 120


class TorchCheckpointing:
    """Meta's torch_checkpointing: asynchronous staging, a writing process; no pinned memory without a GPU."""

    def __init__(self, state: State, scratch: Path, options: dict[str, Any]) -> None:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        del options
        staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
        saver = AsyncCheckpointSaverConfig(staging_config=staging, wait_timeout_secs=DEADLINE_S)
        storage = LocalFileSystemStorageConfig(use_direct_io=False)  # its default fails on torch.save's pieces (EINVAL)
        self._manager = CheckpointManager(CheckpointManager.Config(save=saver, storage_config=storage))
        self._state = state
        self._scratch = scratch

    def save(self, step: int) -> Times:
        folder = self._scratch / f"step-{step}"
        start = time.perf_counter()
        pending = self._manager.save(str(folder), self._state.state_dict())
        called = time.perf_counter() - start
        with self._manager.lock():  # what its users wrap the optimizer's step in
            staged = time.perf_counter() - start
        pending.result(timeout=DEADLINE_S)
        fsync(folder)  # it does not do so itself
        durable = time.perf_counter() - start
        shutil.rmtree(folder)
        return {"at_once": staged, "long_step": called, "durable": durable}

    def close(self) -> None:
        self._manager.close()


class TorchSnapshot:
    def __init__(self, state: State, scratch: Path, options: dict[str, Any]) -> None:
        import torchsnapshot

        del options
        self._snapshot = torchsnapshot.Snapshot
        self._app_state = {"model": state.model, "optimizer": state.optimizer}
        self._scratch = scratch

    def save(self, step: int) -> Times:
        folder = self._scratch / f"step-{step}"
        start = time.perf_counter()
        pending = self._snapshot.async_take(str(folder), self._app_state)
        blocked = time.perf_counter() - start
        pending.wait()
        fsync(folder)  # it does not do so itself
        durable = time.perf_counter() - start
        shutil.rmtree(folder)
        return {"at_once": blocked, "long_step": blocked, "durable": durable}

    def close(self) -> None: ...


class DLRover:
    """Flash checkpoint: into shared memory of this machine, from which another process writes the file."""

    def __init__(self, state: State, scratch: Path, options: dict[str, Any]) -> None:
        del options
        os.environ.setdefault("DLROVER_LOG_LEVEL", "ERROR")
        os.environ["ELASTIC_JOB_NAME"] = f"bench-{os.getpid()}"  # its sockets' names; those of a dead process linger
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

        self._state = state
        self._folder = scratch / "dlrover"
        self._folder.mkdir(exist_ok=True)
        self._checkpointer = DdpCheckpointer(str(self._folder))
        self._tracker = self._folder / "dlrover_latest.txt"

    def save(self, step: int) -> Times:
        start = time.perf_counter()
        self._checkpointer.save_checkpoint(step, self._state.state_dict())
        blocked = time.perf_counter() - start
        deadline = start + DEADLINE_S
        while not (self._tracker.exists() and self._tracker.read_text().strip() == str(step)):
            if time.perf_counter() > deadline:
                raise TimeoutError(f"DLRover's saver wrote nothing within {DEADLINE_S} s")
            time.sleep(0.002)
        fsync(self._folder)  # it does not do so itself
        durable = time.perf_counter() - start
        shutil.rmtree(self._folder / str(step), ignore_errors=True)
        time.sleep(0.2)  # its lock on the shared memory, without which the next save is skipped, is released late
        return {"at_once": blocked, "long_step": blocked, "durable": durable}

    def close(self) -> None:
        self._checkpointer._engine.close()
        self._checkpointer._engine.saver_proc.terminate()


class LMResiliency:
    """GEMINI's in-memory checkpoints, replicated to the memory of one other rank over Gloo. That rank has next to no
    state itself, so that bytes flow one way, as in the others."""

    def __init__(self, state: State, scratch: Path, options: dict[str, Any]) -> None:
        del options
        self._store = scratch / "rendezvous"
        self._peer = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, "lm-resiliency", str(scratch)], stdin=subprocess.PIPE
        )
        self._manager = _gemini(0, scratch)
        self._tensors = list(state.tensors().values())
        self._scratch = scratch

    def save(self, step: int) -> Times:
        assert self._peer.stdin is not None
        self._peer.stdin.write(b"%d\n" % step)
        self._peer.stdin.flush()
        start = time.perf_counter()
        self._manager.save_tensors(self._tensors, step)
        blocked = time.perf_counter() - start
        if not self._manager.finalize_replication(timeout_s=DEADLINE_S):
            raise RuntimeError("the replication failed")
        remote = time.perf_counter() - start
        self._manager.flush_to_disk(step)
        self._manager._disk.wait()  # it has no public way to wait for its disk
        durable = time.perf_counter() - start
        shutil.rmtree(self._manager._disk._folder, ignore_errors=True)
        return {"at_once": blocked, "long_step": blocked, "remote": remote, "durable": durable}

    def close(self) -> None:
        assert self._peer.stdin is not None
        self._peer.stdin.close()
        self._peer.kill()
        self._peer.wait(timeout=10)


def _gemini(rank: int, scratch: Path) -> Any:
    import torch.distributed as dist
    from lm_resiliency.checkpointing import InMemoryCheckpointManager, InMemoryCkptConfig

    store = dist.FileStore(str(scratch / "rendezvous"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=DEADLINE_S))
    config = InMemoryCkptConfig(
        interval=1, disk_flush_interval=0, disk_folder=str(scratch / f"disk-{rank}"), run_id="bench", pin_memory=False
    )
    return InMemoryCheckpointManager(config)


def _lm_resiliency_peer(scratch: Path) -> None:
    import torch

    manager = _gemini(1, scratch)
    for line in sys.stdin:
        manager.save_tensors([torch.zeros(1)], int(line))
        manager.finalize_replication(timeout_s=DEADLINE_S)


class TorchFT:
    """The HTTP transport: another process fetches; training waits until it has, since the live tensors are read."""

    def __init__(self, state: State, scratch: Path, options: dict[str, Any]) -> None:
        from torchft.checkpointing.http_transport import HTTPTransport

        del scratch, options
        self._timeout = timedelta(seconds=DEADLINE_S)
        self._transport = HTTPTransport(self._timeout, num_chunks=2)
        self._state = state
        self._peer = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, "torchft", self._transport.metadata()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._peer.stdout is not None
        self._peer.stdout.readline()

    def save(self, step: int) -> Times:
        assert self._peer.stdin is not None
        assert self._peer.stdout is not None
        start = time.perf_counter()
        self._transport.send_checkpoint([1], step, self._state.state_dict(), self._timeout)
        self._peer.stdin.write(b"%d\n" % step)
        self._peer.stdin.flush()
        if not self._peer.stdout.readline():
            raise RuntimeError("the receiver ended")
        self._transport.disallow_checkpoint()  # its way to wait until the state may change again
        taken = time.perf_counter() - start
        return {"at_once": taken, "long_step": taken, "remote": taken}

    def close(self) -> None:
        self._peer.kill()
        self._peer.wait(timeout=10)


def _torchft_peer(address: str) -> None:
    from torchft.checkpointing.http_transport import HTTPTransport

    timeout = timedelta(seconds=DEADLINE_S)
    transport: Any = HTTPTransport(timeout, num_chunks=2)
    print("ready", flush=True)
    received = None  # kept until the next one is there, as a replica would be
    for line in sys.stdin:
        received = transport.recv_checkpoint(0, address, int(line), timeout)
        print(len(received), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "torchft":
        _torchft_peer(sys.argv[2])
    else:
        _lm_resiliency_peer(Path(sys.argv[2]))
