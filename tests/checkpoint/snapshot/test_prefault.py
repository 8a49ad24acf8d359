"""The size of a state is known before the first step, so that its memory can be touched in the background."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from deepvm.checkpoint.snapshot.prefault import HEADER_BYTES, expected_bytes

OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda p: torch.optim.SGD(p, 0.1),
    lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    lambda p: torch.optim.RMSprop(p, 0.1),
    lambda p: torch.optim.RMSprop(p, 0.1, momentum=0.9),
    lambda p: torch.optim.Adam(p, 0.1),
    lambda p: torch.optim.AdamW(p, 0.1, amsgrad=True),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_the_estimate_before_the_first_step_is_the_size_after_it(
    make: Callable[[Any], torch.optim.Optimizer],
) -> None:
    model = torch.nn.Linear(300, 300)
    optimizer = make(model.parameters())
    before = expected_bytes({"model": model, "optimizer": optimizer})
    model(torch.randn(2, 300)).sum().backward()
    optimizer.step()
    after = expected_bytes({"model": model, "optimizer": optimizer})
    assert before == pytest.approx(after, abs=64)  # counters of steps are not estimated
    assert after >= HEADER_BYTES + 300 * 301 * 4


def test_nothing_is_expected_of_a_state_that_is_not_trained() -> None:
    assert expected_bytes({"model": torch.nn.Linear(3, 3)}) == 0
