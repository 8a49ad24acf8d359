"""How many numbers a step draws is counted from the generators' states alone, few or millions."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from deepvm.checkpoint.determinism.draws import Draws


@pytest.mark.parametrize("numbers", [1, 623, 624, 625, 20_000, 200_000, 3_000_000])
def test_what_each_step_draws_is_known(numbers: int) -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    draws = Draws({})
    for _ in range(4):
        torch.rand(numbers)
        random.getrandbits(32 * min(numbers, 1000))
        np.random.randint(0, 2**32, size=numbers, dtype=np.uint32)
        draws.stepped()
    assert draws.typical() == {"torch": numbers, "python": min(numbers, 1000), "numpy": numbers}


def test_a_batch_fetched_ahead_is_noticed_beside_much_dropout() -> None:
    draws = Draws({})
    draws.restored({"torch": 200_064})
    torch.rand(200_064 + 64)
    (reason,) = draws.stepped()
    assert "a batch that was fetched ahead of the step is lost" in reason


def test_the_seed_of_a_new_iterator_is_not_taken_for_a_batch() -> None:
    loader = torch.utils.data.DataLoader(torch.arange(8))
    draws = Draws({})
    draws.restored({"torch": 1024})
    iter(loader)
    torch.rand(1024)
    (reason,) = draws.stepped()
    assert "call ckpt.restore_generators() after iter(loader)" in reason
