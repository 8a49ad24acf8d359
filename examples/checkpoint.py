"""A trainer that is killed and goes on: checkpoints in the memory of another process.

    python examples/checkpoint.py

Starts a memory node, trains, kills the trainer with SIGKILL in the middle, starts it again, and shows that the second
one went on where the newest committed checkpoint was, in the middle of an epoch. The four lines that make it so are
marked. Beside the second one runs `deepvm-fetch`, which brings the checkpoint while Python still imports; the timeline
of the start shows it.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

import deepvm

STEPS = 60
BATCHES = 12  # in an epoch
KILLED_AFTER = 25
RUN = "example"


def train(store: str, pause_s: float) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plain = DataLoader(torch.randn(64 * BATCHES, 512), batch_size=64, shuffle=True)
    loader = deepvm.resumable(plain)  # (1)

    state = {"model": model, "optimizer": optimizer, "loader": loader}
    ckpt = deepvm.Checkpointer(state, store, run=RUN, policy="every 5 steps")  # (2)
    step = first = ckpt.restore() or 0  # (3)
    print(f"begins at step {step}, {loader.consumed} samples into epoch {loader.epoch}", flush=True)
    while step < STEPS:
        for x in loader:
            step += 1
            loss = (model(x) - x.flip(1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ckpt.step(step)  # (4)
            print(f"step {step} loss {loss.item():.4f}", flush=True)
            if first and step == first + 1:
                print(ckpt.timeline(), flush=True)
            time.sleep(pause_s)
    ckpt.close()
    status = ckpt.status()
    print(
        f"{status.remote} checkpoints, {status.bytes_sent / 1e6:.0f} MB sent, "
        f"{1e3 * status.stall_s / max(1, status.taken):.1f} ms of stall each",
        flush=True,
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready"
        node = subprocess.Popen(
            [Path(sys.executable).with_name("deepvm"), "memory-node", "--listen", "127.0.0.1:0",
             "--capacity", "512MB", "--ready-file", ready],
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            ends = time.monotonic() + 30
            while not (ready.exists() and ready.read_text().strip()):
                if time.monotonic() > ends or node.poll() is not None:
                    raise SystemExit("the memory node did not start")
                time.sleep(0.05)
            store = f"memory://{ready.read_text().strip()}"
            print(f"a memory node at {store}, and a trainer that will be killed:")
            trainer = subprocess.Popen(
                [sys.executable, __file__, "--store", store, "--pause", "0.02"], stdout=subprocess.PIPE, text=True
            )
            assert trainer.stdout is not None
            for line in trainer.stdout:
                if line.startswith(f"step {KILLED_AFTER} "):
                    trainer.send_signal(signal.SIGKILL)
                    print(f"  {line.strip()}  <- SIGKILL")
                    break
                if not line.startswith("step") or line.split()[1] in ("1", "10", "20"):
                    print(f"  {line.strip()}")
            trainer.wait(10)
            print("started again, and deepvm-fetch beside it:")
            fetcher = subprocess.Popen(
                [sys.executable, "-m", "deepvm.fetch", "--run", RUN, store], stderr=subprocess.DEVNULL
            )
            try:
                again = subprocess.run(
                    [sys.executable, __file__, "--store", store],
                    capture_output=True,
                    text=True,
                    check=True,
                    timeout=120,
                )
            finally:
                fetcher.terminate()
                fetcher.wait(20)
            lines = again.stdout.splitlines()
            end = next(number for number, line in enumerate(lines) if line.startswith("step") and number > 2)
            shown = [*lines[:end], "...", *lines[-2:]]
            print("\n".join(f"  {line}" for line in shown))
        finally:
            node.send_signal(signal.SIGTERM)
            node.wait(20)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--store")
    parser.add_argument("--pause", type=float, default=0.0)
    given = parser.parse_args()
    if given.store:
        train(given.store, given.pause)
    else:
        main()
