"""Profiles of ``deepvm calibrate`` in, the overheads of a simulation out. What was not measured keeps its default."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from deepvm.performance.overheads import overhead
from deepvm.performance.profile import Profile
from deepvm.simulate.strategies import BOOT_S, Rates

_LEAST_S = 1e-6  # of a transfer


def measured_rates(profiles: Sequence[Profile], checkpoint_bytes: int, base: Rates | None = None) -> Rates:
    """Return the rates of a job with checkpoints of this size: stalls, transfers, regrouping and starts as measured."""
    known = {point.name for profile in profiles for point in profile.overheads}
    figures: dict[str, Any] = {}

    def seconds(name: str) -> float:
        return overhead(profiles, name, checkpoint_bytes).seconds

    if "save_stall" in known:
        figures["stall_s"] = seconds("save_stall")
    if "detection" in known or "regroup" in known:
        figures["regroup_s"] = seconds("detection") + seconds("regroup")
    if "start" in known or "first_step" in known:
        figures["start_s"] = BOOT_S + seconds("start") + seconds("first_step")
    for name, rate in (
        ("save_remote", "memory_bytes_per_s"),
        ("restore", "restore_bytes_per_s"),
        ("save_durable", "durable_bytes_per_s"),
    ):
        if name in known and checkpoint_bytes:
            figures[rate] = checkpoint_bytes / max(seconds(name), _LEAST_S)
    return replace(base or Rates(), **figures)
