"""Azure's scheduled events: the eviction of a spot machine, and others that stop one."""

from __future__ import annotations

import math
import time
from typing import Any

from deepvm.runtime.notices.base import Action, Notice
from deepvm.runtime.notices.metadata import Answer, Metadata, fields_of, mail_time_s

EVENTS_PATH = "/metadata/scheduledevents?api-version=2020-07-01"
NAME_PATH = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
# A Freeze is not among them: it pauses the machine for seconds and keeps its memory.
ENDS: dict[str, Action] = {"Preempt": "terminate", "Terminate": "terminate", "Reboot": "stop", "Redeploy": "stop"}


class AzureNotices:
    """Each machine receives the events of its whole availability set: only those that name it count."""

    interval_s = 1.0  # what Azure's manual recommends; an eviction leaves half a minute

    def __init__(self, url: str | None = None) -> None:
        self._metadata = Metadata(url)
        self._name: str | None = None
        self._ends_s: dict[str, float] = {}  # by event, of those in the last answer

    def present(self) -> bool:
        return self._own_name() is not None

    def poll(self) -> Notice | None:
        name = self._own_name()
        answer = None if name is None else self._get(EVENTS_PATH)
        if name is None or answer is None or not answer.found:
            return None
        listed = fields_of(answer.text).get("Events")
        events = [e for e in listed if isinstance(e, dict)] if isinstance(listed, list) else []
        own = [event for event in events if _concerns(event, name) and str(event.get("EventType")) in ENDS]
        self._ends_s = {str(event.get("EventId")): self._end_s(event) for event in own}
        if not own:
            return None
        first = min(own, key=lambda event: self._ends_s[str(event.get("EventId"))])
        at_s = self._ends_s[str(first.get("EventId"))]
        return Notice(action=ENDS[str(first["EventType"])], at_s=None if math.isinf(at_s) else at_s, source="azure")

    def _end_s(self, event: dict[str, Any]) -> float:
        """Return when the machine ends; infinity if not given. A started event has no time any more: it keeps its
        earlier one, or ends the machine now."""
        at_s = mail_time_s(event.get("NotBefore"))
        if at_s is not None:
            return at_s
        begun = event.get("EventStatus") == "Started"
        return self._ends_s.get(str(event.get("EventId")), time.time() if begun else math.inf)

    def _own_name(self) -> str | None:
        if self._name is None:
            answer = self._get(NAME_PATH)
            if answer is not None and answer.found:
                self._name = answer.text.strip() or None
        return self._name

    def _get(self, path: str) -> Answer | None:
        return self._metadata.ask(path, {"Metadata": "true"})


def _concerns(event: dict[str, Any], name: str) -> bool:
    resources = event.get("Resources")
    return isinstance(resources, list) and name.lower() in (str(resource).lower() for resource in resources)
