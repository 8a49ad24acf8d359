"""Google Cloud: the preemption of a spot machine, and maintenance that ends one."""

from __future__ import annotations

import time

from deepvm.runtime.notices.base import Notice
from deepvm.runtime.notices.metadata import Answer, Metadata

PREEMPTED_PATH = "/computeMetadata/v1/instance/preempted"
MAINTENANCE_PATH = "/computeMetadata/v1/instance/maintenance-event"
PREEMPTED_S = 30.0  # from the notice to the end, which the service does not report


class GcpNotices:
    """Polls once a second: two answers from the host itself cost less than a thread that waits for a change."""

    interval_s = 1.0  # a preemption leaves half a minute

    def __init__(self, url: str | None = None) -> None:
        self._metadata = Metadata(url)
        self._ends_s: float | None = None

    def present(self) -> bool:
        answer = self._get("/computeMetadata/v1/instance/id")
        return answer is not None and answer.found

    def poll(self) -> Notice | None:
        answer = self._get(PREEMPTED_PATH)
        if answer is None:
            return None
        if answer.found and answer.text.strip().upper() == "TRUE":
            self._ends_s = self._ends_s or time.time() + PREEMPTED_S
            return Notice(action="terminate", at_s=self._ends_s, source="gcp")
        answer = self._get(MAINTENANCE_PATH)
        if answer is not None and answer.found and answer.text.strip() == "TERMINATE_ON_HOST_MAINTENANCE":
            # a minute ahead for most machines, an hour for those with GPUs; a migration, the other event, ends nothing
            return Notice(action="stop", at_s=None, source="gcp")
        return None

    def _get(self, path: str) -> Answer | None:
        answer = self._metadata.ask(path, {"Metadata-Flavor": "Google"})
        return answer if answer is not None and answer.flavor == "Google" else None
