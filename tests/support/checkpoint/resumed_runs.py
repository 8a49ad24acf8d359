"""Runs that are killed and resumed, as real processes: every step is told to a log that outlives its process.

A run draws from every generator, shuffles, drops out, schedules, scales and accumulates; so each piece of its state
that would not come back shows in the steps after.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch.utils.data import DataLoader, TensorDataset

from deepvm.checkpoint import Checkpointer, resumable
from deepvm.checkpoint.determinism import rng_state
from deepvm.checkpoint.state.skeleton import Tensors, flatten
from deepvm.policy import EverySteps
from tests.support.checkpoint.processes import PATIENCE_S, template
from tests.support.waiting import wait_until

SAMPLES, BATCH = 40, 4
GENERATORS = ("python", "numpy", "torch")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What kind of run it is. Two with the same plan are the same run."""

    workers: int = 0
    ranks: int = 1
    optimizer: str = "AdamW"
    accumulate: int = 1
    steps: int = 24

    def __str__(self) -> str:
        return f"{self.ranks} ranks, {self.workers} workers, {self.optimizer}, accumulate {self.accumulate}"


class Job:
    """One rank's training."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        random.seed(5), np.random.seed(5), torch.manual_seed(5)
        model = torch.nn.Sequential(
            torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Dropout(0.3), torch.nn.Linear(12, 1)
        )
        options: dict[str, Any] = {"momentum": 0.9} if plan.optimizer == "SGD" else {}
        self.optimizer = getattr(torch.optim, plan.optimizer)(model.parameters(), lr=0.02, **options)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.8)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
        features = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
        data = TensorDataset(torch.arange(SAMPLES), features)
        context = "fork" if plan.workers else None  # in a fork of the template, a forkserver is what Python would take
        loader = DataLoader(data, BATCH, shuffle=True, num_workers=plan.workers, multiprocessing_context=context)
        self.loader = resumable(loader, seed=3)
        self.model = torch.nn.parallel.DistributedDataParallel(model) if plan.ranks > 1 else model
        self.state: dict[str, Any] = {
            "model": model, "optimizer": self.optimizer, "schedule": self.schedule, "scaler": self.scaler,
            "loader": self.loader,
        }  # fmt: skip
        rank = dist.get_rank() if plan.ranks > 1 else 0
        random.seed(50 + rank), np.random.seed(50 + rank), torch.manual_seed(50 + rank)

    def train(self, ckpt: Checkpointer, step: int, tell: Any, pace_s: float) -> None:
        data: list[int] = []
        losses: list[str] = []
        while step < self.plan.steps:
            for numbers, features in self.loader:
                data += numbers.tolist()
                losses.append(self._micro_step(features).hex())
                if len(losses) < self.plan.accumulate:
                    continue
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.schedule.step()
                self.optimizer.zero_grad()
                step += 1
                tell(step=step, losses=losses, data=data)
                data, losses = [], []
                handle = ckpt.step(step)
                if handle is not None:
                    tell(saved=handle.step, state=handle.state)
                time.sleep(pace_s)
                if step == self.plan.steps:
                    break

    def _micro_step(self, features: torch.Tensor) -> float:
        noisy = features * (1 + random.random()) + float(np.random.normal())
        loss = (self.model(noisy) - features.sum(1, keepdim=True)).square().mean() / self.plan.accumulate
        self.scaler.scale(loss).backward()
        return float(loss.item())

    def digest(self) -> str:
        """A hash of all of it: weights, optimizer, schedule, scaler, position in the data, generators."""
        tensors = Tensors()
        parts = {name: part.state_dict() for name, part in self.state.items()} | {"generators": rng_state.take()}
        skeleton = json.dumps(flatten(parts, "all", tensors))
        digest = xxhash.xxh3_128(skeleton.encode())
        for tensor in tensors.values():
            digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()


# --- a process ----------------------------------------------------------------------------------------------------


def _append(path: str, line: dict[str, Any]) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, json.dumps(line).encode() + b"\n")
    os.close(fd)


def _rank(rank: int, plan: Plan, options: dict[str, Any]) -> None:
    os.setsid()  # so that it is killed with its workers
    torch.set_num_threads(1)
    log = f"{options['log']}.{rank}"
    try:
        if plan.ranks > 1:
            dist.init_process_group(
                "gloo", init_method=f"file://{options['meeting']}", rank=rank, world_size=plan.ranks,
                timeout=timedelta(seconds=60),
            )  # fmt: skip
        _run(plan, options, lambda **line: _append(log, line))
    except Exception as error:  # another rank was killed before this one
        _append(log, {"failed": f"{type(error).__name__}: {error}"})
        os._exit(1)
    os._exit(0)


def _run(plan: Plan, options: dict[str, Any], tell: Any) -> None:
    job, left_out = Job(plan), options["leave_out"]
    state = {name: part for name, part in job.state.items() if name != left_out}
    policy = EverySteps(options["every"])
    on_busy = "skip" if options["every"] == 1 else "wait"
    with Checkpointer(state, options["url"], run=options["run"], policy=policy, on_busy=on_busy) as ckpt:
        before = rng_state.take()
        step = ckpt.restore(options["from_step"], lazy=options["lazy"])
        if left_out in GENERATORS:
            rng_state.put({**rng_state.take(), left_out: before[left_out]})
        tell(restored=step, drift=ckpt.status().drift)
        job.train(ckpt, step or 0, tell, options["pace_s"])
        tell(digest=job.digest())


class Session:
    """All ranks of a run, from their start to their end or their death."""

    def __init__(self, plan: Plan, directory: Path, **options: Any) -> None:
        self._log = directory / f"log-{time.monotonic_ns()}"
        meeting = f"{self._log}.meeting"
        plain = {
            "log": str(self._log),
            "meeting": meeting,
            "leave_out": "",
            "from_step": None,
            "every": 1,
            "pace_s": 0.0,
            "lazy": False,
        }
        self._plan = plan
        self._processes = [
            template.Process(target=_rank, args=(rank, plan, plain | options)) for rank in range(plan.ranks)
        ]
        for process in self._processes:
            process.start()

    def logged(self, rank: int = 0) -> list[dict[str, Any]]:
        path = Path(f"{self._log}.{rank}")
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for(self, step: int) -> None:
        """Until some rank has made that step, or all have ended."""
        wait_until(
            lambda: (
                any(line.get("step", -1) >= step for line in self.logged())
                or not any(process.is_alive() for process in self._processes)
            ),
            f"step {step}",
        )

    def finish(self) -> Story:
        """Until it has ended by itself."""
        try:
            for process in self._processes:
                process.join(PATIENCE_S)
            for rank in range(self._plan.ranks):
                problem = [line["failed"] for line in self.logged(rank) if "failed" in line]
                assert not problem, problem
        finally:
            self.kill()
        return self.story()

    def kill(self, apart_s: float = 0.0) -> Story:
        """kill -9, for every process of every rank; the ranks one after another, in an order of chance."""
        for process in random.sample(self._processes, len(self._processes)):
            if process.is_alive():  # else its number may belong to another test's process
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
            time.sleep(apart_s)
        for process in self._processes:
            process.join(PATIENCE_S)
        return self.story()

    def story(self) -> Story:
        found = Story(ranks=self._plan.ranks)
        for rank in range(self._plan.ranks):
            for line in self.logged(rank):
                if "step" in line:
                    found.steps[rank, line["step"]] = (line["losses"], line["data"])
                elif "digest" in line:
                    found.digests[rank] = line["digest"]
                elif "restored" in line:
                    found.restored[rank], found.drift[rank] = line["restored"], line["drift"]
        return found


@dataclass
class Story:
    """What a session did: losses and samples of every step, and a hash of the end."""

    ranks: int
    steps: dict[tuple[int, int], Any] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    restored: dict[int, int | None] = field(default_factory=dict)
    drift: dict[int, Any] = field(default_factory=dict)

    def differs_from(self, truth: Story) -> str | None:
        """What is not as in the undisturbed run."""
        for key, found in sorted(self.steps.items()):
            if found != truth.steps[key]:
                return f"rank {key[0]}, step {key[1]}: {found}, undisturbed {truth.steps[key]}"
        for rank, digest in self.digests.items():
            if digest != truth.digests[rank]:
                return f"rank {rank}: the state at the end is another one"
        return None
