"""A device that is a thread: its side stream is a queue of work, its events are real, its memory is this machine's.

The current stream is the thread that computes. ``hold`` therefore waits in it, as a GPU's current stream would.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import torch

from deepvm.errors import CheckpointError

WAIT_S = 20.0


class ThreadEvent:
    def __init__(self) -> None:
        self.reached = threading.Event()

    def query(self) -> bool:
        return self.reached.is_set()


class ThreadDevice:
    """``open`` lets the side stream work; each copy takes ``copy_s``."""

    def __init__(self, *, copy_s: float = 0.0, can_pin: bool = True) -> None:
        self.open = threading.Event()
        self.open.set()
        self.copy_s, self.can_pin = copy_s, can_pin
        self.tensors: set[int] = set()  # addresses of those that are here
        self.registered: dict[int, int] = {}
        self.calls: list[str] = []
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.open.set()
        self._work.put(None)
        self._thread.join(WAIT_S)

    def owns(self, *tensors: torch.Tensor) -> None:
        self.tensors.update(tensor.data_ptr() for tensor in tensors)

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() in self.tensors

    def register(self, address: int, size_bytes: int) -> None:
        if not self.can_pin:
            raise CheckpointError("no memory can be pinned here")
        self.calls.append("register")
        self.registered[address] = size_bytes

    def unregister(self, address: int) -> None:
        self.calls.append("unregister")
        del self.registered[address]

    def follow(self, device: torch.device) -> None:
        self.calls.append("follow")

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        self.calls.append("copy")

        def work() -> None:
            time.sleep(self.copy_s)
            to.copy_(source.detach())

        self._work.put(work)

    def record(self, device: torch.device) -> ThreadEvent:
        event = ThreadEvent()
        self._work.put(event.reached.set)
        return event

    def hold(self, device: torch.device, event: ThreadEvent) -> None:
        self.calls.append("hold")
        assert event.reached.wait(WAIT_S)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            self.open.wait(WAIT_S)
            work()
