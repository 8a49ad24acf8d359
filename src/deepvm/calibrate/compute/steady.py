"""Decide when step times are steady, and when they are noisy: plain numbers in, an answer out."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from deepvm.performance.measured import Samples

WINDOW = 3  # steps on each side of the comparison
LIKE = 0.05  # medians closer than this show no trend
NOISY = 0.25  # spread from the 5th to the 95th percentile, over the median


def is_steady(seconds: Sequence[float]) -> bool:
    """True if the last steps show no trend: their median is that of the steps before them."""
    if len(seconds) < 2 * WINDOW:
        return False
    before = statistics.median(seconds[-2 * WINDOW : -WINDOW])
    now = statistics.median(seconds[-WINDOW:])
    return abs(now - before) <= LIKE * before


def doubts(what: str, samples: Samples, *, load: float | None, cores: int, settled: bool) -> tuple[str, ...]:
    """List what makes a measurement doubtful, one sentence each. ``load`` counts the processes of others."""
    found = []
    if samples.spread > NOISY and len(samples.seconds) > 1:
        found.append(f"{what}: noisy, its steps spread over {samples.spread:.0%} of their median")
    if load is not None and load > 0.5 * cores:
        found.append(f"{what}: other processes kept {load:.1f} of {cores} cores busy before it began")
    if not settled:
        found.append(f"{what}: its step times still changed when the warm-up ended")
    return tuple(found)
