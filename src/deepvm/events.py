"""The events of a run, one flat record each, as lines of JSON: from trainers and machines to the ledger.

| kind | sender | data |
|---|---|---|
| run-started | supervisor | resumed: bool, script, settings |
| run-ended | supervisor | outcome: finished, failed or interrupted; why |
| machine-asked | supervisor | role, instance, market, usd_per_hour, on_demand_usd_per_hour, region, zone |
| machine-refused | supervisor | the same; why; once, until the machine is up or another one is asked for |
| machine-up | supervisor | the same; the machine costs money from now on |
| machine-down | supervisor | why: preempted, lost, failed, left, ended or stopped; exit_code |
| notice | machine | seconds_left, source, action: terminate or rebalance |
| decision | machine | choice: save, finish or rely; why |
| group | supervisor | round, world_size, machines; took_s since the last one broke |
| replanned | supervisor | changes: sentences |
| restored | trainer | step, place, seconds; fetched: it was prefetched to the trainer's machine |
| step | trainer, rank 0 | step, seconds since the step before or since the restore, world_size |
| worker-failed | hub | error: the workers' last output; final: they are not restarted |
| warning | supervisor, machine | text: a sentence for the user |
| save | trainer, rank 0 | step, state: remote, durable, skipped or failed; stall_s, seconds, bytes, place, why |
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deepvm import strict_json as strict
from deepvm.errors import UsageError

KINDS = frozenset(
    {
        "run-started", "run-ended", "machine-asked", "machine-refused", "machine-up", "machine-down", "notice",
        "decision", "group", "replanned", "restored", "step", "save", "worker-failed", "warning",
    }
)  # fmt: skip


TRAINERS_KINDS = frozenset({"restored", "step", "save"})
MOST_LINE_BYTES = 2**20

LATEST_S = 1e11  # some three thousand years after 1970: a later time is not valid


def is_time(at_s: float) -> bool:
    """True if an event may have this time."""
    return abs(at_s) <= LATEST_S  # False for NaN


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    at_s: float  # since 1970
    kind: str
    machine: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"unknown kind of event: {self.kind!r}")

    @staticmethod
    def now(kind: str, machine: str | None = None, *, at_s: float | None = None, **data: Any) -> Event:
        """Return an event of this moment, or of ``at_s``."""
        return Event(at_s=time.time() if at_s is None else at_s, kind=kind, machine=machine, data=data)

    def to_line(self) -> str:
        return json.dumps({"at_s": self.at_s, "kind": self.kind, "machine": self.machine, **self.data})

    @staticmethod
    def from_line(line: str | bytes) -> Event:
        """Parse a line; ValueError if it is not an event."""
        found = strict.loads(line, most_bytes=MOST_LINE_BYTES, most_values=10_000)
        if not isinstance(found, dict) or type(found.get("kind")) is not str or found["kind"] not in KINDS:
            raise ValueError(f"not an event: {strict.brief(found)}")
        at_s = strict.number(found.pop("at_s", None), "at_s", -LATEST_S, LATEST_S)
        kind, machine = found.pop("kind"), found.pop("machine", None)
        return Event(at_s=at_s, kind=kind, machine=None if machine is None else str(machine), data=found)

    @staticmethod
    def from_trainer(line: str | bytes, machine: str | None = None) -> Event:
        """Parse and check an event of a trainer, since others rely on its numbers; ValueError if it is not one."""
        event = Event.from_line(line)
        if event.kind not in TRAINERS_KINDS:
            raise ValueError(f"a trainer does not send events of kind {event.kind}")
        strict.integer(event.data.get("step"), "step", 0, 2**63 - 1)
        for name in ("seconds", "stall_s"):
            if event.data.get(name) is not None:
                strict.number(event.data[name], name, -LATEST_S, LATEST_S)
        return Event(at_s=event.at_s, kind=event.kind, machine=machine or event.machine, data=event.data)
