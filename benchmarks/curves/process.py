"""One save or one restore in a process of its own, as users meet it: nothing is warmed, woken or done twice before.

``python process.py '{"do": "restore", "how": "deepvm", ...}'`` prints the seconds as one JSON document.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

DEADLINE_S = 120.0
NEVER = "every 1000000 steps"


def main(task: dict[str, Any]) -> None:
    import torch.distributed as dist

    if task.get("world", 1) > 1:
        dist.init_process_group("gloo", init_method=task["meet"], rank=task["rank"], world_size=task["world"])
    model, optimizer = build(task)
    if task["do"] == "save":
        found = _save(task, model, optimizer)
    else:
        found = _restore(task, model, optimizer)
        assert bool((next(model.parameters()).detach() == 0.5).all())
    found["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if dist.is_initialized():
        dist.barrier()  # rank 0 serves the store that others may still be reading from
    print(json.dumps(found), flush=True)
    os._exit(0)


def build(task: dict[str, Any]) -> tuple[Any, Any]:
    """A model of some tensors and bytes, its values those of an initialization or, to be saved, a constant; and an Adam
    that has stepped (to be saved) or has not (to be restored), where the task wants one."""
    import torch

    adam = task["adam"]
    each = max(1, task["bytes"] // (4 * task["tensors"] * (3 if adam else 1)) // 16 * 16)
    torch.manual_seed(0)
    saving = task["do"] == "save"
    make = (lambda: torch.full((each,), 0.5)) if saving else (lambda: torch.empty(each).uniform_())
    model = torch.nn.ParameterList([torch.nn.Parameter(make()) for _ in range(task["tensors"])])
    if not adam:
        return model, None
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    if saving:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        optimizer.step()
    return model, optimizer


def _state(model: Any, optimizer: Any) -> dict[str, Any]:
    return {"model": model} if optimizer is None else {"model": model, "optimizer": optimizer}


def _save(task: dict[str, Any], model: Any, optimizer: Any) -> dict[str, float]:
    """The first save of a process: what training waits for, and when it is written or committed."""
    if task["how"] == "torch":
        import torch

        began = time.perf_counter()
        torch.save({name: part.state_dict() for name, part in _state(model, optimizer).items()}, task["store"])
        taken = time.perf_counter() - began
        return {"stall_s": taken, "remote_s": taken}
    from deepvm import Checkpointer
    from deepvm.policy import Retention

    steps = task.get("steps", [1])
    began = time.perf_counter()
    kept = Retention(keep_last=len(steps))
    ckpt = Checkpointer(
        _state(model, optimizer), task["store"], run=task["run"], policy=NEVER, retention=kept, on_busy="wait"
    )
    made_s = time.perf_counter() - began
    may_step = [0.0]
    if optimizer is not None:  # after the checkpointer's own hook, which waits for what is still live
        optimizer.register_step_pre_hook(lambda *_: may_step.__setitem__(0, time.perf_counter()))
    time.sleep(task.get("first_step_s", 0.0))  # what a first step computes; a background may use it
    found = {"made_s": made_s}
    for number in steps:
        began = time.perf_counter()
        handle = ckpt.save(number)
        may_step[0] = time.perf_counter()
        if optimizer is not None:
            optimizer.step()
        handle.wait("remote", DEADLINE_S)
        found.update(stall_s=may_step[0] - began, remote_s=time.perf_counter() - began)
    ckpt.close()
    return found


def _restore(task: dict[str, Any], model: Any, optimizer: Any) -> dict[str, float]:
    if task["how"] == "torch":
        import torch

        began = time.perf_counter()
        state = torch.load(task["store"], map_location="cpu", weights_only=True)
        for name, part in _state(model, optimizer).items():
            part.load_state_dict(state[name])
        return {"seconds": time.perf_counter() - began}
    importing = time.perf_counter()
    from deepvm import Checkpointer

    began = time.perf_counter()
    ckpt = Checkpointer(_state(model, optimizer), task["store"], run=task["run"], policy=NEVER)
    restored = ckpt.restore()
    taken = time.perf_counter() - began
    assert restored == task.get("steps", [1])[-1], restored
    return {"seconds": taken, "import_s": began - importing}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main(json.loads(sys.argv[1]))
