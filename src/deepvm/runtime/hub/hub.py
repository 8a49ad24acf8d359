"""Machines' messages -> groups, notices and events, for ``supervise`` and machines.

The hub runs on the on-demand role, which survives the loss of every spot machine. Each machine has one connection. The
end of a connection shows a killed machine at once; a silent one is lost after DEAD_S. The hub forms groups
(membership.py) and starts or ends no machine.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from deepvm import strict_json as strict
from deepvm.errors import DeepvmError
from deepvm.events import Event
from deepvm.policy.loss import parse_after_loss
from deepvm.policy.notice import at_notice
from deepvm.protocol.acceptor import Acceptor, Peer
from deepvm.runtime.cluster import Machine
from deepvm.runtime.hub.connections import MachineConnection, assign_name
from deepvm.runtime.hub.failures import Restarts, ended_by, error_line, error_text
from deepvm.runtime.hub.json_lines import HubGone, Lines, accept_handshake
from deepvm.runtime.hub.membership import Membership, Round
from deepvm.runtime.hub.progress import Progress
from deepvm.runtime.run_spec import RunSpec

log = logging.getLogger("deepvm.runtime")

DEAD_S = 15.0  # machines send a heartbeat every second, once they have started
START_S = 300.0  # while they import and fork, they have no thread for heartbeats
TICK_S = 0.02
MOST_CONNECTIONS = 1000  # a host may play all machines
MOST_WORKERS = 1024  # of one machine
MOST_WARNING_CHARS = 500


class Hub:
    """Listens at ``address`` when made, and answers after ``start()``. ``events`` are for the ledger; ``failed`` is why
    the run cannot continue."""

    def __init__(self, machines: Sequence[Machine], spec: RunSpec, *, token: str, listen: str = "127.0.0.1:0") -> None:
        self.machines = {machine.name: machine for machine in machines}
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.progress = Progress()
        self.failed: str | None = None
        self.failures: dict[str, str] = {}  # by machine, the output of workers that failed
        self.finished = threading.Event()
        self._token, self._spec = token, spec
        self._membership = Membership([m.name for m in machines if m.trains], parse_after_loss(spec.after_loss))
        self._connections: dict[str, MachineConnection] = {}
        self._lock = threading.RLock()
        self._stopping = False
        self._broken_at_s: float | None = None
        self._restarts = Restarts(spec.max_restarts)  # of workers that fail by themselves
        self._stepped = False  # whether the group that trains now has finished a step
        self._sent_stores: tuple[str, ...] = ()  # to those that train now
        self._acceptor = Acceptor(
            listen,
            self._serve,
            connections=MOST_CONNECTIONS,
            connections_of_a_host=MOST_CONNECTIONS,
            dropped=lambda peer, reason: log.info("%s: %s", peer.host, reason),
            failed=_accept_failed,
        )
        self.address = self._acceptor.address
        self._forming = threading.Thread(target=self._form, name="deepvm-hub-form", daemon=True)

    def start(self) -> Hub:
        """Accept machines and form groups, in threads of its own."""
        self._acceptor.start()
        self._forming.start()
        return self

    # --- for the supervisor ---------------------------------------------------------------------------------------

    @property
    def connected(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(name for name in self.machines if name in self._connections)

    @property
    def round(self) -> Round | None:
        """Return the group that trains now."""
        with self._lock:
            return self._membership.round if self._membership.training else None

    @property
    def stores(self) -> tuple[str, ...]:
        """Return the memory nodes' addresses in the cluster's order; empty until all of them listen."""
        with self._lock:
            keepers = [name for name, machine in self.machines.items() if machine.keeps]
            found = [
                connection.memory
                for name in keepers
                if (connection := self._connections.get(name)) and connection.memory
            ]
            return tuple(found) if len(found) == len(keepers) else ()

    def take_events(self, most: float = math.inf) -> list[Event]:
        """Return the next events for the ledger, without waiting."""
        taken: list[Event] = []
        with contextlib.suppress(queue.Empty):
            while len(taken) < most:
                taken.append(self.events.get_nowait())
        return taken

    def want(self, machines: Sequence[Machine]) -> None:
        """Use another cluster from now on: groups do not wait for machines that it does not have."""
        with self._lock:
            self.machines = {machine.name: machine for machine in machines}
            self._membership.wanted = tuple(m.name for m in machines if m.trains)

    def lost(self, name: str) -> None:
        """Drop a machine that its backend reports as lost; its connection may not have ended yet."""
        with self._lock:
            connection = self._connections.pop(name, None)
            self._lose(name)
        if connection is not None:
            connection.lines.close()

    def save_now(self, *, within_s: float) -> int | None:
        """Make all trainers save as at a notice, and then wait for their end. Return the step that must be saved; None
        if no group trains, or if that step is saved already."""
        with self._lock:
            step = self.progress.step
            if not self._membership.training or step is None or step <= (self.progress.saved_step or 0):
                return None
            at_s = time.time() + within_s
            self._send_members("notice", machine="", at_s=at_s, choice="save", step=step, action="interrupt")
            return step

    def stop(self, names: Collection[str] | None = None) -> None:
        """Make these machines end; without names, all of them, and no other machine can connect."""
        if names is None:
            self._acceptor.stop()
        with self._lock:
            self._stopping = self._stopping or names is None
            stopped = [self._connections[name] for name in self._connections if names is None or name in names]
        for connection in stopped:
            connection.send("stop")

    def close(self) -> None:
        self.stop()
        with self._lock:
            connections, self._connections = list(self._connections.values()), {}
        for connection in connections:
            connection.lines.close()
        if self._forming.ident is not None:
            self._forming.join(5.0)

    # --- connections ----------------------------------------------------------------------------------------------

    def _serve(self, peer: Peer) -> None:
        connection: MachineConnection | None = None
        try:
            lines = Lines(peer.sock)
            hello = accept_handshake(lines, self._token)
            if (why := self._acceptor.admit(peer)) is not None:
                raise HubGone(why)
            connection = self._admit(hello, lines, peer.host)
            while True:
                self._handle(connection, lines.receive(DEAD_S if connection.beats else START_S))
        except (HubGone, LookupError, TypeError, ValueError, ArithmeticError, AttributeError, OSError) as reason:
            log.info("%s: %s", connection.name if connection else peer.name, reason)
        except DeepvmError as refusal:
            with contextlib.suppress(HubGone):
                lines.send("refused", why=str(refusal))
        finally:
            if connection is not None:
                with self._lock:
                    if self._connections.get(connection.name) is connection:
                        del self._connections[connection.name]
                        self._lose(connection.name)

    def _admit(self, hello: Mapping[str, Any], lines: Lines, host: str) -> MachineConnection:
        workers = strict.integer(hello.get("workers", 1), "workers", 1, MOST_WORKERS)
        with self._lock:
            name = assign_name(str(hello.get("machine")), self.machines, self._connections)
            connection = MachineConnection(name, lines, str(hello.get("address") or host), workers)
            self._connections[name] = connection
            stores = [] if self.progress.saved_step is None else list(self.stores)
            lines.send("welcome", name=name, role=self.machines[name].role, job=self._spec.to_job(), stores=stores)
            return connection

    # --- messages -------------------------------------------------------------------------------------------------

    def _handle(self, connection: MachineConnection, message: dict[str, Any]) -> None:
        what = message["say"]
        with self._lock:
            if what == "beat":
                connection.beats = True
            elif what == "event":
                self._event(connection, message)
            elif what == "join" and not connection.leaves:
                self._broken(self._membership.join(connection.name, time.monotonic()), f"{connection.name} joins")
            elif what == "endpoint":
                self._send_members("endpoint", round=message["round"], endpoint=str(message["endpoint"]))
            elif what == "memory":
                self._memory_node_at(connection, str(message["address"]))
            elif what == "leave":
                connection.leaves = True
                self._lose(connection.name)
            elif what == "notice":
                self._notice(connection, message)
            elif what == "warning":
                self._log("warning", connection.name, text=str(message["text"])[:MOST_WARNING_CHARS])
            elif what == "failing":
                self._failing(connection, str(message.get("error", "")), message.get("code"))
            elif what == "failed":
                self.failures.setdefault(connection.name, error_text(str(message.get("error", ""))))
                self.failed = self.failed or f"the workers of {connection.name} failed too often"
            elif what == "finished":
                self._membership.finish(connection.name)
                if self._membership.over and self._membership.round is not None:
                    self._send_members("over", round=self._membership.round.number)
                    self.finished.set()

    def _event(self, connection: MachineConnection, message: dict[str, Any]) -> None:
        try:
            event = Event.from_trainer(str(message["line"]), connection.name)
            self.progress.observe(event)
            self._stepped = self._stepped or event.kind == "step"
        except (KeyError, TypeError, ValueError) as reason:  # a killed trainer may leave half a line
            log.info("%s sent an invalid event: %s", connection.name, reason)
            return
        self.events.put(event)

    def _memory_node_at(self, connection: MachineConnection, address: str) -> None:
        """Record the address of a machine's memory node. A new address needs a new round."""
        connection.memory = address
        if address not in self._sent_stores:
            self._broken(self._membership.move(connection.name), f"the memory of {connection.name} is at {address} now")

    def _failing(self, connection: MachineConnection, error: str, code: object) -> None:
        """Blame the first machine whose workers fail; the workers of others fail because of it, and are restarted."""
        if not self._membership.fail(connection.name):
            return
        self.failures[connection.name] = error_text(error)
        code = code if type(code) is int else 0
        refused = self._restarts.refuse(error, stepped=self._stepped, code=code)
        shown, line = error_text(error), error_line(error) or ended_by(code)
        self._log("worker-failed", connection.name, error=shown, line=line, final=refused is not None)
        if refused is not None:
            self.failed = self.failed or f"the workers of {connection.name} {refused}"
        self._broken(True, f"the workers of {connection.name} failed")

    def _notice(self, connection: MachineConnection, message: dict[str, Any]) -> None:
        at_s = message.get("at_s")
        seconds_left = None if at_s is None else max(0.0, float(at_s) - time.time())
        action, source = str(message["action"]), str(message.get("source", ""))
        self._log("notice", connection.name, action=action, source=source, seconds_left=seconds_left)
        if action == "rebalance":  # a warning that the end is likelier: nothing is done about it
            return
        decision = at_notice(
            seconds_left=seconds_left,
            unsaved_steps=(self.progress.step or 0) - (self.progress.saved_step or 0),
            save_s=self.progress.save_s,
        )
        self._log("decision", connection.name, choice=decision.choice, why=decision.why)
        self._send_members(
            "notice", machine=connection.name, at_s=at_s, choice=decision.choice, step=self.progress.step or 0
        )

    # --- groups ---------------------------------------------------------------------------------------------------

    def _form(self) -> None:
        while not self._stopping:
            time.sleep(TICK_S)
            with self._lock:
                stores = self.stores
                keepers = any(machine.keeps for machine in self.machines.values())
                if (keepers and not stores) or self._stopping or self.failed is not None:
                    continue
                formed = self._membership.form(time.monotonic())
                if formed is not None:
                    self._send_round(formed, stores)

    def _send_round(self, formed: Round, stores: Sequence[str]) -> None:
        members: list[dict[str, Any]] = [
            {"name": name, "address": connection.address, "workers": connection.workers}
            for name in formed.members
            if (connection := self._connections.get(name))
        ]
        self.failures, self._stepped = {}, False
        self._sent_stores = tuple(stores)
        took_s = None if self._broken_at_s is None else time.time() - self._broken_at_s
        world_size = sum(member["workers"] for member in members)
        self._log("group", round=formed.number, world_size=world_size, machines=list(formed.members), took_s=took_s)
        if len(members) < len(formed.members):  # one was lost just now
            gone = next(name for name in formed.members if name not in self._connections)
            self._broken(self._membership.lose(gone), f"{gone} is gone")
        self._send_members("round", number=formed.number, members=members, stores=list(stores))
        if self._membership.broken_by is not None:
            self._send_members("broken", round=formed.number, by=self._membership.broken_by, why="one is gone")

    def _lose(self, name: str) -> None:
        self._broken(self._membership.lose(name), f"{name} is gone")

    def _broken(self, broken: bool, why: str) -> None:
        if broken and self._membership.round is not None:
            self._broken_at_s = time.time()
            self._send_members("broken", round=self._membership.round.number, by=self._membership.broken_by, why=why)

    def _log(self, kind: str, machine: str | None = None, **data: Any) -> None:
        self.events.put(Event.now(kind, machine, **data))

    def _send_members(self, what: str, **fields: Any) -> None:
        formed = self._membership.round
        for name in formed.members if formed is not None else ():
            if (connection := self._connections.get(name)) is not None:
                connection.send(what, **fields)


def _accept_failed(error: Exception) -> None:
    log.warning("a connection to the hub could not be accepted: %s", str(error) or type(error).__name__)
