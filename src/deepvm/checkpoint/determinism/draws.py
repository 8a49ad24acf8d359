"""Generators and loaders before and after each step -> how much a step draws, to notice code that fetches ahead.

A batch that was fetched ahead was drawn before the save and used after it; a resumed run draws another one first.
``component`` saves the typical counts and compares the first step after a restore with them.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

WORDS = 624  # of a Mersenne Twister, which all three generators are
COUNTED_STEPS = 12  # of a process; the first is not typical
MOST_BLOCKS = 16_000  # of words that a step may draw and still be counted: 10 million, in 0.05 s
SEED_WORDS = 2  # that a new iterator of a DataLoader draws, for its workers' seeds

_Position = tuple[Any, int]


class Draws:
    def __init__(self, state: Mapping[str, Any]) -> None:
        self._loaders = {name: part for name, part in state.items() if hasattr(part, "handed_out")}
        self._before: dict[str, _Position] | None = _positions(self._loaders)
        self._counts: list[dict[str, int | None]] = []
        self._expected: Mapping[str, int] = {}

    def restored(self, typical: Mapping[str, Any]) -> None:
        """Continue from a checkpoint, with the typical counts of its steps."""
        self._expected = {name: n for name, n in typical.items() if type(n) is int and n > 0}
        self._before, self._counts = _positions(self._loaders), []

    def stepped(self) -> list[str]:
        """Count the draws of a step. After the first one since a restore, return why the run has drifted."""
        if self._before is None:
            return []
        now = _positions(self._loaders)
        found = {name: _between(self._before[name], at) if name in self._before else None for name, at in now.items()}
        self._counts.append(found)
        self._before = now if len(self._counts) < COUNTED_STEPS else None
        return self._compare(found) if len(self._counts) == 1 else []

    def typical(self) -> dict[str, int]:
        """Return what most steps draw, without the counts that differ from step to step; a few steps may evaluate."""
        steady: dict[str, int] = {}
        counted = self._counts[1:]
        for name in counted[0] if len(counted) > 1 else ():
            count, times = Counter(found.get(name) for found in counted).most_common(1)[0]
            if count is not None and 2 * times > len(counted):
                steady[name] = count
        return steady

    def _compare(self, found: Mapping[str, int | None]) -> list[str]:
        """Find counts of more than one step but at most two: an evaluation draws other amounts."""
        reasons = []
        for name, expected in self._expected.items():
            count = found.get(name)
            if count is not None and expected < count <= 2 * expected:
                what = f"batches from {name}" if name in self._loaders else f"numbers from {name}'s generator"
                why = "a batch that was fetched ahead of the step is lost; docs/resume.md shows how to fetch ahead"
                if name == "torch" and count == expected + SEED_WORDS:
                    why = (
                        "a new iterator of a DataLoader drew a seed; call ckpt.restore_generators() after iter(loader)"
                    )
                reasons.append(
                    f"the first step after the restore took {count} {what}, a step of the saved run {expected}: {why}"
                )
        return reasons


def _positions(loaders: Mapping[str, Any]) -> dict[str, _Position]:
    words = torch.get_rng_state().numpy()
    left, following = int(words[8:12].view(np.int32)[0]), int(words[16:24].view(np.int64)[0])
    key = words[24 : 24 + 8 * WORDS].view(np.uint64).astype(np.uint32)
    found: dict[str, _Position] = {"torch": (key, WORDS if left == 1 else following)}
    state = random.getstate()[1]
    found["python"] = (np.array(state[:WORDS], dtype=np.uint32), int(state[WORDS]))
    numpy_random = sys.modules.get("numpy.random")
    numpy_state = None if numpy_random is None else numpy_random.get_state(legacy=False)
    if numpy_state is not None and numpy_state["bit_generator"] == "MT19937":
        found["numpy"] = (numpy_state["state"]["key"].copy(), int(numpy_state["state"]["pos"]))
    for name, loader in loaders.items():
        found[name] = (None, int(loader.handed_out))
    return found


def _between(before: _Position, after: _Position) -> int | None:
    """Count the words that were drawn; None if the generator was set to another state, or they are too many."""
    key, at = before
    wanted, end = after
    if key is None:
        return end - at
    if np.array_equal(key, wanted):
        return end - at
    twister = np.random.RandomState(0)
    twister.set_state(("MT19937", key, WORDS, 0, 0.0))
    target, passed, many = _tempered(wanted), 0, 16
    while passed < MOST_BLOCKS:
        many = min(4 * many, MOST_BLOCKS - passed)
        drawn = twister.randint(0, 2**32, size=many * WORDS, dtype=np.uint32).reshape(many, WORDS)
        for block in np.flatnonzero(drawn[:, 0] == target[0]).tolist():
            if np.array_equal(drawn[block], target):
                return int((passed + block + 1) * WORDS + end - at)
        passed += many
    return None


def _tempered(key: Any) -> Any:
    """Return the numbers that a Mersenne Twister draws from one block of its words."""
    words = key.astype(np.uint32)
    words ^= words >> np.uint32(11)
    words ^= (words << np.uint32(7)) & np.uint32(0x9D2C5680)
    words ^= (words << np.uint32(15)) & np.uint32(0xEFC60000)
    return words ^ (words >> np.uint32(18))
