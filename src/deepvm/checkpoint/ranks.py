"""What the ranks of a job have to agree on, and how they learn it. Nothing is pickled."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


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


def as_rank_0_says(value: bool) -> bool:
    flag = torch.tensor([int(value)], dtype=torch.uint8, device=_device())
    dist.broadcast(flag, 0)
    return bool(flag.item())


def all_of(value: bool) -> bool:
    """Whether it is so on every rank. A save that one rank skips is one that all skip."""
    flag = torch.tensor([int(value)], dtype=torch.int32, device=_device())
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item())


def _device() -> torch.device:
    """Where a backend wants the tensors that it exchanges."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))
    return torch.device("cpu")
