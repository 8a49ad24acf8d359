"""A recommendation's ``conduct`` -> how its run behaves: where it trains, when it saves, what it does at a loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from deepvm import strict_json as strict

AtLoss = Literal["wait", "shrink"]
Tier = Literal["memory", "durable", "anchor"]
Fallback = Literal["none", "on-demand at the last moment"]
_TEXT, _MOST_ZONES, _MOST_MACHINES, _MOST_TRIES = 500, 1000, 10_000, 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Conduct:
    """What a plan says about its run. Plans made without a market say nothing."""

    zones: tuple[str, ...] = ()  # to train in, one at a time; empty: those of the machines
    way_back: float | None = None  # move when another zone costs less than this share of the price
    at_loss: AtLoss | None = None
    least_workers: int = 1
    save: str | None = None
    tier: Tier | None = None
    replicas: int = 1  # of each checkpoint in memory nodes
    fallback: Fallback = "none"
    fallback_tries: int = 0  # of spot machines, while time is left, once on-demand ones had to be rented

    @staticmethod
    def from_json(document: Any) -> Conduct:
        """Read it from a plan; MalformedJson if it is anything else."""
        table = strict.table(document, "conduct")
        zones = strict.array(table.get("zones") or [], "zones", _MOST_ZONES)
        least, save, way_back = table.get("least_workers"), table.get("save"), table.get("way_back")
        return Conduct(
            zones=tuple(strict.text(zone, "a zone", _TEXT, least=1) for zone in zones),
            way_back=None if way_back is None else strict.number(way_back, "way_back", 0.01, 0.99),
            at_loss=_choice(table.get("at_loss"), "at_loss", AtLoss),
            least_workers=1 if least is None else strict.integer(least, "least_workers", 1, _MOST_MACHINES),
            save=None if save is None else strict.text(save, "save", _TEXT, least=1),
            replicas=max(1, strict.integer(table.get("replicas", 1), "replicas", 0, _MOST_MACHINES)),
            tier=_choice(table.get("tier"), "tier", Tier),
            fallback=_choice(table.get("fallback"), "fallback", Fallback) or "none",
            fallback_tries=strict.integer(table.get("fallback_tries", 0), "fallback_tries", 0, _MOST_TRIES),
        )

    @property
    def not_followed_in_a_cloud(self) -> tuple[str, ...]:
        """Return sentences about what a run in a cloud does not do of it."""
        if self.fallback == "none":
            return ()
        return (
            "the plan goes on demand at the last moment before its deadline, and deepvm run does that on this machine "
            "only: in a cloud it does not see how many steps are done, so watch the deadline, and start a plan with "
            "on-demand machines in time",
        )

    @property
    def after_loss(self) -> str | None:
        """Return what ``--after-loss`` would say; None if the plan does not decide."""
        if self.at_loss != "shrink":
            return self.at_loss
        return f"shrink:{self.least_workers}" if self.least_workers > 1 else "shrink"


def _choice(value: Any, what: str, kind: Any) -> Any:
    if value is not None and value not in get_args(kind):
        raise strict.MalformedJson(f"{what} is {strict.brief(value)}, not one of {', '.join(get_args(kind))}")
    return value
