"""The published scheme, torch.save and safetensors."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpoint.contest import Times
from benchmarks.common.workloads import State


def fsync(path: Path) -> None:
    """A file, or all files of a folder, to the disk."""
    for file in [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class Published:
    def __init__(self, state: State, scratch: Path, options: dict[str, Any]) -> None:
        from benchmarks.checkpoint import baseline

        del options
        self._switches = baseline.Switches
        self._trainer = baseline.Trainer(state, scratch)

    def save(self, step: int, **switches: bool) -> Times:
        return self._trainer.save(step, self._switches(**switches))

    def close(self) -> None:
        self._trainer.close()


class TorchSave:
    """Training waits until the file is written into the page cache; durable after fsync."""

    def __init__(self, state: State, scratch: Path, options: dict[str, Any]) -> None:
        del options
        self._state = state
        self._path = scratch / "state.bin"

    def save(self, step: int) -> Times:
        del step
        start = time.perf_counter()
        self._write()
        written = time.perf_counter() - start
        fsync(self._path)
        durable = time.perf_counter() - start
        self._path.unlink()
        return {"at_once": written, "long_step": written, "durable": durable}

    def _write(self) -> None:
        torch.save(self._state.state_dict(), self._path)

    def close(self) -> None: ...


class Safetensors(TorchSave):
    def _write(self) -> None:
        from safetensors.torch import save_file

        save_file(self._state.tensors(), self._path)
