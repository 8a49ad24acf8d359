"""The job of calibrations: a checkpoint as large as asked, and steps that change all of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import deepvm
from deepvm.calibrate.sized_model import LEAST_BYTES, SizedTraining


@pytest.mark.parametrize("size", [LEAST_BYTES, 1_000_000, 7_654_321])
def test_a_save_has_the_size_that_was_asked_for(size: int, tmp_path: Path) -> None:
    training = SizedTraining(size)
    training.step()
    tensors = list(training.model.parameters())
    moments = [t for state in training.optimizer.state.values() for name, t in state.items() if name != "step"]
    assert sum(t.numel() * t.element_size() for t in (*tensors, *moments)) == pytest.approx(size, abs=12)
    with deepvm.Checkpointer(training.state, store=f"file://{tmp_path}", on_error="raise") as saver:
        handle = saver.save(1)
        handle.wait("remote")
    assert handle.size_bytes == pytest.approx(size, rel=0.01, abs=150_000)  # with its header


def test_a_step_changes_every_parameter() -> None:
    training = SizedTraining(1_000_000)
    training.step()
    before = [p.detach().clone() for p in training.model.parameters()]
    training.step()
    for old, new in zip(before, training.model.parameters(), strict=True):
        assert torch.count_nonzero(old != new) > 0.99 * old.numel()
