"""One worker of ``deepvm calibrate network``: trains, and saves when its owner asks for it.

    python -m deepvm.calibrate.network.worker SOCKET NAME BYTES

Messages are lines of JSON over a Unix socket, which reaches from one network namespace into another. The owner sends
``connect`` (store, run, share), ``save`` (step) and ``close``; the worker answers each. Between two commands it trains:
steps take a ``share`` of one core, as those of a machine whose GPU computes.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time
from typing import Any

DEADLINE_S = 600.0
POLL_S = 0.001  # a step may be shorter than a save


class Worker:
    def __init__(self, control: socket.socket, state_bytes: int, seed: int) -> None:
        import torch

        from deepvm.calibrate.sized_model import SizedTraining

        torch.set_num_threads(1)
        self._control, self._received = control, b""
        self._training = SizedTraining(state_bytes, seed=seed)
        self._checkpointer: Any = None
        self._share, self._steps_s = 0.0, list[float]()
        self._step()

    def run(self) -> None:
        """Obey until the owner closes the connection."""
        while (message := self._next(DEADLINE_S)) is not None:
            try:
                answer = self._obey(message)
            except Exception as error:  # the owner says it in one sentence, and ends this process
                answer = {"error": f"{type(error).__name__}: {error}"[:500]}
            self._control.sendall(json.dumps(answer).encode() + b"\n")

    def _obey(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["do"] == "connect":
            self._connect(message)
            return {"ready": True}
        if message["do"] == "save":
            return self._save(message["step"])
        if self._checkpointer is not None:
            self._checkpointer.close(last_save=False)
            self._checkpointer = None
        self._share = 0.0
        return {"closed": True}

    def _connect(self, message: dict[str, Any]) -> None:
        import deepvm

        if self._checkpointer is not None:
            self._checkpointer.close(last_save=False)
        self._checkpointer = deepvm.Checkpointer(
            self._training.state, store=message["store"], run=message["run"], on_error="raise",
            on_busy="wait", deadline_s=DEADLINE_S,
        )  # fmt: skip
        self._share = message["share"]

    def _save(self, step: int) -> dict[str, Any]:
        self._steps_s.clear()
        self._step()  # nothing of the state is as in the last save
        handle = self._checkpointer.save(step)
        while handle.state in ("taken", "staged"):
            self._train(POLL_S)
        handle.wait("remote", timeout_s=DEADLINE_S)
        return {
            "remote_s": self._checkpointer.status().last_save_s,
            "stall_s": handle.stall_s,
            "bytes": handle.size_bytes,
            "steps_s": self._steps_s,
        }

    def _next(self, within_s: float) -> dict[str, Any] | None:
        """Return the next message, and train until it is there; None if the owner has left."""
        ends_s = time.monotonic() + within_s
        while b"\n" not in self._received:
            if self._share:
                self._train(0.0)
                wait_s = 0.0
            else:
                wait_s = max(0.0, ends_s - time.monotonic())
            if select.select([self._control], [], [], wait_s)[0]:
                found = self._control.recv(65536)
                if not found:
                    return None
                self._received += found
            elif not self._share:
                return None
        line, _, self._received = self._received.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def _train(self, least_s: float) -> None:
        """Make a step, and rest so long that steps take their share of a core; a command ends the rest."""
        taken_s = self._step() if self._share else 0.0
        rest_s = taken_s * (1 / self._share - 1) if self._share else POLL_S
        ends_s = time.monotonic() + max(least_s, rest_s)
        while (left_s := ends_s - time.monotonic()) > 0:
            if least_s:  # a save is under way: its end is noticed by its own clock
                time.sleep(left_s)
            elif select.select([self._control], [], [], left_s)[0]:
                return

    def _step(self) -> float:
        begun_s = time.perf_counter()
        self._training.step()
        taken_s = time.perf_counter() - begun_s
        self._steps_s.append(taken_s)
        del self._steps_s[:-1000]
        return taken_s


def main() -> None:
    path, name, state_bytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with socket.socket(socket.AF_UNIX) as control:
        control.connect(path)
        worker = Worker(control, state_bytes, seed=os.getpid())
        control.sendall(json.dumps({"worker": name}).encode() + b"\n")
        worker.run()


if __name__ == "__main__":
    main()
