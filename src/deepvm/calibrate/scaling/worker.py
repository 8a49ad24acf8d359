"""``python -m deepvm.calibrate.scaling.worker TASK``: one rank of a measured group, started by ``processes``.

The task is JSON. The process ends when its standard input does, so that none outlives the calibration.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from datetime import timedelta
from typing import Any

DEADLINE_S = 300


def main(task: dict[str, Any]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if task["cores"] and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, task["cores"])
    import torch
    import torch.distributed as dist

    from deepvm.calibrate.compute.devices import pick_device, precision_mode
    from deepvm.calibrate.compute.stepping import Stepper, time_steps
    from deepvm.calibrate.workloads import build

    rank, workers = task["rank"], task["workers"]
    device = pick_device(task["device"], rank if task["device"] == "cuda" else 0)
    if device.torch.type == "cpu":
        torch.set_num_threads(max(1, len(task["cores"] or ())))
    else:
        torch.cuda.set_device(device.torch)
    dist.init_process_group(
        "nccl" if device.torch.type == "cuda" else "gloo",
        init_method=f"file://{task['meet']}",
        rank=rank,
        world_size=workers,
        timeout=timedelta(seconds=DEADLINE_S),
    )

    def wrap(model: torch.nn.Module) -> torch.nn.Module:
        if workers == 1:
            return model
        ids = [device.torch.index] if device.torch.type == "cuda" else None
        return torch.nn.parallel.DistributedDataParallel(model, device_ids=ids)

    def go_on(wanted: bool) -> bool:
        """Rank 0 decides for all; the exchange is outside of the timed step."""
        flag = torch.tensor([int(wanted)], device=device.torch)
        if workers > 1:
            dist.broadcast(flag, src=0)
        return bool(flag.item())

    def tick() -> None:
        if rank == 0:
            print(json.dumps({"step": True}), flush=True)

    workload = build(task["workload"], width=task["width"], depth=task["depth"])
    with precision_mode(task["precision"]):
        stepper = Stepper(workload, task["batch"], device, precision=task["precision"], wrap=wrap)
        timing = time_steps(stepper.step, repeats=task["repeats"], limit_s=task["limit_s"], tick=tick, go_on=go_on)
    if rank == 0:
        gradients = sum(p.numel() * p.element_size() for p in stepper.model.parameters() if p.requires_grad)
        answer = {"seconds": timing.step_s.seconds, "settled": timing.settled, "gradient_bytes": gradients}
        print(json.dumps(answer), flush=True)
    dist.destroy_process_group()


def _end_with_parent() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 1):  # not sys.stdin, whose lock the interpreter needs when it ends
            pass
    os._exit(3)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # a thread still reads standard input
