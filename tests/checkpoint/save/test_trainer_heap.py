"""What a save leaves on the trainer's heap: nothing. One string there, in the middle of what activations were, keeps
the next activation from its place, and that is larger than the string by far."""

from __future__ import annotations

import threading
import tracemalloc
from pathlib import Path

import pytest
import torch

from deepvm import Checkpointer
from deepvm.checkpoint.buffers.off_heap import run_off_heap
from deepvm.errors import CheckpointError

SMALL_BYTES = 512  # the interpreter has memory of its own for these


def test_a_save_leaves_nothing_on_the_trainers_heap(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(50)))
    optimizer = torch.optim.AdamW(model.parameters())
    with Checkpointer({"model": model, "optimizer": optimizer}, str(tmp_path), run="heap") as ckpt:
        for step in range(4):
            model(torch.ones(8)).sum().backward()
            optimizer.step()
            if step == 3:
                tracemalloc.start(25)
            handle = ckpt.save(step)
            if step == 3:
                left = tracemalloc.take_snapshot()
                tracemalloc.stop()
            handle.wait("remote")
    kept = [
        trace.traceback.format()
        for trace in left.traces
        if trace.size > SMALL_BYTES
        and trace.traceback[0].filename != threading.__file__  # another thread's
        and any("deepvm" in frame.filename for frame in trace.traceback)
    ]
    assert kept == []


def test_work_off_the_heap_returns_and_raises() -> None:
    assert run_off_heap(threading.get_ident) != threading.get_ident()

    def fail() -> None:
        raise CheckpointError("as it was raised")

    with pytest.raises(CheckpointError, match="as it was raised"):
        run_off_heap(fail)
