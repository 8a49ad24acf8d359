"""Seeds of draws: a seed in, NumPy's generator out, or one sentence if it cannot seed one."""

from __future__ import annotations

import numpy as np

from deepvm.errors import UsageError

MOST_SEED = 2**63 - 1  # plans write seeds as integers of 64 bits


def check_seed(seed: int) -> None:
    """Raise UsageError unless it can seed a draw."""
    if not 0 <= seed <= MOST_SEED:
        raise UsageError(
            f"the seed is {'negative' if seed < 0 else 'too large'}: it must be an integer from 0 to {MOST_SEED}"
        )


def generator_of(seed: int) -> np.random.Generator:
    check_seed(seed)
    return np.random.default_rng(seed)
