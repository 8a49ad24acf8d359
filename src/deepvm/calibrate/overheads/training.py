"""The script of ``deepvm calibrate overheads``: trains a state of a given size, on as many workers as there are.

deepvm run plan.json -- training.py BYTES LOSSES STEPS_BETWEEN STARTS_FILE

A worker is lost every STEPS_BETWEEN steps. Small states train faster than a loss arrives, so the step before each loss
is repeated until the group has started anew; STARTS_FILE counts the starts.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import deepvm
from deepvm.calibrate.sized_model import SizedTraining

DURABLE_S = 120.0  # of the last save


def main() -> None:
    state_bytes, losses, between, starts = (*map(int, sys.argv[1:4]), Path(sys.argv[4]))
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    training = SizedTraining(state_bytes)
    if dist.is_initialized() and dist.get_world_size() > 1:
        training.network = DistributedDataParallel(training.model)
    with deepvm.Checkpointer(training.state) as ckpt:
        step, lost = ckpt.restore() or 0, _starts(starts) - 1
        saved = None
        while step < between * (losses + 1):
            training.step()
            if step > 0 and step // between > lost:
                continue  # the loss of a worker is due: this process ends with it
            step += 1
            begun = ckpt.step(step)
            if begun is not None and begun.state != "skipped":
                saved = begun
        if saved is not None:
            saved.wait("durable", timeout_s=DURABLE_S)
    if dist.is_initialized():
        dist.destroy_process_group()


def _starts(file: Path) -> int:
    """Count this start of the group, and return how many there were; the same on every rank."""
    if int(os.environ.get("RANK", "0")) == 0:
        with file.open("a") as counted:
            counted.write(".")
    count = torch.tensor(file.stat().st_size if file.exists() else 0)
    if dist.is_initialized():
        dist.broadcast(count, src=0)
    return int(count)


if __name__ == "__main__":
    main()
