"""What the ranks of a job have to agree on, and how they learn it. Nothing is pickled."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from deepvm.errors import CheckpointError

T = TypeVar("T")


def rank_and_world_size() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def shared_session(own: str) -> str:
    """One name for this start of the job, the same on every rank: rank 0's."""
    _, world_size = rank_and_world_size()
    if world_size == 1:
        return own
    name = torch.frombuffer(bytearray(own.encode().ljust(64)[:64]), dtype=torch.uint8).to(_device())
    dist.broadcast(name, 0)
    return bytes(name.cpu().tolist()).decode().strip()


def any_of(value: bool) -> bool:
    """Whether it is so on some rank: clocks differ, and a notice comes to one machine."""
    flag = torch.tensor([int(value)], dtype=torch.int32, device=_device())
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())


def largest_of(values: tuple[int, int]) -> tuple[int, int]:
    """The largest of each over all ranks."""
    found = torch.tensor(values, dtype=torch.int64, device=_device())
    dist.all_reduce(found, dist.ReduceOp.MAX)
    first, second = found.tolist()
    return first, second


def as_rank_0_says(values: tuple[int, int]) -> tuple[int, int]:
    told = torch.tensor(values, dtype=torch.int64, device=_device())
    dist.broadcast(told, 0)
    first, second = told.tolist()
    return first, second


def all_of(value: bool) -> bool:
    """Whether it is so on every rank. A save that one rank skips is one that all skip."""
    flag = torch.tensor([int(value)], dtype=torch.int32, device=_device())
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item())


def gather_texts(text: str) -> list[str]:
    """Every rank's text, on every rank, by rank."""
    data = text.encode()
    lengths = _gather([len(data)])
    padded = torch.frombuffer(bytearray(data.ljust(max(1, *lengths))), dtype=torch.uint8).to(_device())
    found = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(found, padded)
    return [bytes(t.cpu().numpy())[:n].decode() for t, n in zip(found, lengths, strict=True)]


class Together:
    """What every rank does, so that all of them know if one failed: raises on all, where one cannot go on. Every rank
    has to ask the same question once, also one that failed."""

    def __init__(self) -> None:
        self._problem: Exception | None = None
        self._asked = False

    def __enter__(self) -> Together:
        return self

    def attempt(self, work: Callable[[], T]) -> T | None:
        """What the work returns; None where it failed, which is raised once the others know."""
        try:
            return work()
        except Exception as error:
            self._problem = error
            return None

    def largest(self, values: Sequence[int]) -> list[int]:
        """The largest of each value over all ranks."""
        rows = self._ask(values)
        return [max(column) for column in zip(*rows, strict=True)]

    def each(self, value: int) -> list[int]:
        """Every rank's value (of 64 bits), by rank."""
        return [row[0] for row in self._ask([value])]

    def _ask(self, values: Sequence[int]) -> list[list[int]]:
        self._asked = True
        signed = [int(v) - 2**64 if v >= 2**63 else int(v) for v in values]
        found = _gather([int(self._problem is not None), *signed])
        width = 1 + len(values)
        rows = [found[start : start + width] for start in range(0, len(found), width)]
        if self._problem is not None:
            raise self._problem
        failed = [rank for rank, row in enumerate(rows) if row[0]]
        if failed:
            raise CheckpointError(f"rank {failed[0]} could not go on, so no rank does: its own log says why")
        return [row[1:] for row in rows]

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        assert self._asked or error is not None  # noqa: S101 - or the other ranks would wait


def _gather(values: Sequence[int]) -> list[int]:
    mine = torch.tensor(values, dtype=torch.int64, device=_device())
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return [int(v) for row in found for v in row.tolist()]


def _device() -> torch.device:
    """Where a backend wants the tensors that it exchanges."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))
    return torch.device("cpu")
