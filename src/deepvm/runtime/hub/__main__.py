"""``python -m deepvm.runtime.hub``: runs the hub as a process, on a cloud's on-demand machine.

It forms groups and writes events into the ledger. The cloud's fleet, or ``deepvm run``, replaces lost machines.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from pathlib import Path

from deepvm import strict_json as strict
from deepvm.errors import DeepvmError, MalformedFile
from deepvm.events import Event
from deepvm.protocol.credentials import read_token
from deepvm.runtime.cluster import Cluster, Machine, billing_facts
from deepvm.runtime.hub.durability import Durability
from deepvm.runtime.hub.hub import Hub
from deepvm.runtime.ledger.journal import Journal
from deepvm.runtime.ledger.ledger import Ledger
from deepvm.runtime.run_spec import RunSpec

log = logging.getLogger("deepvm.runtime")

POLL_S = 0.2


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m deepvm.runtime.hub", description=__doc__)
    parser.add_argument("--listen", required=True, metavar="HOST:PORT")
    parser.add_argument("--job", type=Path, required=True, help="the file that deepvm run wrote")
    parser.add_argument("--token-file", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="for the ledger")
    given = parser.parse_args(arguments)
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.INFO, stream=sys.stderr)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        return _serve(given, stop)
    except DeepvmError as error:
        print(f"deepvm: {error}", file=sys.stderr)
        return error.exit_code


def _serve(given: argparse.Namespace, stop: threading.Event) -> int:
    spec, machines = _read(given.job)
    cluster = Cluster(machines=machines, architecture="", catalog="", checkpoint_bytes=None, restore_s=None)
    given.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = given.folder / "ledger.sqlite"
    resumed = path.exists()
    with Ledger.open(path, write=True) if resumed else Ledger.create(path, run=spec.run, cluster=cluster) as ledger:
        journal, token = Journal(ledger, log.warning), read_token(given.token_file) or ""
        hub = Hub(machines, spec, token=token, listen=given.listen).start()
        journal.append([Event.now("run-started", resumed=resumed, script=spec.script)])
        try:
            outcome = _follow(hub, journal, stop)
            journal.append(hub.take_events())
            durability = Durability(spec.run, nodes=lambda: hub.stores, token=token, durable=spec.durable)
            if (made := durability.await_newest(hub.progress, lambda: not stop.wait(POLL_S))) is not None:
                journal.append([made])
        finally:
            hub.close()
        journal.append([*hub.take_events(), Event.now("run-ended", outcome=outcome, why=hub.failed or "")])
        journal.close()
    return 0 if outcome == "finished" else 1


def _follow(hub: Hub, journal: Journal, stop: threading.Event) -> str:
    """Record events until the run ends, and return its outcome. A machine counts as up while it is connected."""
    up: set[str] = set()
    while True:
        connected = set(hub.connected)
        news = [Event.now("machine-up", name, **billing_facts(hub.machines[name])) for name in sorted(connected - up)]
        why = "ended" if hub.finished.is_set() else "lost"
        news += [Event.now("machine-down", name, why=why) for name in sorted(up - connected)]
        up = connected
        journal.append([*news, *hub.take_events()])
        journal.check()
        if hub.finished.is_set():
            return "finished"
        if hub.failed is not None:
            return "failed"
        if stop.wait(POLL_S):
            return "interrupted"


def _read(path: Path) -> tuple[RunSpec, tuple[Machine, ...]]:
    try:
        document = strict.read_file(path, most_bytes=64 * 2**20, hint="deepvm run writes it")
        machines = tuple(Machine(**machine) for machine in document["machines"])
        return RunSpec.from_job(document), machines
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise MalformedFile(path, f"not a job file of deepvm run ({type(error).__name__}: {error})") from None


if __name__ == "__main__":
    sys.exit(main())
