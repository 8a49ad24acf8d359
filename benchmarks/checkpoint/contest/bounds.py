"""What memory, network, disk and Python allow, measured as if it were a contestant."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpoint.contest import Times
from benchmarks.common import limits
from benchmarks.common.workloads import State
from benchmarks.transfer.plain import PlainTransfer

BATCH_BYTES = 2 * 2**20  # copied in one call


class Limits:
    def __init__(self, state: State, scratch: Path, options: dict[str, Any]) -> None:
        del options
        self._memcpy = limits.Memcpy(state.size_bytes)
        self._transfer = PlainTransfer(self._memcpy.source)
        self._state, self._scratch = state, scratch
        state.step()
        self._batches = list(_batches([tensor.detach().reshape(-1) for tensor in self._tensors()]))
        self._threads = ThreadPoolExecutor(os.cpu_count())

    def save(self, step: int) -> Times:
        del step
        return {
            "memcpy": self._memcpy.seconds(),
            "disk_new": limits.write_new_s(self._memcpy.source, self._scratch / "new"),
            "disk_over": limits.overwrite_s(self._memcpy.source, self._scratch / "over"),
            "look": self._look_s(),
            "copies": self._copies_s(),
            "transfer_rate": self._transfer.bytes_per_s(hashed=True),
        }

    def _look_s(self) -> float:
        """Whoever saves while training goes on has to see, once at least, where each tensor is and whether it changed;
        from Python, and with caches as a step leaves them."""
        self._state.step()
        tensors = self._tensors()
        start = time.perf_counter()
        for look in (torch.Tensor.data_ptr, attrgetter("_version")):
            list(map(look, tensors))
        return time.perf_counter() - start

    def _copies_s(self) -> float:
        """What copying each tensor takes by itself, in batches of one call each and on all cores."""
        self._state.step()
        start = time.perf_counter()
        list(self._threads.map(lambda batch: torch._foreach_copy_(*batch), self._batches))
        return time.perf_counter() - start

    def _tensors(self) -> list[torch.Tensor]:
        of_optimizer = (value for values in self._state.optimizer.state.values() for value in values.values())
        return [*self._state.model.parameters(), *self._state.model.buffers(), *of_optimizer]

    def close(self) -> None:
        self._transfer.close()
        self._threads.shutdown()


def _batches(tensors: list[torch.Tensor]) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Places for copies, and what is copied there in one call."""
    batch: list[torch.Tensor] = []
    for number, tensor in enumerate(tensors, start=1):
        batch.append(tensor)
        if sum(t.nbytes for t in batch) >= BATCH_BYTES or number == len(tensors):
            yield [torch.empty_like(t) for t in batch], batch
            batch = []
