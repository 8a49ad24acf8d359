"""The hub's messages -> rounds and callbacks, on a machine of the run: the client of ``hub``."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from deepvm.errors import StoreUnavailable, UsageError
from deepvm.protocol.addresses import split_address
from deepvm.runtime.hub.json_lines import HubGone, Lines, connect_handshake
from deepvm.runtime.run_spec import RunSpec

BEAT_S = 1.0
CONNECT_S = 60.0  # the hub's machine may still be starting
WELCOME_S = 10.0
RETRY_S = 0.2
STOPPED = "the run is stopped"
T = TypeVar("T")
FOREVER_S = 7 * 86400.0
HUB_DEAD_S = FOREVER_S  # a dead hub's connection ends; a hub may be silent for long


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """A round and the rank of this machine in it."""

    number: int
    rank: int
    members: tuple[Mapping[str, Any], ...]
    stores: tuple[str, ...]


class HubClient:
    """Keeps the hub's messages until a thread waits for them. Made by ``connect``."""

    def __init__(self, lines: Lines, welcome: Mapping[str, Any]) -> None:
        """``lines`` is connected; ``welcome`` is the hub's answer."""
        self._lines = lines
        self.name, self.role = str(welcome["name"]), str(welcome["role"])
        self.spec = RunSpec.from_job(welcome["job"])
        self.stores = tuple(map(str, welcome["stores"]))  # that have a checkpoint already
        self._changed = threading.Condition()
        self._group: Group | None = None
        self.joined = False  # asked to join the next group; the rendezvous resets it
        self._endpoints: dict[int, str] = {}
        self._broken: dict[int, str] = {}
        self._over = 0  # the last round that all its machines finished
        self.ended: str | None = None

    @staticmethod
    def connect(
        hub: str, *, token: str, machine: str, address: str | None, workers: int, connect_s: float = CONNECT_S
    ) -> HubClient:
        """Connect to the hub and join the run under that name; no thread runs before ``start()``."""
        lines = _connect(hub, connect_s)
        try:
            connect_handshake(lines, token, machine=machine, address=address, workers=workers)
            welcome = lines.receive(WELCOME_S)
            if welcome["say"] != "welcome":
                raise UsageError(f"the hub at {hub} refuses this machine: {welcome.get('why', 'no reason given')}")
            return HubClient(lines, welcome)
        except BaseException:
            lines.close()
            raise

    def start(
        self,
        *,
        on_notice: Callable[[Mapping[str, Any]], None],
        on_broken: Callable[[], None],
        on_end: Callable[[str], None],
    ) -> None:
        """Receive messages and send heartbeats, in two threads; the callbacks are called in the first."""
        self._on_notice, self._on_broken, self._on_end = on_notice, on_broken, on_end
        for name, target in (("receive", self._receive_all), ("beat", self._beat)):
            threading.Thread(target=target, name=f"deepvm-link-{name}", daemon=True).start()

    def join(self) -> None:
        """Ask to join the next group."""
        self.send("join")
        self.joined = True

    def send(self, what: str, **fields: Any) -> None:
        """Send a message. Raise HubGone if the hub has ended."""
        self._lines.send(what, **fields)

    def close(self) -> None:
        self._end("closed")
        self._lines.close()

    def forget(self) -> None:
        """Close the socket in a forked process, without ending the connection."""
        self._lines.forget()

    # --- waiting --------------------------------------------------------------------------------------------------

    def await_group(self, after: int, timeout_s: float) -> Group | None:
        """Return the first round after this one; None if there is none in time."""
        return self._await(lambda: self._group if self._group and self._group.number > after else None, timeout_s)

    def await_endpoint(self, number: int, timeout_s: float) -> str | None:
        """Return the address of a round's store; None if the round broke first."""
        self._await(lambda: self._endpoints.get(number) or self._broken.get(number), timeout_s)
        return self._endpoints.get(number)

    def await_broken(self, number: int, timeout_s: float) -> str | None:
        """Return the machine that broke a round; None if it did not break in time."""
        return self._await(lambda: self._broken.get(number), timeout_s)

    def await_over(self, number: int) -> bool:
        """Wait for a round's end: True if all of its machines finished, False if it broke before."""
        self._await(lambda: self._over if self._over >= number else self._broken.get(number), FOREVER_S)
        return self._over >= number or self.ended is not None

    def broken(self, number: int) -> bool:
        return number in self._broken

    def _await(self, find: Callable[[], T | None], timeout_s: float) -> T | None:
        with self._changed:
            self._changed.wait_for(lambda: find() is not None or self.ended is not None, timeout_s)
            return find()

    # --- the client's own threads ---------------------------------------------------------------------------------

    def _receive_all(self) -> None:
        try:
            while True:
                self._handle(self._lines.receive(HUB_DEAD_S))
        except (HubGone, KeyError, TypeError, ValueError) as reason:
            self._end(f"the hub is gone: {reason}")

    def _handle(self, message: dict[str, Any]) -> None:
        what = message["say"]
        if what == "notice":
            self._on_notice(message)
            return
        if what == "stop":
            self._end(STOPPED)
            return
        with self._changed:
            if what == "round":
                names = [member["name"] for member in message["members"]]
                self._group = Group(
                    number=int(message["number"]),
                    rank=names.index(self.name),
                    members=tuple(message["members"]),
                    stores=tuple(message["stores"]),
                )
            elif what == "endpoint":
                self._endpoints[int(message["round"])] = str(message["endpoint"])
            elif what == "over":
                self._over = int(message["round"])
            elif what == "broken":
                self._broken[int(message["round"])] = str(message["by"])
            self._changed.notify_all()
        if what == "broken":
            self._on_broken()

    def _beat(self) -> None:
        with contextlib.suppress(HubGone):
            while self.ended is None:
                self._lines.send("beat")
                time.sleep(BEAT_S)

    def _end(self, why: str) -> None:
        with self._changed:
            first, self.ended = self.ended is None, self.ended or why
            self._changed.notify_all()
        if first and why != "closed":
            self._on_end(why)


def _connect(hub: str, within_s: float) -> Lines:
    address = split_address(hub)
    deadline = time.monotonic() + within_s
    while True:
        try:
            return Lines(socket.create_connection(address, timeout=5.0))
        except OSError as error:
            if time.monotonic() > deadline:
                raise StoreUnavailable(f"no hub answers at {hub} within {within_s:.0f} s: {error}") from None
            time.sleep(RETRY_S)
