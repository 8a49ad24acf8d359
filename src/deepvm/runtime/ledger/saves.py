"""A run's save events -> how many checkpoints were made, skipped or failed, and the newest one."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from deepvm.events import Event
from deepvm.runtime.ledger.bill import number


@dataclass(frozen=True, kw_only=True, slots=True)
class Newest:
    step: int
    at_s: float  # when it was made
    durable: bool
    places: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoints:
    made: int  # whole, in a memory node or further
    durable: int
    skipped: int
    failed: int
    stalled_s: float  # that training waited for saves
    newest: Newest | None
    last_problem: str | None  # why the last one was skipped or failed

    def to_json(self) -> dict[str, Any]:
        return {
            "made": self.made,
            "durable": self.durable,
            "skipped": self.skipped,
            "failed": self.failed,
            "newest": self.newest and {**asdict(self.newest), "places": list(self.newest.places)},
            "last_problem": self.last_problem,
        }


@dataclass(slots=True)
class _Made:
    stall_s: float = 0.0
    durable: bool = False
    reporters: list[tuple[str, Any]] = field(default_factory=list)  # state and rank


class Saves:
    """Observes save events. Every rank reports a save when it is remote, and again when it is durable."""

    def __init__(self) -> None:
        self.committed: list[tuple[float, int]] = []  # times and steps
        self._counts = dict.fromkeys(("made", "durable", "skipped", "failed"), 0)
        self._made: dict[int, _Made] = {}  # the last save of each step
        self._stalls_s: list[float] = []  # of all other saves
        self._newest: Newest | None = None
        self._problem: str | None = None

    def observe(self, event: Event) -> None:
        state, step, place = event.data.get("state"), event.data.get("step"), event.data.get("place")
        stall_s = number(event.data.get("stall_s")) or 0.0
        if state in ("skipped", "failed"):
            self._counts[state] += 1
            self._stalls_s.append(stall_s)
            self._problem = str(event.data.get("why") or self._problem or "") or None
        elif state in ("remote", "durable") and type(step) is int:
            reporter = (state, event.data.get("rank", event.machine))
            made = self._made.get(step)
            if made is None or reporter in made.reporters:  # the step was trained and saved again
                if made is not None:
                    self._stalls_s.append(made.stall_s)
                made = self._made[step] = _Made()
                self._counts["made"] += 1
            self._counts["durable"] += not made.durable and state == "durable"
            made.durable = made.durable or state == "durable"
            made.reporters.append(reporter)
            made.stall_s = max(made.stall_s, stall_s)  # all wait for the slowest
            self.committed.append((event.at_s, step))
            self._update_newest(step, event.at_s, state == "durable", () if place is None else (str(place),))

    def _update_newest(self, step: int, at_s: float, durable: bool, places: tuple[str, ...]) -> None:
        last = self._newest
        if last is not None and step < last.step:
            return
        if last is not None and step == last.step:
            at_s, durable = min(at_s, last.at_s), durable or last.durable
            places = last.places + tuple(new for new in places if new not in last.places)
        self._newest = Newest(step=step, at_s=at_s, durable=durable, places=places)

    def checkpoints(self) -> Checkpoints:
        return Checkpoints(
            **self._counts,
            stalled_s=math.fsum([*self._stalls_s, *(made.stall_s for made in self._made.values())]),
            newest=self._newest,
            last_problem=self._problem,
        )
