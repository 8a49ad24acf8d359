"""What a plan writes down so that its conduct can be replayed without its catalogue: a value and its JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepvm.json_fields import json_value
from deepvm.plan.risk.spot import TypeMarket
from deepvm.plan.risk.strategy import Figures


@dataclass(frozen=True, kw_only=True, eq=False)
class Replay:
    figures: Figures
    market: TypeMarket | None  # None for on-demand clusters
    starts: int

    def to_json(self) -> dict[str, Any]:
        return {**self.figures.to_json(), "market": json_value(self.market), "starts": self.starts}
