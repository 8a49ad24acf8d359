"""What the comparison with the simulator trains: a small model over gloo, in steps of a fixed length."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

import deepvm


def main(steps: int, step_s: float) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    with deepvm.Checkpointer({"model": model, "optimizer": optimizer}) as ckpt:
        step = ckpt.restore() or 0
        while step < steps:
            ends_s = time.monotonic() + step_s
            optimizer.zero_grad()
            parallel(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            step += 1
            time.sleep(max(0.0, ends_s - time.monotonic()))
            ckpt.step(step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
