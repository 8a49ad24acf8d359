"""How a cluster is run, and what that is expected to cost and take: values of a plan, and their JSON.

``deepvm run`` reads a conduct; the simulator replays the same policies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from deepvm.json_fields import json_fields
from deepvm.policy.policy_text import parse_policy
from deepvm.simulate.risk import Risk

Tier = Literal["memory", "durable", "anchor"]
AtLoss = Literal["wait", "shrink"]
Fallback = Literal["none", "on-demand at the last moment"]
LAST_MOMENT: Fallback = "on-demand at the last moment"
BINS = 12  # of a distribution


@dataclass(frozen=True, kw_only=True, slots=True)
class Conduct:
    """The decisions of a run. Zones are in order of preference; a region stands for any of its zones."""

    zones: tuple[str, ...]
    way_back: float | None  # move when another zone is up for less than this share of the price; None in one zone
    at_loss: AtLoss
    least_workers: int  # of the cluster's machines that train; fewer wait
    save: str  # as ``deepvm.policy.parse_policy`` reads it
    tier: Tier
    replicas: int  # of every checkpoint in memory; 0 in a durable store
    fallback: Fallback
    fallback_tries: int = 0  # of spot machines, while time is left, once on-demand ones had to be rented

    def __post_init__(self) -> None:
        parse_policy(self.save)

    def to_json(self) -> dict[str, Any]:
        return json_fields(self, "zones way_back at_loss least_workers save tier replicas fallback fallback_tries")


@dataclass(frozen=True, kw_only=True, eq=False)
class Expected:
    """What replays of a recommendation gave, over many starts."""

    risk: Risk
    notes: tuple[str, ...] = ()  # what the history does not show

    @property
    def cost_usd(self) -> float:
        return self.risk.mean_usd

    @property
    def hours(self) -> float:
        return self.risk.mean_h

    @property
    def missed(self) -> float:
        return self.risk.missed

    @property
    def guess(self) -> bool:
        """True if the history is too short, or of another accelerator."""
        return not self.risk.history.enough

    def to_json(self) -> dict[str, Any]:
        return {**self.risk.to_json(), "notes": list(self.notes)}

    def distribution(self) -> dict[str, Any]:
        """Return histograms of cost and time: the edges of equal bins, and the share of the starts in each."""
        outcomes = self.risk.outcomes
        return {"cost_usd": _histogram(outcomes.cost_usd), "hours": _histogram(outcomes.hours)}


def _histogram(values: Any) -> dict[str, list[float]]:
    low, high = float(values.min()), float(values.max())
    if high - low < 1e-6 * max(1.0, abs(high)):  # a plan of on-demand machines has one cost
        return {"edges": [low, high], "share": [1.0]}
    counts, edges = np.histogram(values, bins=BINS, range=(low, high))
    return {"edges": edges.tolist(), "share": (counts / len(values)).tolist()}
