"""Datasets, and what processes do with them: read, train, save, until they are done or killed."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import random
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from deepvm.checkpoint import Checkpointer, ResumableLoader, ResumableSampler, per_sample_seed, resumable
from tests.support.checkpoint.processes import _append

Result = dict[str, Any]
# In a process of the template, workers would come from a template of their own, with torch to import.
FORKED: tuple[dict[str, Any], ...] = ({}, {"multiprocessing_context": "fork"})


class Numbers(Dataset[int]):
    """Sample i is i."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return index


class Augmented(Numbers):
    """Sample i, and what each generator gave for it."""

    def __getitem__(self, index: int) -> torch.Tensor:  # type: ignore[override]
        chance = [random.random(), float(np.random.random()), float(torch.rand(()))]
        return torch.tensor([float(index), *chance], dtype=torch.float64)


class Stateful(DataLoader[int]):
    """A loader with a state of its own, on every rank another, with a tensor and an array in it."""

    def __init__(self, rank: int) -> None:
        super().__init__(Numbers(3))
        self.state: dict[str, Any] = {
            "generator": torch.full((5056,), rank, dtype=torch.uint8),
            "weights": np.arange(3) + rank,
            "none": torch.empty(0, 2),
            "complex": torch.tensor([1 + 2j]).conj() * rank,
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


# --- what ranks do ------------------------------------------------------------------------------------------------


def train_some(rank: int, url: str, samples: int, batch_size: int, steps: int | None, workers: int) -> Result:
    """Train with DDP for some steps, save, and take one more that nobody will know of; or train to the epoch's end."""
    mp.current_process().daemon = False  # one that is may have no workers
    dataset = Numbers(samples)
    sampler = ResumableSampler(dataset, batch_size, seed=11)
    loader = resumable(DataLoader(dataset, batch_sampler=sampler, num_workers=workers, **FORKED[workers > 0]))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    seen: list[list[int]] = []
    with Checkpointer({"model": model.module, "optimizer": optimizer, "loader": loader}, url) as ckpt:
        step = ckpt.restore() or 0
        told = {"restored": step, "consumed": loader.consumed, "left": loader.batches_left}
        for batch in loader:
            optimizer.zero_grad()
            model(batch[:, None].float()).mean().backward()
            optimizer.step()
            if steps is not None and len(seen) == steps:
                break  # this batch came after the save: it is lost
            seen.append(batch.tolist())
            step += 1
            if steps is not None and len(seen) == steps:
                ckpt.save(step).wait("remote", 40)
    return {**told, "seen": seen, "epoch": loader.epoch}


def save_stateful(rank: int, url: str) -> Result:
    with Checkpointer({"model": torch.nn.Linear(2, 2), "loader": Stateful(rank + 1)}, url) as ckpt:
        ckpt.save(1).wait("remote", 40)
    return {}


def restore_stateful(rank: int, url: str) -> Result:
    loader = Stateful(99)
    with Checkpointer({"model": torch.nn.Linear(2, 2), "loader": loader}, url) as ckpt:
        ckpt.restore()
    return {name: (str(value.dtype), list(value.shape), value.tolist()) for name, value in loader.state.items()}


# --- a trainer that is killed -------------------------------------------------------------------------------------


def augmented_loader(samples: int, workers: int, **options: Any) -> ResumableLoader:
    dataset = per_sample_seed(Augmented(samples), seed=5)
    return resumable(DataLoader(dataset, 4, shuffle=True, num_workers=workers, **options), seed=6)


def read_until_killed(pipe: Connection, url: str, log: str, samples: int, epochs: int, workers: int) -> None:
    """Go on where the newest checkpoint is; write down every batch as a line, and save after each."""
    mp.current_process().daemon = False
    torch.set_num_threads(1)
    model = torch.nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = augmented_loader(samples, workers, persistent_workers=workers > 0, **FORKED[workers > 0])
    ckpt = Checkpointer({"model": model, "optimizer": optimizer, "loader": loader}, url, on_busy="wait")
    step = ckpt.restore() or 0
    pipe.send(step)
    for epoch in range(loader.epoch, epochs):
        for batch in loader:
            optimizer.zero_grad()
            model(batch).mean().backward()
            optimizer.step()
            step += 1
            _append(log, step=step, epoch=epoch, batch=batch.tolist())
            ckpt.save(step)
            if os.getppid() == 1:
                return
    ckpt.close()
    pipe.send("done")


def lines_of(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def children_of(pid: int) -> list[int]:
    return [int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()]
