"""What each rank of a real group of processes does in the tests of sharded checkpoints."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from deepvm.checkpoint.dcp import DeepvmReader, DeepvmWriter
from tests.support.checkpoint.processes import template

RANKS_S = 60.0
OBJECTS = {"seen": 12345, "name": "ünï", "nan": float("inf"), "when": (1, 2.5, None), "blob": b"\x00\xff"}


def run_ranks(work: Callable[..., None], world_size: int, folder: Path, *arguments: Any) -> list[int | None]:
    """Run ``work(rank, world_size, folder, ...)`` in processes that share a gloo group; their exit codes."""
    meeting = folder / f"meeting-{os.urandom(4).hex()}"
    ranks = [
        template.Process(target=_rank, args=(work, rank, world_size, folder, meeting, *arguments))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(RANKS_S)
        if process.exitcode is None:
            process.kill()
            process.join()
    return [process.exitcode for process in ranks]


def _rank(work: Callable[..., None], rank: int, world_size: int, folder: Path, meeting: Path, *arguments: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(meeting), world_size), rank=rank, world_size=world_size)
    try:
        work(rank, world_size, folder, *arguments)
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        (folder / f"failed-{rank}.txt").write_text(traceback.format_exc())
        os._exit(1)
    dist.destroy_process_group()


class Sharded:
    """A model whose parameters FSDP2 shards over the ranks, unevenly; and one cut along columns, as in a linear layer
    of tensor parallelism."""

    def __init__(self, world_size: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.mesh = init_device_mesh("cpu", (world_size,))
        self.model = torch.nn.Sequential(
            torch.nn.Linear(530, 701), torch.nn.Linear(701, 900, dtype=torch.float32), torch.nn.Linear(900, 2)
        )
        for layer in self.model:
            fully_shard(layer, mesh=self.mesh)
        fully_shard(self.model, mesh=self.mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.columns = distribute_tensor(torch.randn(300, 1001).bfloat16(), self.mesh, [Shard(1)])
        self.copied = distribute_tensor(torch.randn(7, dtype=torch.complex64), self.mesh, [Replicate()])

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(3, 530)).square().sum().backward()
            self.optimizer.step()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "columns": self.columns, "copied": self.copied, **OBJECTS}

    def full(self) -> dict[str, Any]:
        """The whole state, on rank 0 and plain: what is compared."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=False)
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        return {
            "model": model,
            "optimizer": optimizer,
            "columns": self.columns.full_tensor(),
            "copied": self.copied.full_tensor(),
        }


def keep_truth(rank: int, path: Path, sharded: Sharded) -> None:
    full = sharded.full()
    if rank == 0:
        torch.save(full, path)


def save_on_ranks(rank: int, world_size: int, folder: Path, url: str) -> None:
    """Steps 1 (plainly), 2 (asynchronously), 3 and 4 (one writer, a planner that caches)."""
    sharded = Sharded(world_size, seed=1)
    sharded.train()
    keep_truth(rank, folder / "truth-1.pt", sharded)
    dcp.save(sharded.state(), storage_writer=DeepvmWriter(url, run="sharded", step=1))
    sharded.train()
    keep_truth(rank, folder / "truth-2.pt", sharded)
    future = dcp.async_save(sharded.state(), storage_writer=DeepvmWriter(url, run="async", step=2))
    with torch.no_grad():
        for parameter in sharded.model.parameters():
            parameter.add_(1.0)  # while the staged copy is sent
    future.result(RANKS_S)
    keep_truth(rank, folder / "truth-4.pt", sharded)
    writer = DeepvmWriter(url, run="cached")
    for step in (3, 4):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(sharded.state(), storage_writer=writer, planner=planner, checkpoint_id=f"run/step-{step}")


def load_on_ranks(rank: int, world_size: int, folder: Path, url: str, run: str, name: str) -> None:
    sharded = Sharded(world_size, seed=99)
    state = {**sharded.state(), **dict.fromkeys(OBJECTS)}
    reader = DeepvmReader(url, run=run)
    dcp.load(state, storage_reader=reader)
    set_state_dict(
        sharded.model, sharded.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    assert {key: state[key] for key in OBJECTS} == OBJECTS
    assert isinstance(state["columns"], DTensor)
    keep_truth(rank, folder / name, sharded)
    (folder / f"{name}.read-{rank}").write_text(str(reader.bytes_read))


class Dying(DeepvmWriter):
    """Its coordinator is killed when every byte has arrived, and nothing is committed yet."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def die_before_the_end(rank: int, world_size: int, folder: Path, url: str) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    state = {"weight": distribute_tensor(torch.ones(100, 10), mesh, [Shard(0)])}
    dcp.save(state, storage_writer=DeepvmWriter(url, run="dying", step=1))
    dcp.save(state, storage_writer=Dying(url, run="dying", step=2))


def save_into_files(rank: int, world_size: int, folder: Path) -> None:
    try:
        dcp.save({"x": torch.ones(3)}, storage_writer=DeepvmWriter(folder / "store", run="files", step=1))
    except dcp.CheckpointException as error:
        assert "save into memory://" in str(error), error  # noqa: PT017
    else:
        raise AssertionError("several ranks wrote one file")
