"""Handwritten digits, learned by as many processes as there are; killed at any point, it goes on bit for bit.

    python examples/digits.py                              one process, checkpoints in a temporary folder
    deepvm run plan.json -- examples/digits.py             the machines of a plan, which tell it the rest
    DEEPVM_STORE=file:///tmp/digits torchrun --nproc-per-node 2 examples/digits.py

The data are scikit-learn's 1,797 digits of 8 x 8 pixels; nothing is downloaded. The lines that deepvm needs are
numbered.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import tempfile
import time

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import deepvm
from deepvm.checkpoint import deterministic, with_final_buckets

UNSEEN = 6  # every so many images are kept back, to show what it has learned
WARM_UP = 20  # steps


def train(options: argparse.Namespace, store: str | None) -> None:
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    deterministic(options.seed, threads=1)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(digits.target)
    unseen = torch.arange(len(images)) % UNSEEN == 0

    model = nn.Sequential(
        nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.2), nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.2),
        nn.Linear(256, 10),
    )  # fmt: skip
    network = with_final_buckets(DistributedDataParallel(model)) if world_size > 1 else model
    share = deepvm.share_of_batch(options.batch)  # (1) however many processes there are
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: share.lr_factor * rate(step, options.steps))
    data = TensorDataset(images[~unseen], labels[~unseen])
    sampler = deepvm.ResumableSampler(data, global_batch=share.global_batch, seed=options.seed)  # (2)
    loader = deepvm.resumable(DataLoader(data, batch_sampler=sampler))
    torch.manual_seed(options.seed + 1 + rank)  # dropout is another one on each rank

    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": loader}
    with deepvm.Checkpointer(state, store) as ckpt:  # (3)
        step = ckpt.restore() or 0  # (4)
        tell(rank, f"begins after step {step} of {options.steps}, {world_size} x {share.per_rank} images each")
        while step < options.steps:
            for x, y in loader:
                ends = time.monotonic() + options.step_time
                loss = nn.functional.cross_entropy(network(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                step += 1
                time.sleep(max(0.0, ends - time.monotonic()))
                ckpt.step(step)  # (5)
                if step % 50 == 0:
                    tell(rank, f"step {step}: loss {loss.item():.4f}, epoch {loader.epoch}")
                if step == options.steps:
                    break
    if rank == 0:
        model.eval()
        with torch.no_grad():
            right = (model(images[unseen]).argmax(1) == labels[unseen]).float().mean().item()
        tell(rank, f"{right:.1%} of {int(unseen.sum())} digits that it has never seen are right")
        keep_weights(model, options.save_weights)


def rate(step: int, steps: int) -> float:
    """Of the learning rate: up in a line, then down in a cosine."""
    return min(1.0, (step + 1) / WARM_UP) * (0.5 + 0.5 * math.cos(math.pi * step / steps))


def keep_weights(model: nn.Module, path: str | None) -> None:
    weights = model.state_dict()
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode() + weights[name].numpy().tobytes())
    print(f"weights: sha256 {digest.hexdigest()}", flush=True)
    if path:
        save_file(weights, path)


def tell(rank: int, line: str) -> None:
    if rank == 0:
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn handwritten digits.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=64, help="images in a step, over all processes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step-time", type=float, default=0.0, help="seconds that a step takes at least")
    parser.add_argument("--save-weights", metavar="PATH", help="a safetensors file")
    options = parser.parse_args()
    if "RANK" in os.environ:  # started by a launcher
        dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory(prefix="digits-") as folder:
        alone = not os.environ.get("DEEPVM_STORE") and not dist.is_initialized()
        train(options, folder if alone else None)  # None: DEEPVM_STORE
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
