"""A run's losses, groups and restores -> lost steps, and pauses of training with their parts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from deepvm.events import Event
from deepvm.runtime.ledger.bill import number
from deepvm.runtime.ledger.steps import Steps

LOSSES = ("preempted", "lost", "failed")  # reasons of machine-down; all others are planned ends


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    at_s: float
    machine: str
    role: str
    why: str

    @property
    def trained(self) -> bool:
        return self.role != "memory"


@dataclass(frozen=True, kw_only=True, slots=True)
class Restore:
    """A restore of one step by a group's trainers; the slowest counts."""

    at_s: float  # when the last trainer had it
    step: int | None
    place: str | None
    fetched: bool  # prefetched before the trainer read it
    seconds: float | None
    trainers: tuple[tuple[str | None, Any], ...]  # machine and rank
    first_s: float  # when the first trainer had it

    def to_json(self) -> dict[str, Any]:
        return {
            "at_s": self.at_s,
            "step": self.step,
            "place": self.place,
            "fetched": self.fetched,
            "seconds": self.seconds,
            "trainers": len(self.trainers),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Pause:
    """A time without training: from the last finished step before a loss (or before a group broke) to the next one.

    It starts with that step because a machine that hangs is detected long after training stopped."""

    at_s: float
    seconds: float
    recovered: bool  # False: no step followed in that session
    machines: tuple[str, ...]  # that were lost
    parts: dict[str, float]  # in order, if known: detect_s, capacity_s, regroup_s, start_s, restore_s, first_step_s


def merged_restores(events: Sequence[Event], steps: Steps) -> list[Restore]:
    """Merge ``restored`` events, in the order of time, into one restore for each group."""
    found: list[Restore] = []
    for event in events:
        step, place, seconds = event.data.get("step"), event.data.get("place"), number(event.data.get("seconds"))
        step, trainer = step if type(step) is int else None, (event.machine, event.data.get("rank"))
        last = found[-1] if found else None
        if (
            last is not None
            and last.step == step
            and trainer not in last.trainers
            and steps.count_until(last.first_s) == steps.count_until(event.at_s)  # no step in between
        ):
            slower = last.seconds if seconds is None else max(seconds, last.seconds or 0.0)
            found[-1] = replace(last, at_s=event.at_s, seconds=slower, trainers=(*last.trainers, trainer))
        else:
            found.append(
                Restore(
                    at_s=event.at_s,
                    step=step,
                    place=None if place is None else str(place),
                    fetched=event.data.get("fetched") is True,
                    seconds=seconds,
                    trainers=(trainer,),
                    first_s=event.at_s,
                )
            )
    return found


def count_lost(
    steps: Steps, committed: Iterable[tuple[float, int]], losses: Iterable[Loss], restores: Iterable[Restore]
) -> int:
    """Count steps that were finished, but in no committed checkpoint when a trainer was lost or training went back.

    ``committed`` are the times and steps of checkpoints. If training goes back without a loss (a worker failed, a run
    was killed and resumed), its restore shows it."""
    marks: list[tuple[float, int | Loss | Restore]] = [*committed]
    marks += [(loss.at_s, loss) for loss in losses if loss.trained]
    marks += [(restore.first_s, restore) for restore in restores]
    marks.sort(key=lambda mark: mark[0])
    lost, first, safe = 0, 0, None
    for at_s, mark in marks:
        if isinstance(mark, int):
            safe = mark if safe is None else max(mark, safe)
            continue
        if isinstance(mark, Restore):
            safe = mark.step
        end = steps.count_until(at_s)
        lost += steps.above(safe, first, end)
        first = end
    return lost


@dataclass(slots=True)
class _OpenPause:
    """A pause whose end is not known yet."""

    at_s: float  # when it was detected
    before: int  # steps of earlier sessions
    machines: list[str] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)  # machines that the market did not have
    had_s: float | None = None  # when the last of these was up
    group_s: float | None = None
    restore: Restore | None = None

    def observe_market(self, kind: str, machine: str, at_s: float) -> None:
        if kind == "machine-refused":
            self.refused.add(machine)
        elif machine in self.refused and self.group_s is None:
            self.had_s = at_s

    def resumed_s(self, steps: Steps, by_s: float) -> float | None:
        """Return when the next step finished; None if it did not by then."""
        formed_s = self.restore.at_s if self.restore is not None else self.group_s
        # Without a new group, one step that was under way may still finish. If a second one finishes, the lost machine
        # was not needed, and training never stopped.
        sure_s = steps.after(self.at_s, skip=1) if formed_s is None else steps.after(formed_s)
        if sure_s is None or sure_s > by_s:
            return None
        return steps.after(self.at_s) if formed_s is None else sure_s

    def close(self, steps: Steps, until_s: float, recovered: bool) -> Pause:
        """Return the whole pause; ``recovered``: it ends with a step."""
        begun_s = self._last_step_s(steps, until_s, recovered)
        parts, since_s = {}, begun_s
        if begun_s < self.at_s:
            parts["detect_s"], since_s = self.at_s - begun_s, self.at_s
        if self.had_s is not None:
            parts["capacity_s"], since_s = max(0.0, self.had_s - since_s), max(self.had_s, since_s)
        if self.group_s is not None:
            parts["regroup_s"], since_s = max(0.0, self.group_s - since_s), self.group_s
        if self.restore is not None:
            took_s = max(0.0, self.restore.at_s - since_s)
            if self.restore.seconds is not None:
                parts["start_s"] = max(0.0, took_s - self.restore.seconds)
                took_s = min(took_s, self.restore.seconds)
            parts["restore_s"], since_s = took_s, max(since_s, self.restore.at_s)
        if recovered:
            parts["first_step_s"] = until_s - since_s
        return Pause(
            at_s=begun_s,
            seconds=max(0.0, until_s - begun_s),
            recovered=recovered,
            machines=tuple(self.machines),
            parts=parts,
        )

    def _last_step_s(self, steps: Steps, until_s: float, recovered: bool) -> float:
        """Return when the last step before the pause was finished; if none was, when the loss was detected. A step that
        was under way may finish after the loss, until there is a new group."""
        if self.group_s is not None:
            by_s = self.group_s
        elif self.restore is not None:
            by_s = self.restore.at_s
        else:
            by_s = self.at_s if recovered else until_s
        return steps.last(by_s, first=self.before, default=self.at_s)


def find_pauses(
    steps: Steps,
    *,
    losses: Iterable[Loss],
    groups: Iterable[Event],
    restores: Iterable[Restore],
    session_ends_s: Iterable[float],
    market: Iterable[Event] = (),
) -> list[Pause]:
    """Return the pauses of training; the loss of several machines is one pause. ``market`` are the events
    ``machine-refused`` and ``machine-up``."""
    marks: list[tuple[float, Loss | Event | Restore | None]] = [
        *((loss.at_s, loss) for loss in losses if loss.trained),
        *((event.at_s, event) for event in (*groups, *market)),
        *((restore.at_s, restore) for restore in restores),
        *((end_s, None) for end_s in session_ends_s),
    ]
    marks.sort(key=lambda mark: mark[0])
    found: list[Pause] = []
    pause: _OpenPause | None = None
    members: set[str] | None = None  # of the group that trains, if known
    before = 0  # steps of earlier sessions
    for at_s, mark in marks:
        if pause is not None and (resumed_s := pause.resumed_s(steps, at_s)) is not None:
            found.append(pause.close(steps, resumed_s, True))
            pause = None
        if isinstance(mark, Loss):
            if pause is None and (members is None or mark.machine in members):
                pause = _OpenPause(at_s, before)
            if pause is not None:
                pause.machines.append(mark.machine)
        elif isinstance(mark, Event) and mark.kind != "group":
            if pause is not None and mark.machine is not None:
                pause.observe_market(mark.kind, mark.machine, at_s)
        elif isinstance(mark, Event):
            named, took_s = mark.data.get("machines"), number(mark.data.get("took_s"))
            members = {str(name) for name in named} if isinstance(named, list | tuple) else None
            if pause is None and took_s and steps.count_until(at_s - took_s) > before:
                pause = _OpenPause(at_s - took_s, before)  # a machine left before it could be lost
            if pause is not None:
                pause.group_s, pause.restore = at_s, None
        elif isinstance(mark, Restore):
            if pause is not None:
                pause.restore = mark
        else:  # the end of a session
            if pause is not None:
                found.append(pause.close(steps, at_s, False))
            pause, members, before = None, None, steps.count_until(at_s)
    return found
