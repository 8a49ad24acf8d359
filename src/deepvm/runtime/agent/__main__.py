"""``python -m deepvm.runtime.agent``: the process of each machine of a run, for all roles.

It connects to the hub. If its role keeps checkpoints, it starts a memory node; if it trains, PyTorch's elastic agent.
It prefetches checkpoints meanwhile, polls for preemption notices, and forwards the trainers' events to the hub.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepvm import variables
from deepvm.errors import DeepvmError
from deepvm.events import Event
from deepvm.fetch.segment import PATH_VARIABLE
from deepvm.policy.loss import parse_after_loss
from deepvm.protocol.credentials import read_token
from deepvm.runtime.agent.interfaces import socket_variables
from deepvm.runtime.agent.node_process import NodeProcess
from deepvm.runtime.agent.prefetch import Prefetcher, store_urls
from deepvm.runtime.hub.client import STOPPED, HubClient
from deepvm.runtime.hub.json_lines import HubGone
from deepvm.runtime.log_tail import Tail
from deepvm.runtime.notices.base import NoticeSource
from deepvm.runtime.notices.sources import open_source
from deepvm.runtime.notices.watch import Watch
from deepvm.runtime.workers.forked_worker import script_folder
from deepvm.runtime.workers.template import Template

log = logging.getLogger("deepvm.runtime")

ENDED_BY = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
LEAVE_BEFORE_S = 0.25  # the machine's end, so that it can report itself that it leaves
WITHOUT_TIME_S = 30.0  # for a notice without a time: the least that any cloud gives


def main(arguments: list[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.INFO, stream=sys.stderr)
    for number in ENDED_BY:
        signal.signal(number, _leave_once)
    try:
        source = open_source(given.notices)
        hub = HubClient.connect(
            given.hub, token=read_token(given.token_file) or "", machine=given.name, address=given.address,
            workers=given.workers,
        )  # fmt: skip
        agent = MachineAgent(given, hub, source)
        if not agent.fork_template():
            return 0  # a worker, whose script has ended
        return _ended(agent)
    except DeepvmError as error:
        print(f"deepvm: {error}", file=sys.stderr)
        return error.exit_code


def _leave_once(number: int, _: object) -> None:
    """Exit at the first signal; later ones must not interrupt the cleanup."""
    for each in ENDED_BY:
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


def _ended(agent: MachineAgent) -> int:
    """Run the machine and return its exit code: 0 if the hub stopped the run."""
    try:
        return agent.run()
    except SystemExit:
        if agent.stopped:
            return 0
        raise
    except Exception as error:
        if agent.stopped:
            return 0
        if type(error).__name__ != "SignalException":  # which torch's agent makes of the signals that end it
            raise
        return 128 + int(getattr(error, "sigval", signal.SIGTERM))
    finally:
        for number in ENDED_BY:
            signal.signal(number, signal.SIG_IGN)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deepvm.runtime.agent", description=__doc__)
    parser.add_argument("--hub", required=True, metavar="HOST:PORT", help="the run's hub")
    parser.add_argument("--name", required=True, help="this machine's name: worker/2, or worker/auto for a free one")
    parser.add_argument("--token-file", type=Path, required=True, help="the run's token")
    parser.add_argument("--folder", type=Path, required=True, help="for this machine's files")
    parser.add_argument("--address", help="this machine's address for others [its address at the hub]")
    parser.add_argument("--notices", default="auto", help="aws, gcp, azure, file:PATH, signal:USR1:30s, auto or none")
    parser.add_argument("--workers", type=int, default=1, help="number of training processes; one for each GPU")
    return parser


class MachineAgent:
    """One machine of a run, on the machine itself."""

    def __init__(self, given: argparse.Namespace, hub: HubClient, source: NoticeSource) -> None:
        self._folder: Path = given.folder
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._workers: int = given.workers
        self._token = read_token(given.token_file) or ""
        self._token_file: Path = given.token_file
        self._source = source
        self.hub = hub
        self._address = given.address or "127.0.0.1"
        self.spec = self.hub.spec
        os.environ.update(self.spec.env)
        os.environ.update(socket_variables(given.address, given.hub))
        self.events, self.save_now = self._folder / "events.jsonl", self._folder / "save-now.json"
        self._prefetcher = Prefetcher(self._folder, self.spec.run, token=self._token, durable=self.spec.durable)
        self._stores = self.hub.stores
        self._template: Template | None = None
        self._trains = self.hub.role != "memory"
        self._failed = False  # its memory node ended again and again
        self._saved, self._wanted_step = threading.Event(), 0  # a save of this step or a later one, at a notice

    def run(self) -> int:
        for old in (self.events, self.save_now):
            old.unlink(missing_ok=True)
        with contextlib.ExitStack() as stack:
            stack.callback(self._prefetcher.close)
            stack.callback(self.hub.close)
            self.hub.start(on_notice=self._on_notice, on_broken=self._fetch, on_end=self._on_end)
            stack.enter_context(Watch(self._source, self._announce))
            if self.hub.role != "worker":
                stack.enter_context(self._memory_node())
            if self.hub.role == "memory":
                self._wait()
                return 0 if self.stopped else 1
            tail = stack.enter_context(Tail(self.events, self._forward))
            code = self._train(tail)
            for number in ENDED_BY:  # torch's agent had replaced the handlers
                signal.signal(number, _leave_once)
            self._trains = False
            if code == 0 and self.hub.role != "worker":  # its checkpoints are needed until the run is over
                self._wait()
                code = int(self._failed)
            return code

    @property
    def stopped(self) -> bool:
        """True if the hub has stopped the run."""
        return self.hub.ended == STOPPED

    def _wait(self) -> None:
        while self.hub.ended is None and not self._failed:
            time.sleep(0.05)

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def _memory_node(self) -> NodeProcess:
        """Return a memory node in a process of its own, which spills to this machine's disk."""
        options = ["--capacity", str(self.spec.memory_bytes), "--token-file", str(self._token_file)]
        if self.spec.durable:
            options += ["--durable", self.spec.durable]
        return NodeProcess(
            self._folder, self._address, options, name=self.hub.name,
            listens=lambda address: self.hub.send("memory", address=address), report=self._warn, failed=self._fail,
        )  # fmt: skip

    def _warn(self, text: str) -> None:
        """Record a sentence in the run's ledger."""
        log.warning("%s", text)
        with contextlib.suppress(HubGone):
            self.hub.send("warning", text=text)

    def _fail(self, why: str) -> None:
        """End this machine, so that it is replaced."""
        self._warn(why)
        self._failed = True
        if self._trains:  # else _wait() returns by itself
            os.kill(os.getpid(), signal.SIGTERM)

    # --- training -------------------------------------------------------------------------------------------------

    def fork_template(self) -> bool:
        """Import torch once for the agent and the template; call it before any thread starts. Return False in a worker
        of the template, when its work is done."""
        if self.hub.role != "memory":
            self._fetch()
            if math.isinf(parse_after_loss(self.spec.after_loss).wait_s):  # else survivors train meanwhile
                self.hub.join()  # the group is formed, and survivors start their workers, during the import
            first_path = script_folder(self.spec.script, self.spec.module)
            self._template = Template.fork_here(first_path=first_path, in_fork=self.hub.forget)
        return self.hub.role == "memory" or self._template is not None

    def _train(self, tail: Tail) -> int:
        from deepvm.runtime.agent.train import train

        assert self._template is not None  # noqa: S101 - forked before
        with self._template as template:
            return train(
                self.hub, template, self._folder, workers=self._workers, environment=self._environment,
                drain=tail.drain,
            )  # fmt: skip

    def _environment(self, stores: tuple[str, ...]) -> dict[str, str]:
        """Return the variables of a new group's trainers."""
        self.save_now.unlink(missing_ok=True)
        self._stores = stores
        return {
            variables.STORE: " ".join(store_urls(stores, self.spec.durable, self.spec.replicas)),
            variables.RUN: self.spec.run,
            variables.POLICY: self.spec.policy,
            variables.BATCH: self.spec.batch,
            variables.PLANNED_WORLD_SIZE: str(self.spec.planned_world_size),
            variables.EVENTS: str(self.events),
            variables.NOTICE_FILE: str(self.save_now),
            variables.TOKEN: self._token,
            PATH_VARIABLE: str(self._prefetcher.path),
        }

    def _fetch(self) -> None:
        """Prefetch the newest checkpoint while a group forms. A machine with a memory node needs no prefetch."""
        if self.hub.role == "worker":
            self._prefetcher.begin(self._stores)

    def _forward(self, lines: Sequence[str]) -> None:
        """Send the trainers' events to the hub."""
        for line in lines:
            with contextlib.suppress(HubGone):
                self.hub.send("event", line=line)
            with contextlib.suppress(ValueError):
                event = Event.from_trainer(line)
                saved = event.kind == "save" and event.data.get("state") == "remote"
                if saved and event.data["step"] >= self._wanted_step:
                    self._saved.set()

    # --- the end --------------------------------------------------------------------------------------------------

    def _announce(self, notice: Any) -> None:
        with contextlib.suppress(HubGone):
            self.hub.send("notice", action=notice.action, at_s=notice.at_s, source=notice.source)

    def _on_notice(self, message: Mapping[str, Any]) -> None:
        """Follow the hub's decision about a machine of the group that will be preempted."""
        at_s = float(message["at_s"] or time.time() + WITHOUT_TIME_S)
        self._wanted_step = int(message["step"])
        self._saved.clear()
        if message["choice"] != "rely":
            from deepvm.runtime.notices.files import write_notice

            action = str(message.get("action") or "terminate")
            write_notice(self.save_now, seconds_left=max(0.0, at_s - time.time()), action=action)
        if message["machine"] == self.hub.name:
            wait_s = 0.0 if message["choice"] == "rely" else at_s - time.time() - LEAVE_BEFORE_S
            threading.Thread(target=self._leave, args=(wait_s,), name="deepvm-leave", daemon=True).start()

    def _leave(self, wait_s: float) -> None:
        """Leave the group after the save, or when the time is up, and end this process."""
        saved = self._saved.wait(max(0.0, wait_s))
        log.info("%s leaves %s", self.hub.name, "after its last save" if saved else "without a save")
        with contextlib.suppress(HubGone):
            self.hub.send("leave")  # before its workers end, so that the hub blames no other machine
        os.kill(os.getpid(), signal.SIGTERM)

    def _on_end(self, why: str) -> None:
        log.info("%s ends: %s", self.hub.name, why)
        if self._trains:  # else _wait() returns by itself
            os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
