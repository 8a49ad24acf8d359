"""A run's events -> its report: outcome, steps, losses, bill. Pure; ``cli.run.report`` shows it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from deepvm.events import Event, is_time
from deepvm.runtime.cluster import Cluster
from deepvm.runtime.ledger.bill import Bill, Meter, number
from deepvm.runtime.ledger.recovery import LOSSES, Loss, Pause, Restore, count_lost, find_pauses, merged_restores
from deepvm.runtime.ledger.saves import Checkpoints, Saves
from deepvm.runtime.ledger.steps import StepColumns

FORMAT = "deepvm-report/1"
INSTANT_S = 1e-3  # a rate over less than this says nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class NoticeRecord:
    """A preemption notice of a machine, and the decision about it."""

    at_s: float
    machine: str
    action: str | None
    seconds_left: float | None
    source: str | None
    choice: str | None = None  # None: nothing was decided
    why: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """The plan's figures beside what happened. None: not planned, or it did not happen."""

    planned_usd_per_hour: float
    usd_per_hour: float | None
    planned_pause_s: float | None  # from the last finished step before a loss to the next
    median_pause_s: float | None
    median_restore_s: float | None

    def to_json(self) -> dict[str, Any]:
        return {
            "usd_per_hour": {"planned": self.planned_usd_per_hour, "happened": self.usd_per_hour},
            "pause_s": {"planned": self.planned_pause_s, "median": self.median_pause_s},
            "restore_s": {"median": self.median_restore_s},
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    run: str
    outcome: str  # finished, failed, interrupted; running; broken-off if the ledger ends without an outcome
    why: str | None
    sessions: int
    started_s: float | None
    wall_s: float  # of all sessions, without the time between them
    steps_done: int  # distinct ones
    steps_repeated: int  # executions of a step that was executed again
    repeated_s: float
    steps_lost: int  # finished, but in no checkpoint when training had to go back
    checkpoints: Checkpoints
    notices: tuple[NoticeRecord, ...]
    losses: tuple[Loss, ...]
    pauses: tuple[Pause, ...]
    restores: tuple[Restore, ...]
    bill: Bill
    useful_machine_s: float
    forecast: Forecast
    changes: tuple[str, ...]  # by replanning
    notes: tuple[str, ...]  # how the cluster differs from the plan
    warnings: tuple[str, ...] = ()  # distinct ones
    profile: str | None = None  # the file with what the run measured
    conduct: Mapping[str, Any] | None = None  # the policies of the last session, and who chose them

    @property
    def stalled_s(self) -> float:
        """Return how long training waited for saves."""
        return self.checkpoints.stalled_s

    @property
    def stood_still_s(self) -> float:
        return math.fsum(pause.seconds for pause in self.pauses)

    @property
    def goodput(self) -> float | None:
        """Return useful step seconds over paid machine seconds, memory nodes included; None if nothing was paid."""
        return min(1.0, self.useful_machine_s / self.bill.machine_s) if self.bill.machine_s > 0 else None

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "run": self.run,
            "outcome": self.outcome,
            "why": self.why,
            "sessions": self.sessions,
            "started_s": self.started_s,
            "wall_s": self.wall_s,
            "steps": {
                "done": self.steps_done,
                "lost": self.steps_lost,
                "repeated": self.steps_repeated,
                "repeated_s": self.repeated_s,
            },
            "stalled_s": self.stalled_s,
            "stood_still_s": self.stood_still_s,
            "goodput": self.goodput,
            "useful_machine_s": self.useful_machine_s,
            "checkpoints": self.checkpoints.to_json(),
            "notices": [asdict(notice) for notice in self.notices],
            "losses": [asdict(loss) for loss in self.losses],
            "pauses": [{**asdict(pause), "machines": list(pause.machines)} for pause in self.pauses],
            "restores": [restore.to_json() for restore in self.restores],
            "bill": self.bill.to_json(),
            "forecast": self.forecast.to_json(),
            "changes": list(self.changes),
            "notes": list(self.notes),
            "warnings": list(self.warnings),
            "profile": self.profile,
            "conduct": None if self.conduct is None else dict(self.conduct),
        }


def make_report(events: Iterable[Event], cluster: Cluster, now_s: float | None = None, *, run: str) -> Report:
    """Return the report of a run's events, in the order of its ledger.

    ``now_s`` is for a run that continues: machines that are up are paid until now. Without it, the last event of a
    session ends everything in it."""
    builder = ReportBuilder(cluster)
    for event in events:
        builder.observe(event)
    return builder.report(run, now_s)


class ReportBuilder:
    """Observes events in the order of the ledger, then evaluates them in the order of time."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.meter, self.columns, self.saves = Meter(cluster), StepColumns(), Saves()
        self.sessions: list[list[float]] = []  # the times of the first and the last event of each
        self.outcome: str | None = None
        self.why: str | None = None
        self.losses: list[Loss] = []
        self.notices: list[NoticeRecord] = []
        self.undecided: dict[str, int] = {}  # machine -> index of its notice without a decision
        self.groups: list[Event] = []
        self.restored: list[Event] = []
        self.market: list[Event] = []  # machines that it did not have, and those that came up
        self.changes: list[str] = []
        self.warnings: dict[str, None] = {}
        self.conduct: Mapping[str, Any] | None = None

    def observe(self, event: Event) -> None:
        at_s, kind, data = event.at_s, event.kind, event.data
        if not is_time(at_s):
            return
        if kind == "run-started":
            self.meter.observe(event, self.sessions[-1][1] if self.sessions else at_s)
            self.outcome = self.why = None
            conduct = data.get("conduct")
            self.conduct = conduct if isinstance(conduct, Mapping) else None
        if kind == "run-started" or not self.sessions:
            self.sessions.append([at_s, at_s])
        session = self.sessions[-1]
        if at_s > session[1]:
            session[1] = at_s
        if kind == "step":
            self.columns.add(at_s, data)
        elif kind == "save":
            self.saves.observe(event)
        elif kind == "machine-refused":
            self.market.append(event)
        elif kind in ("machine-asked", "machine-up", "machine-down"):
            if kind == "machine-up":
                self.market.append(event)
            why = data.get("why")
            if kind == "machine-down" and why in LOSSES and event.machine is not None:
                role = self.meter.role(event.machine)
                self.losses.append(Loss(at_s=at_s, machine=event.machine, role=role, why=str(why)))
            self.meter.observe(event, at_s)
        elif kind in ("notice", "decision"):
            self._observe_notice(event)
        elif kind == "group":
            self.groups.append(event)
        elif kind == "restored":
            self.restored.append(event)
        elif kind == "replanned":
            changes = data.get("changes")
            self.changes += [str(change) for change in changes] if isinstance(changes, list | tuple) else []
        elif kind == "warning":
            self.warnings[str(data.get("text"))] = None
        elif kind == "run-ended":
            self.outcome, self.why = str(data.get("outcome") or "finished"), _text(data.get("why"))

    def _observe_notice(self, event: Event) -> None:
        machine, data = event.machine or "", event.data
        decision: dict[str, Any] = {
            name: _text(data.get(name)) for name in ("choice", "why") if event.kind == "decision"
        }
        index = self.undecided.pop(machine, None) if decision else None
        if index is not None:
            self.notices[index] = replace(self.notices[index], **decision)
            return
        if not decision:
            self.undecided[machine] = len(self.notices)
        notice = NoticeRecord(
            at_s=event.at_s, machine=machine, action=_text(data.get("action")), source=_text(data.get("source")),
            seconds_left=number(data.get("seconds_left")), **decision,
        )  # fmt: skip
        self.notices.append(notice)

    def report(self, run: str, now_s: float | None) -> Report:
        if now_s is not None and self.outcome is None and self.sessions:
            self.sessions[-1][1] = max(self.sessions[-1][1], now_s)
        named = ((group.at_s, group.data.get("machines")) for group in self.groups)
        steps = self.columns.steps((at_s, len(names)) for at_s, names in named if isinstance(names, list) and names)
        self.restored.sort(key=lambda event: event.at_s)
        restores = merged_restores(self.restored, steps)
        ends_s = [until_s for _, until_s in self.sessions]
        pauses = find_pauses(
            steps, losses=self.losses, groups=self.groups, restores=restores, session_ends_s=ends_s, market=self.market
        )
        wall_s = math.fsum(until_s - from_s for from_s, until_s in self.sessions)
        bill = self.meter.bill(ends_s[-1] if ends_s else 0.0)
        return Report(
            run=run,
            outcome=self.outcome or ("broken-off" if now_s is None else "running"),
            why=self.why,
            sessions=len(self.sessions),
            started_s=self.sessions[0][0] if self.sessions else None,
            wall_s=wall_s,
            steps_done=steps.done,
            steps_repeated=steps.repeated,
            repeated_s=steps.repeated_s,
            steps_lost=count_lost(steps, self.saves.committed, self.losses, restores),
            checkpoints=self.saves.checkpoints(),
            notices=tuple(self.notices),
            losses=tuple(self.losses),
            pauses=tuple(pauses),
            restores=tuple(restores),
            bill=bill,
            useful_machine_s=steps.useful_machine_s,
            forecast=Forecast(
                planned_usd_per_hour=self.cluster.hourly_usd,
                usd_per_hour=bill.usd / (wall_s / 3600) if bill.usd is not None and wall_s >= INSTANT_S else None,
                planned_pause_s=self.cluster.restore_s,
                median_pause_s=_median(pause.seconds for pause in pauses if pause.recovered),
                median_restore_s=_median(r.seconds for r in restores if r.seconds is not None),
            ),
            changes=tuple(self.changes),
            notes=self.cluster.notes,
            warnings=tuple(self.warnings),
            conduct=self.conduct,
        )


def _median(seconds: Iterable[float]) -> float | None:
    known = list(seconds)
    return statistics.median(known) if known else None


def _text(value: object) -> str | None:
    return None if value is None else str(value)
