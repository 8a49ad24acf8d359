"""From nothing to the first loss of GPT-2 small, of which a checkpoint with AdamW's state is in the page cache: a fresh
process with torch.load, and a worker that a template forks with restore(lazy=True). Neither draws random weights before
it loads others."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

DEADLINE_S = 120.0
FRESH, FORKED = "torch.load in a fresh process", "restore in a worker from a template"


def measure(places: dict[str, Path], rounds: int, seed: int) -> dict[str, list[float]]:
    """Seconds from asking for a process until it has its first loss, by way."""
    from benchmarks.common import limits
    from deepvm.runtime import Template
    from deepvm.runtime.workers.forked_worker import run_script

    script = str(Path(__file__).resolve())
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # a worker finds the benchmarks, too
    taken: dict[str, list[float]] = {FRESH: [], FORKED: []}
    chance, awake = random.Random(seed), limits.AwakeMemory()
    with Template() as template:
        template.ready()

        def forked() -> float:
            told, theirs = os.pipe()
            try:
                asked = time.monotonic()
                worker = template.start(run_script, [script, ["deepvm", str(places["deepvm"])], False], stdout=theirs)
                code = worker.wait(timeout_s=DEADLINE_S)
                assert code == 0, code
                return float(os.read(told, 100)) - asked
            finally:
                os.close(told)
                os.close(theirs)

        def fresh() -> float:
            command = [sys.executable, script, "torch", str(places["torch"])]
            asked = time.monotonic()
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=True)
            return float(done.stdout) - asked

        ways = {FRESH: fresh, FORKED: forked}
        for number in range(rounds + 1):
            for name in chance.sample(sorted(ways), 2):
                with awake:
                    seconds = ways[name]()
                if number:
                    taken[name].append(seconds)
    return taken


def main(how: str, place: str) -> None:
    import torch

    from benchmarks.common import workloads

    with torch.device("meta"):
        model: Any = workloads.GPT2()
    model = model.to_empty(device="cpu")
    model.lm_head.weight = model.wte.weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if how == "torch":
        state = torch.load(place, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    else:
        import deepvm

        ckpt = deepvm.Checkpointer({"model": model, "optimizer": optimizer}, place, run="restore")
        assert ckpt.restore(lazy=True) == 1
    tokens = torch.randint(0, 50257, (1, 33), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        loss = float(model.loss(tokens))
    print(repr(time.monotonic()), flush=True)
    assert loss == loss
    os._exit(0)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main(sys.argv[1], sys.argv[2])
