"""The script of ``deepvm calibrate overheads``: trains a state of a given size, on as many workers as there are.

deepvm run plan.json -- training.py BYTES STEPS
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import deepvm
from deepvm.calibrate.sized_model import SizedTraining


def main() -> None:
    state_bytes, steps = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    training = SizedTraining(state_bytes)
    if dist.is_initialized() and dist.get_world_size() > 1:
        training.network = DistributedDataParallel(training.model)
    with deepvm.Checkpointer(training.state) as ckpt:
        step = ckpt.restore() or 0
        while step < steps:
            training.step()
            step += 1
            ckpt.step(step)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
