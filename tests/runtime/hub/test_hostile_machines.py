"""What a machine says to the hub, whatever it is, harms nobody but that machine."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from deepvm.events import Event
from deepvm.runtime.cluster import Machine
from deepvm.runtime.hub.hub import Hub
from deepvm.runtime.hub.json_lines import HubGone, Lines, connect_handshake
from deepvm.runtime.run_spec import RunSpec

TOKEN = "secret"


def machine(number: int) -> Machine:
    return Machine(
        name=f"worker/{number}", role="worker", instance="x", market="spot", usd_per_hour=1.0,
        on_demand_usd_per_hour=None,
    )  # fmt: skip


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub([machine(0), machine(1)], RunSpec(script="x.py", after_loss="wait:5s"), token=TOKEN).start()
    yield hub
    hub.close()


def connected(hub: Hub, name: str, **about: Any) -> tuple[Lines, socket.socket]:
    host, _, port = hub.address.rpartition(":")
    sock = socket.create_connection((host, int(port)), timeout=5)
    lines = Lines(sock)
    connect_handshake(lines, TOKEN, machine=name, **about)
    assert lines.receive(5)["say"] == "welcome"
    return lines, sock


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000,
        b'{"say": "beat", "x": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'"beat"',
        b'{"say": 3}',
        b'{"say": "endpoint"}',
        b'{"say": "notice", "action": "terminate", "at_s": []}',
        b'{"say": "notice", "action": "terminate", "at_s": 1e999}',
        b'{"say": "beat", "x": "\\ud800"}',
        b"\xff\xfe{\0}\0",
    ],
)
def test_a_malformed_line_ends_one_connection(hub: Hub, line: bytes) -> None:
    lines, sock = connected(hub, "worker/0")
    sock.sendall(line + b"\n")
    with pytest.raises(HubGone, match="left"):
        lines.receive(5)
    other, _ = connected(hub, "worker/1")
    other.close()
    lines.close()


@pytest.mark.parametrize(
    "event",
    [
        {"kind": "group", "at_s": 1.0, "machines": []},  # the supervisor's own
        {"kind": "run-ended", "at_s": 1.0},
        {"kind": "step", "at_s": 1.0},
        {"kind": "step", "at_s": 1.0, "step": "3"},
        {"kind": "step", "at_s": 1.0, "step": 3.5},
        {"kind": "step", "at_s": 1.0, "step": True},
        {"kind": "step", "at_s": 1e300, "step": 3},
        {"kind": "step", "at_s": "now", "step": 3},
        {"kind": "save", "at_s": 1.0, "step": 3, "state": "remote", "seconds": []},
        {"kind": ["step"], "at_s": 1.0, "step": 3},
    ],
)
def test_an_event_that_no_trainer_tells_is_left_out(hub: Hub, event: dict[str, Any]) -> None:
    lines, _ = connected(hub, "worker/0")
    lines.send("event", line=json.dumps(event))
    good = Event(at_s=2.0, kind="step", data={"step": 7})
    lines.send("event", line=good.to_line())
    found = hub.events.get(timeout=5)
    assert (found.kind, found.machine, dict(found.data)) == ("step", "worker/0", {"step": 7})
    assert hub.events.empty()
    lines.close()


@pytest.mark.parametrize("workers", [-1, 10**9, "x", 1.5, [], True])
def test_a_machine_of_no_known_size_is_not_admitted(hub: Hub, workers: Any) -> None:
    host, _, port = hub.address.rpartition(":")
    lines = Lines(socket.create_connection((host, int(port)), timeout=5))
    connect_handshake(lines, TOKEN, machine="worker/0", workers=workers)
    with pytest.raises(HubGone, match="left"):
        lines.receive(5)
    assert hub.connected == ()
    lines.close()
