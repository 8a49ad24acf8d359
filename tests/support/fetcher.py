"""Fetchers as real processes, and something small to train, save and compare."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import xxhash

from deepvm.checkpoint import Checkpointer
from deepvm.fetch import segment_files
from deepvm.fetch.segment_reader import SegmentReader, find_segment
from tests.support.waiting import wait_until

MIB = 2**20
BLOCK = 2**16
PATIENCE_S = 30.0


class Fetcher:
    """``python -m deepvm.fetch``, which is what ``deepvm-fetch`` starts."""

    def __init__(self, run: str, *words: str, token: str | None = None) -> None:
        self.path = segment_files.default_path(run)
        if "--into" in words:
            self.path = Path(words[words.index("--into") + 1])
        environment = {name: value for name, value in os.environ.items() if not name.startswith("DEEPVM_")}
        if token is not None:
            environment["DEEPVM_TOKEN"] = token
        self.process = subprocess.Popen(
            [sys.executable, "-m", "deepvm.fetch", "--run", run, "--json", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
        )

    def result(self) -> dict[str, Any]:
        """What it prints once the checkpoint is there."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.end()[1]
        return dict(json.loads(line))

    def end(self) -> tuple[int, str]:
        """Its exit code, and what it said on the way."""
        _, said = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, said

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=PATIENCE_S)


def opened(run: str) -> SegmentReader:
    """The segment of a run, as soon as its fetcher has chosen."""
    found: list[SegmentReader] = []

    def look() -> bool:
        segment_now = find_segment(run)
        if segment_now is not None:
            found.append(segment_now)
        return bool(found)

    wait_until(look, "a segment")
    return found[0]


class Work:
    """Half a megabyte of state in the making."""

    def __init__(self, seed: int = 0, width: int = 160) -> None:
        torch.manual_seed(seed)
        self.width = width
        self.model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Linear(width, width))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2, foreach=True)

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(2, self.width)).square().mean().backward()
        self.optimizer.step()

    def digest(self) -> str:
        digest = xxhash.xxh3_128()
        values = [*self.model.state_dict().values()]
        for state in self.optimizer.state_dict()["state"].values():
            values += [state[name] for name in sorted(state)]
        for value in values:
            digest.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()


def save(url: Any, run: str, *steps: int, seed: int = 0, durable: bool = False) -> dict[int, str]:
    """Train and save at each of these steps; what there was to be restored at each."""
    work, truth = Work(seed), {}
    with Checkpointer(work.state, url, run=run, on_error="raise") as ckpt:
        for step in steps:
            work.step()
            truth[step] = work.digest()
            ckpt.save(step).wait("durable" if durable else "remote", PATIENCE_S)
    return truth


def restore(url: Any, run: str, step: int | None = None) -> tuple[int | None, str]:
    """What a new trainer restores."""
    work = Work(seed=99)
    with Checkpointer(work.state, url, run=run) as ckpt:
        return ckpt.restore(step), work.digest()
