"""Somebody between a machine and the hub, without the token, becomes no machine of the run and ends nothing."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from deepvm.errors import AccessDenied
from deepvm.runtime.cluster import Machine
from deepvm.runtime.hub.client import HubClient
from deepvm.runtime.hub.hub import Hub
from deepvm.runtime.hub.json_lines import HubGone, Lines, accept_handshake, connect_handshake
from deepvm.runtime.run_spec import RunSpec

TOKEN = "t" * 32


@pytest.fixture
def hub() -> Iterator[Hub]:
    machines = [
        Machine(name=name, role=role, instance="x", market="on-demand", usd_per_hour=1.0, on_demand_usd_per_hour=3.0)
        for name, role in (("memory/0", "memory"), ("worker/0", "worker"))
    ]
    spec = RunSpec(run="r", script="x.py", max_restarts=0)
    found = Hub(machines, spec, token=TOKEN).start()
    yield found
    found.close()


class LineRelay:
    """Passes lines on; ``change`` sees each from the machine, with its number."""

    def __init__(self, hub: str, change: Callable[[int, bytes], bytes] = lambda _, line: line) -> None:
        host, _, port = hub.rpartition(":")
        self._hub, self._change = (host, int(port)), change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets = [self._listener]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            machine, _ = self._listener.accept()
            hub = socket.create_connection(self._hub, timeout=10)
            self._sockets += [machine, hub]
            threading.Thread(target=self._pass_back, args=(hub, machine), daemon=True).start()
            for number, line in enumerate(machine.makefile("rb")):
                hub.sendall(self._change(number, line))
            hub.shutdown(socket.SHUT_RDWR)

    @staticmethod
    def _pass_back(hub: socket.socket, machine: socket.socket) -> None:
        with suppress(OSError):
            while piece := hub.recv(65536):
                machine.sendall(piece)
            machine.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> LineRelay:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in self._sockets:
            sock.close()


def come(address: str) -> HubClient:
    return HubClient.connect(address, token=TOKEN, machine="worker/0", address="127.0.0.1", workers=1, connect_s=5.0)


def test_a_machine_that_comes_through_a_relay_is_refused(hub: Hub) -> None:
    with LineRelay(hub.address) as relay, pytest.raises(AccessDenied, match=f"dialled {relay.address}"):
        come(relay.address)
    assert hub.connected == ()


def met(change: Callable[[int, bytes], bytes], monkeypatch: pytest.MonkeyPatch) -> tuple[Lines, Lines, Any, Any]:
    """Both ends of a connection, with somebody in between who owns the hub's address: all see the same one."""
    monkeypatch.setattr("deepvm.runtime.hub.json_lines.local_address", lambda _: "10.0.0.9:7071")
    monkeypatch.setattr("deepvm.runtime.hub.json_lines.dialled_address", lambda _: "10.0.0.9:7071")
    listener = socket.create_server(("127.0.0.1", 0))
    relay = LineRelay(f"127.0.0.1:{listener.getsockname()[1]}", change)
    found: list[Any] = []

    def serve() -> None:
        lines = Lines(listener.accept()[0])
        found.append(lines)
        try:
            found.append(accept_handshake(lines, TOKEN))
        except HubGone as gone:
            found.append(gone)

    thread = threading.Thread(target=serve)
    thread.start()
    host, _, port = relay.address.rpartition(":")
    machine = Lines(socket.create_connection((host, int(port)), timeout=10))
    try:
        connect_handshake(machine, TOKEN, machine="worker/0", workers=1)
    except AccessDenied as denied:
        found.append(denied)
    thread.join(10)
    listener.close()
    return found[0], machine, found[1], relay


def closed(*ends: Any) -> None:
    for end in ends:
        end.__exit__() if isinstance(end, LineRelay) else end.close()


def test_what_a_machine_says_of_itself_cannot_be_changed_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    hub, machine, heard, relay = met(lambda _, line: line.replace(b"worker/0", b"worker/1"), monkeypatch)
    closed(hub, machine, relay)
    assert isinstance(heard, HubGone)
    assert "tag" in str(heard)


@pytest.mark.parametrize("harm", ["changed", "added", "repeated", "left out", "untagged"])
def test_messages_that_were_changed_added_repeated_or_left_out_end_the_connection(
    harm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(number: int, line: bytes) -> bytes:
        if number != 2:  # after hello and about
            return line
        false = json.dumps({"say": "failed", "error": "because I say so"}).encode() + b"\n"
        return {
            "changed": line.replace(b"beat", b"fail"),
            "added": line[:33] + false + line,
            "repeated": line + line,
            "left out": b"",
            "untagged": line[33:],
        }[harm]

    hub, machine, heard, relay = met(change, monkeypatch)
    try:
        assert heard["machine"] == "worker/0"
        machine.send("beat")
        machine.send("beat", again=True)
        if harm == "repeated":
            assert hub.receive(10) == {"say": "beat"}
        with pytest.raises(HubGone, match="tag"):
            hub.receive(10)
    finally:
        closed(hub, machine, relay)


def test_both_ends_receive_messages_where_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    hub, machine, heard, relay = met(lambda _, line: line, monkeypatch)
    try:
        assert (heard["machine"], heard["workers"]) == ("worker/0", 1)
        for number in range(3):
            machine.send("beat", number=number)
            assert hub.receive(10) == {"say": "beat", "number": number}
            hub.send("round", number=number)
            assert machine.receive(10) == {"say": "round", "number": number}
    finally:
        closed(hub, machine, relay)


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000,
        b"\xff\xfe",
        b'{"say": 7}',
        b'{"say": "hello", "version": 2, "proof": "\\ud800"}',
        b'{"say": "hello", "version": 2, "nonce": [], "proof": {}, "address": 5}',
    ],
)
def test_what_is_not_a_message_costs_its_sender_the_connection_and_the_hub_nothing(hub: Hub, line: bytes) -> None:
    host, _, port = hub.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.sendall(line + b"\n")
        with suppress(ConnectionResetError):
            while sock.recv(65536):
                pass
    link = come(hub.address)
    assert link.name == "worker/0"
    link.close()
