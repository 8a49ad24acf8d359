"""Fine-tuning: a frozen base model, the same for every run, and an adapter of the run's own."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from typing import Any

import torch

from deepvm.checkpoint import Checkpointer

WIDTH = 600


class Tuned:
    def __init__(self, seed: int, rank: int = 24) -> None:
        torch.manual_seed(0)
        self.base = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH, bias=False))
        self.base.requires_grad_(False)
        torch.manual_seed(seed)
        self.adapter = torch.nn.Sequential(torch.nn.Linear(WIDTH, rank), torch.nn.Linear(rank, WIDTH))
        self.optimizer = torch.optim.AdamW(self.adapter.parameters(), lr=1e-3, foreach=True)

    @property
    def state(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "adapter": self.adapter, "base": self.base}

    @property
    def base_bytes(self) -> int:
        return sum(p.numel() * 4 for p in self.base.parameters())

    @property
    def own_bytes(self) -> int:
        return 3 * sum(p.numel() * 4 for p in self.adapter.parameters())

    def step(self) -> None:
        self.optimizer.zero_grad()
        x = torch.randn(2, WIDTH)
        (self.base(x) + self.adapter(x)).square().mean().backward()
        self.optimizer.step()

    def bytes(self) -> list[torch.Tensor]:
        """All of it, to compare with later."""
        modules = [*self.base.state_dict().values(), *self.adapter.state_dict().values()]
        states = [value for of_one in self.optimizer.state.values() for value in of_one.values()]
        return [value.clone() for value in (*modules, *states)]


def tune(pipe: Connection, url: str, run: str) -> None:
    """Restore, then train and save at every step, until killed."""
    torch.set_num_threads(1)
    tuned = Tuned(seed=7)
    tuned.step()
    ckpt = Checkpointer(tuned.state, url, run=run)
    pipe.send(ckpt.restore())
    step = 0
    while os.getppid() != 1:
        tuned.step()
        step += 1
        ckpt.save(step)
