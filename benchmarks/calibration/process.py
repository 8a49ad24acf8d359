"""``python process.py TASK``: one rank that trains several configurations in turn. Rank 0 prints their steps' times.

The configurations take turns within a round, so that a busy neighbour slows all of them alike.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta

TASK = json.loads(sys.argv[1])
os.sched_setaffinity(0, TASK["cores"])

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from deepvm.calibrate.compute.devices import pick_device  # noqa: E402
from deepvm.calibrate.compute.stepping import Stepper  # noqa: E402
from deepvm.calibrate.workloads import build  # noqa: E402


def main() -> None:
    torch.set_num_threads(1)
    workers = TASK["workers"]
    if workers > 1:
        meet = f"file://{TASK['meet']}"
        limit = timedelta(seconds=600)
        dist.init_process_group("gloo", init_method=meet, rank=TASK["rank"], world_size=workers, timeout=limit)
    parallel = torch.nn.parallel.DistributedDataParallel if workers > 1 else None
    steppers = [
        Stepper(build("tiny", width=c["width"], depth=c["depth"]), c["batch"], pick_device("cpu"), wrap=parallel)
        for c in TASK["configurations"]
    ]
    times: list[list[tuple[float, float]]] = [[] for _ in steppers]  # by the wall clock and in processor time
    for _ in range(TASK["rounds"]):
        for stepper, taken in zip(steppers, times, strict=True):
            for _ in range(TASK["warm"]):
                stepper.step()
            for _ in range(TASK["steps"]):
                used_s = time.process_time()
                taken.append((stepper.step(), time.process_time() - used_s))
    if TASK["rank"] == 0:
        print(json.dumps(times), flush=True)
    if workers > 1:
        dist.barrier()
    os._exit(0)  # without an orderly end, which aborted in gloo's threads now and then


main()
