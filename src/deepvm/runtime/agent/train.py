"""The hub's groups -> PyTorch's elastic agent with its workers, on a machine that trains."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from deepvm.runtime.agent.rendezvous import HubRendezvous
from deepvm.runtime.hub.client import HubClient
from deepvm.runtime.hub.json_lines import HubGone
from deepvm.runtime.log_tail import tail_text
from deepvm.runtime.workers import elastic
from deepvm.runtime.workers.template import Template

log = logging.getLogger("deepvm.runtime")

PEER_FAILURE_S = 5.0  # for the hub to report which machine failed
LOG_S = 1.0  # for output to reach the log; on a full disk it never does
MONITOR_S = 0.02


class HubGroup:
    """The callbacks of ``workers.elastic``, answered by the hub."""

    def __init__(
        self,
        hub: HubClient,
        rendezvous: HubRendezvous,
        log_file: Path,
        environment: Callable[[tuple[str, ...]], dict[str, str]],
    ) -> None:
        self._hub, self._rendezvous, self._log_file, self._environment = hub, rendezvous, log_file, environment
        self._logged_bytes = 0  # before the workers that run now

    def environment(self) -> Mapping[str, str]:
        group = self._rendezvous.group
        self._await_log("start")
        self._logged_bytes = self._log_file.stat().st_size if self._log_file.exists() else 0
        return self._environment(group.stores if group is not None else ())

    def failed_because_of_peer(self, exit_code: int) -> bool:
        try:
            self._await_log("failed")
            self._hub.send("failing", error=self.tail_text(), code=exit_code)
        except HubGone:
            return False
        by = self._rendezvous.broke(PEER_FAILURE_S)
        return by is not None and by != self._hub.name

    def _await_log(self, what: str) -> None:
        """Wait until everything printed so far is in the log, which another process writes in order."""
        line = f"the workers of {self._hub.name} {what} ({time.monotonic():.6f})"
        log.info("%s", line)
        until_s = time.monotonic() + LOG_S
        while self._log_file.exists() and line not in tail_text(self._log_file) and time.monotonic() < until_s:
            time.sleep(0.005)

    def tail_text(self) -> str:
        """Return the last output of the workers that were started last."""
        return tail_text(self._log_file, since=self._logged_bytes)


def train(
    hub: HubClient,
    template: Template,
    folder: Path,
    *,
    workers: int,
    environment: Callable[[tuple[str, ...]], dict[str, str]],
    drain: Callable[[], None],
) -> int:
    """Train until every machine of the group has finished. Return this machine's exit code."""
    spec = hub.spec
    rendezvous = HubRendezvous(hub, spec.run)
    group = HubGroup(hub, rendezvous, folder / "log.txt", environment)
    while True:
        try:
            elastic.run_agent(
                script=spec.script, args=spec.args, as_module=spec.module, template=template, local_world_size=workers,
                nodes=(1, 1), max_restarts=spec.max_restarts, monitor_interval_s=MONITOR_S, role=hub.role,
                log_dir=str(folder / "torch"), redirects="0", tee="0", rendezvous=rendezvous, group=group,
            )  # fmt: skip
        except ChildFailedError:
            drain()
            hub.send("failed", error=group.tail_text())
            return 1
        if hub.ended is not None or rendezvous.group is None:
            return 0
        drain()
        hub.send("finished")
        if hub.await_over(rendezvous.group.number):
            return 0
        log.info("the group broke before all had finished: %s continues", hub.name)
