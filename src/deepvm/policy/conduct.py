"""A conduct: all decisions of a run in one value, as a plan writes them down. Planner, simulator and runs read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from deepvm import strict_json as strict
from deepvm.errors import UsageError
from deepvm.json_fields import json_fields
from deepvm.policy.policy_text import parse_policy

if TYPE_CHECKING:
    from deepvm.policy.placement import CheapestUp

Tier = Literal["memory", "durable", "anchor"]
AtLoss = Literal["wait", "shrink"]
Fallback = Literal["none", "on-demand at the last moment"]
LAST_MOMENT: Fallback = "on-demand at the last moment"
_TEXT, _MOST_ZONES, _MOST_MACHINES, _MOST_TRIES, _MOST_CEILING = 500, 1000, 10_000, 1000, 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Conduct:
    """Zones are in order of preference; a region stands for any of its zones."""

    zones: tuple[str, ...] = ()  # to train in, one at a time; empty: those of the machines
    way_back: float | None = None  # move when another zone costs less than this share of the price; None in one zone
    ceiling: float | None = None  # never start in a zone dearer than this many times the cheapest; None in one zone
    at_loss: AtLoss = "wait"
    least_workers: int = 1  # of the cluster's machines that train; fewer wait
    save: str = "every 10s or at notice"  # as ``parse_policy`` reads it
    tier: Tier = "memory"
    replicas: int = 1  # of every checkpoint in memory; 0 in a durable store
    fallback: Fallback = "none"
    fallback_tries: int = 0  # of spot machines, while time is left, once on-demand ones had to be rented

    def __post_init__(self) -> None:
        parse_policy(self.save)

    @property
    def after_loss(self) -> str:
        """Return what ``--after-loss`` would say."""
        if self.at_loss == "wait":
            return "wait"
        return f"shrink:{self.least_workers}" if self.least_workers > 1 else "shrink"

    def check_machines(self, *, trainers: int, anchors: int, memory: int) -> None:
        """Raise MalformedJson if it is not the conduct of a cluster of these machines: a plan's machines decide where
        checkpoints are kept. Anchors are among the trainers."""
        tier: Tier = "memory" if memory else "anchor" if anchors else "durable"
        if self.tier != tier:
            raise strict.MalformedJson(f"tier is {strict.brief(self.tier)}, and the plan's machines are for {tier!r}")
        if not min(1, memory) <= self.replicas <= memory:
            raise strict.MalformedJson(f"replicas is {self.replicas}, and the plan has {memory} memory nodes")
        if self.least_workers > trainers:
            raise strict.MalformedJson(
                f"least_workers is {self.least_workers}, and the plan has {trainers} machines that train"
            )

    def cheapest_up(self, *, most_usd: float | None = None) -> CheapestUp:
        """Return how a gang moves between several zones; plans of before the two figures were written had their
        defaults."""
        from deepvm.policy.placement import CheapestUp  # with NumPy, which a run's machines start without

        usual = CheapestUp()
        return CheapestUp(
            way_back=usual.way_back if self.way_back is None else self.way_back,
            ceiling=usual.ceiling if self.ceiling is None else self.ceiling,
            most_usd=most_usd,
        )

    def to_json(self) -> dict[str, Any]:
        return json_fields(
            self, "zones way_back ceiling at_loss least_workers save tier replicas fallback fallback_tries"
        )

    @staticmethod
    def from_json(document: Any) -> Conduct:
        """Read it from a plan; MalformedJson if it is anything else."""
        table = strict.table(document, "conduct")
        zones = strict.array(strict.member(table, "zones"), "zones", _MOST_ZONES)
        way_back, ceiling = table.get("way_back"), table.get("ceiling")
        try:
            return Conduct(
                zones=tuple(strict.text(zone, "a zone", _TEXT, least=1) for zone in zones),
                way_back=None if way_back is None else strict.number(way_back, "way_back", 0.01, 0.99),
                ceiling=None if ceiling is None else strict.number(ceiling, "ceiling", 1, _MOST_CEILING),
                at_loss=_choice(table, "at_loss", AtLoss),
                least_workers=strict.integer(strict.member(table, "least_workers"), "least_workers", 1, _MOST_MACHINES),
                save=strict.text(strict.member(table, "save"), "save", _TEXT, least=1),
                tier=_choice(table, "tier", Tier),
                replicas=strict.integer(strict.member(table, "replicas"), "replicas", 0, _MOST_MACHINES),
                fallback=_choice(table, "fallback", Fallback),
                fallback_tries=strict.integer(table.get("fallback_tries", 0), "fallback_tries", 0, _MOST_TRIES),
            )
        except UsageError as error:
            raise strict.MalformedJson(str(error)) from None


def _choice(table: Any, name: str, kind: Any) -> Any:
    value = strict.member(table, name)
    if value not in get_args(kind):
        raise strict.MalformedJson(f"{name} is {strict.brief(value)}, not one of {', '.join(get_args(kind))}")
    return value
