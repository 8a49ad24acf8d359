"""``python -m benchmarks.checkpoint.contest.worker WORKLOAD SCRATCH CONTESTANT``: serve saves, one JSON line each.

It runs in the environments of the peers too, so that it imports torch and the standard library only.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path

from benchmarks.common import workloads

# name -> module: class. Several may share a process: "published" takes its switches with each save.
WHERE = {
    "limits": "bounds:Limits",
    "torch.save": "simple:TorchSave",
    "safetensors": "simple:Safetensors",
    "DCP save": "dcp:Save",
    "DCP async_save, thread": "dcp:AsyncThread",
    "DCP async_save, process": "dcp:AsyncProcess",
    "DCP async_save, cached stager": "dcp:AsyncCached",
    "DCP async_save, async staging": "dcp:AsyncStaging",
    "torch_checkpointing": "foreign:TorchCheckpointing",
    "torchsnapshot": "foreign:TorchSnapshot",
    "DLRover": "foreign:DLRover",
    "lm-resiliency": "foreign:LMResiliency",
    "torchft HTTP": "foreign:TorchFT",
    "published": "simple:Published",
    "deepvm": "ours:DeepVM",
}


def main(workload: str, scratch: str, name: str, options: str) -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # peers print; stdout is for answers alone

    def answer(**fields: object) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    contestant = None
    try:
        module, _, kind = WHERE[name].partition(":")
        made = getattr(importlib.import_module(f"benchmarks.checkpoint.contest.{module}"), kind)
        state = workloads.build(workload)
        contestant = made(state, Path(scratch), json.loads(options))
        answer(ready=True, size_bytes=state.size_bytes)
        for line in sys.stdin:
            request = json.loads(line)
            if request.get("close"):
                break
            state.step()
            os.sync()  # nobody pays for what another has left to write
            answer(times=contestant.save(**request["save"]))
        contestant.close()
        answer(closed=True)
    except BaseException as error:
        traceback.print_exc()
        answer(failed=f"{type(error).__name__}: {error}".splitlines()[0][:300])
    finally:
        answers.flush()
        os._exit(0)  # threads and atexit hooks of peers may hang


if __name__ == "__main__":
    main(*sys.argv[1:])
