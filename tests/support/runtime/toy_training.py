"""What runs in tests of whole runs: the same weights at the end, however often it was broken off.

python toy_training.py STEPS FOLDER [--step-s 0.02] [--fail-at STEP --fail-rank 1] [--hang-after STEP]

In FOLDER it leaves ``weights`` (a SHA-256) and ``samples``: a line for each step of each rank.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import deepvm
from deepvm.checkpoint import with_final_buckets

SAMPLES, BATCH = 96, 8
HANG_S = 3600.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument("--fail-at", type=int)
    parser.add_argument("--fail-rank", type=int, default=1)
    parser.add_argument("--hang-after", type=int, help="the step after this one never ends")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 4))
    network = with_final_buckets(DistributedDataParallel(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = TensorDataset(torch.randn(SAMPLES, 16), torch.arange(SAMPLES) % 4, torch.arange(SAMPLES))
    share = deepvm.share_of_batch(BATCH)
    sampler = deepvm.ResumableSampler(data, global_batch=share.global_batch)
    loader = deepvm.resumable(DataLoader(data, batch_sampler=sampler))
    torch.manual_seed(1 + rank)
    with deepvm.Checkpointer({"model": model, "optimizer": optimizer, "loader": loader}) as ckpt:
        step = ckpt.restore() or 0
        print(f"rank {rank} of {world_size} begins at {step}", flush=True)
        while step < options.steps:
            for x, y, numbers in loader:
                ends_s = time.monotonic() + (HANG_S if step == options.hang_after else options.step_s)
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(network(x), y).backward()
                optimizer.step()
                step += 1
                if step == options.fail_at and rank == options.fail_rank:
                    raise ZeroDivisionError(f"rank {rank} fails by itself")
                time.sleep(max(0.0, ends_s - time.monotonic()))
                _note(options.folder, step, loader.epoch, numbers.tolist())
                ckpt.step(step)
                if step == options.steps:
                    break
    weights = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    if rank == 0:
        print(f"weights {weights}", flush=True)
        (options.folder / "weights").write_text(weights, encoding="utf-8")
    dist.destroy_process_group()


def _note(folder: Path, step: int, epoch: int, numbers: list[int]) -> None:
    """In one write, so that a line is whole; groups are distinguished by their own store's port."""
    line = f"{step} {epoch} {os.environ['MASTER_PORT']} {' '.join(map(str, numbers))}\n"
    with (folder / "samples").open("ab", buffering=0) as file:
        file.write(line.encode())


main()
