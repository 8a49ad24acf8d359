"""Trainers and memory nodes as processes that can be killed, forked within milliseconds from a template with torch
imported; and the log of what a trainer knows to be true, which outlives it."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import xxhash

from deepvm.checkpoint import Checkpointer
from deepvm.memnode import Limits, MemoryNode

MIB = 2**20
BLOCK = 256 * 1024
PATIENCE_S = 60.0

template = mp.get_context("forkserver")  # one for all tests of a run; it has no threads, so that forking is safe
template.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "deepvm.checkpoint.dcp",
        "tests.support.checkpoint.processes",
    ]
)  # the optimizers import dynamo when they are first used


class Forked:
    """A process of the template, and a pipe to it."""

    def __init__(self, target: Callable[..., None], *words: Any) -> None:
        self.pipe, theirs = mp.Pipe()
        self.process = template.Process(target=target, args=(theirs, *words), daemon=True)
        self.process.start()
        theirs.close()

    def receive(self, timeout_s: float = PATIENCE_S) -> Any:
        assert self.pipe.poll(timeout_s), f"the process said nothing in {timeout_s:g} s"
        return self.pipe.recv()

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.join(PATIENCE_S)
        self.pipe.close()


# --- memory nodes -------------------------------------------------------------------------------------------------


def _serve(pipe: Connection, fields: dict[str, Any]) -> None:
    limits = Limits(stop_s=0.0, flush_s=5.0, failure_delay_s=0.01)
    with MemoryNode(**{"capacity_bytes": 128 * MIB, "block_bytes": BLOCK, "limits": limits, **fields}) as node:
        pipe.send(node.address)
        while os.getppid() != 1 and not pipe.poll(1):
            pass


class Node:
    """A memory node that can be killed and started again at the same address."""

    def __init__(self, **fields: Any) -> None:
        self._fields = fields
        self.address = ""
        self.start()

    def start(self) -> None:
        self._forked = Forked(_serve, {**self._fields, "listen": self.address or "127.0.0.1:0"})
        self.address = self._forked.receive()

    @property
    def pid(self) -> int:
        assert self._forked.process.pid is not None
        return self._forked.process.pid

    def kill(self) -> None:
        self._forked.kill()


@contextmanager
def nodes(count: int, **fields: Any) -> Iterator[list[Node]]:
    started: list[Node] = []
    try:
        for _ in range(count):
            started.append(Node(**fields))
        yield started
    finally:
        for node in started:
            node.kill()


def url_of(started: list[Node], **options: Any) -> str:
    query = "&".join(f"{name}={value}" for name, value in options.items())
    return f"memory://{','.join(node.address for node in started)}" + (f"?{query}" if query else "")


# --- trainers -----------------------------------------------------------------------------------------------------


class Work:
    """About 20 MB: a model, Adam, buffers that change in the forward pass, and who saved it."""

    def __init__(self, width: int = 740) -> None:
        torch.manual_seed(0)
        self.width = width
        self.model = torch.nn.Sequential(
            torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, width),
            torch.nn.Tanh(), torch.nn.Linear(width, width),
        )  # fmt: skip
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3, foreach=True)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "name": ""}

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(2, self.width)).square().mean().backward()
        self.optimizer.step()


def digest_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, name: str) -> str:
    """A hash of all of it, by name, type, shape and byte."""
    digest = xxhash.xxh3_128(name.encode())

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
            digest.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
        elif isinstance(value, dict):
            for key in value:
                digest.update(str(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            for item in value:
                add(item)
        else:
            digest.update(repr(value).encode())

    add(dict(model.state_dict()))
    add(optimizer.state_dict())
    return digest.hexdigest()


def _append(path: str, **line: Any) -> None:
    """In the kernel's hands when this returns: kill -9 takes nothing of it back."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, json.dumps(line).encode() + b"\n")
    os.close(fd)


def train(pipe: Connection, url: str, log: str, session: int, options: dict[str, Any]) -> None:
    """Restore and tell what was found; then train and save at every step, until killed."""
    torch.set_num_threads(1)
    work = Work(options.get("width", 740))
    tiers = [url, options["tier"]] if "tier" in options else url
    ckpt = Checkpointer(work.state, tiers, deadline_s=options.get("deadline_s", 20.0))
    found = ckpt.restore()
    name = str(ckpt.state["name"])
    pipe.send((found, name, digest_of(work.model, work.optimizer, name)))
    torch.manual_seed(1000 + session)
    step, handles = found or 0, []
    while os.getppid() != 1:
        work.step()
        step += 1
        ckpt.state["name"] = name = f"{session}:{step}"
        _append(log, event="saving", name=name, step=step, digest=digest_of(work.model, work.optimizer, name))
        handles.append((name, ckpt.save(step), set[str]()))
        for saved, handle, told in handles[-50:]:
            if handle.state in ("remote", "durable", "failed") and handle.state not in told:
                told.add(handle.state)
                down = len(ckpt.status().nodes_down)
                _append(log, event=handle.state, name=saved, down=down, reason=handle.reason)


@dataclass
class Truth:
    """What trainers wrote down, in order."""

    digests: dict[str, str] = field(default_factory=dict)
    place: dict[str, int] = field(default_factory=dict)  # of names, in the order of their saves
    newest: dict[str, int] = field(default_factory=dict)  # the newest place that was seen remote, durable
    whole: int = -1  # the newest place that was seen remote with no node down
    events: dict[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Truth:
        truth = cls()
        text = path.read_text() if path.exists() else ""
        for line in text[: text.rfind("\n") + 1].splitlines():  # the last one may still be in the writing
            row = json.loads(line)
            event, name = row["event"], row["name"]
            truth.events[event] = truth.events.get(event, 0) + 1
            if event == "saving":
                truth.digests[name] = row["digest"]
                truth.place[name] = len(truth.place)
                continue
            truth.newest[event] = max(truth.newest.get(event, -1), truth.place[name])
            if event == "remote" and not row["down"]:
                truth.whole = max(truth.whole, truth.place[name])
        return truth

    def check(self, found: tuple[int | None, str, str], at_least: int) -> None:
        """That what was restored is exactly what was saved under its name, and no older than it may be."""
        step, name, digest = found
        if step is None:
            assert at_least < 0, f"nothing was restored, though save {at_least} of {len(self.place)} was promised"
            return
        assert name == f"{name.split(':')[0]}:{step}"
        assert self.digests[name] == digest, f"{name} is not what was saved"
        assert self.place[name] >= at_least, f"{name} is older than save {at_least}, which was promised"
