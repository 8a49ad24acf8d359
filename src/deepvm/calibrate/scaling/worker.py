"""``python -m deepvm.calibrate.scaling.worker TASK``: one rank of a measured group, started by ``processes``.

The task is JSON. The process ends when its standard input does, so that none outlives the calibration. Ranks of one
machine meet in a file; those of several at a port of rank 0, which prints its address. A task ``about`` asks what the
machine is.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

DEADLINE_S = 300


def about(device: str) -> dict[str, Any]:
    """Describe this machine as it trains."""
    from dataclasses import replace

    from deepvm.calibrate.compute.devices import pick_device
    from deepvm.runtime.this_machine import here_and_now

    chosen, now = pick_device(device), here_and_now()
    return {
        "device": chosen.torch.type,
        "provenance": replace(now, machine=chosen.on(now.machine)).to_json(),
    }


def main(task: dict[str, Any]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if task["cores"] and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, task["cores"])
    address = own_address(os.environ) if task["meet"] is None or isinstance(task["meet"], list) else None
    if address is not None:
        from deepvm.runtime.agent.interfaces import socket_variables

        os.environ |= socket_variables(address, f"{address}:1")
    import torch
    import torch.distributed as dist

    from deepvm.calibrate.compute.devices import pick_device, precision_mode
    from deepvm.calibrate.compute.stepping import Stepper, time_steps
    from deepvm.calibrate.workloads import build

    rank, workers = task["rank"], task["workers"]
    device = pick_device(task["device"], rank if task["device"] == "cuda" and address is None else 0)
    if device.torch.type == "cuda":
        torch.cuda.set_device(device.torch)
    elif address is None:
        torch.set_num_threads(max(1, len(task["cores"] or ())))
    backend, deadline = "nccl" if device.torch.type == "cuda" else "gloo", timedelta(seconds=DEADLINE_S)
    if address is None:
        where = f"file://{task['meet']}"
        dist.init_process_group(backend, init_method=where, rank=rank, world_size=workers, timeout=deadline)
    else:
        from torch._C._distributed_c10d import TCPStore

        from deepvm.runtime.agent.rendezvous import listening_store

        if rank == 0:
            store = listening_store(address)
            print(json.dumps({"meet": [address, store.port]}), flush=True)
        else:
            host, port = task["meet"]
            store = TCPStore(host, port, is_master=False, timeout=deadline)
        dist.init_process_group(backend, store=store, rank=rank, world_size=workers, timeout=deadline)

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


def own_address(environment: Mapping[str, str]) -> str:
    """Return the address of this host that the ssh connection arrived at."""
    fields = environment.get("SSH_CONNECTION", "").split()
    return fields[2] if len(fields) == 4 else "127.0.0.1"


def _end_with_parent() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 1):  # not sys.stdin, whose lock the interpreter needs when it ends
            pass
    os._exit(3)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    if given.get("about"):
        print(json.dumps(about(given["device"])))
    else:
        main(given)
    sys.stdout.flush()
    os._exit(0)  # a thread still reads standard input
