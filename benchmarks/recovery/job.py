"""What both sides of the recovery benchmark train: DDP over gloo, a state of 120 MB, a save every 10 steps.

Under ``deepvm run`` its checkpointer saves and restores; else torch.save and torch.load do, as torchrun's own examples.
Each finished step, and each stage of a start, is a line in the file that it is given.
"""

from __future__ import annotations

import json
import os
import sys
import time

BEGAN_S = time.time()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

WIDTH, LAYERS, BATCH, EVERY = 1024, 10, 16, 10
STEP_S = 0.1  # at least


def main(told: str, checkpoint: str, steps: int) -> None:
    def tell(what: str, **data: float) -> None:
        line = json.dumps({"what": what, "at_s": time.time(), "rank": int(os.environ["RANK"]), **data}) + "\n"
        os.write(lines, line.encode())

    lines = os.open(told, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    tell("began", began_s=BEGAN_S)
    dist.init_process_group("gloo")
    tell("group")
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    rank = dist.get_rank()
    ours = "DEEPVM_STORE" in os.environ
    step = 0
    tell("model")
    if ours:
        import deepvm

        ckpt = deepvm.Checkpointer({"model": model, "optimizer": optimizer}, policy=f"every {EVERY} steps")
        step = ckpt.restore() or 0
    elif os.path.exists(checkpoint):
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    tell("restored", step=step)
    while step < steps:
        began = time.perf_counter()
        x = torch.randn(BATCH, WIDTH)
        loss = (parallel(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        tell("step", step=step)
        if ours:
            ckpt.step(step)
        elif step % EVERY == 0:
            if rank == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, checkpoint + ".tmp")
                os.replace(checkpoint + ".tmp", checkpoint)
            dist.barrier()
        time.sleep(max(0.0, STEP_S - (time.perf_counter() - began)))
    if ours:
        ckpt.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
