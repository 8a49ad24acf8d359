"""Messages between a machine and its hub, over a real connection: limits, tags, and what each side refuses."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from deepvm.errors import AccessDenied, UsageError
from deepvm.protocol import frames
from deepvm.protocol.handshake import Handshake
from deepvm.runtime.cluster import Machine
from deepvm.runtime.hub import json_lines
from deepvm.runtime.hub.connections import MachineConnection, assign_name
from deepvm.runtime.hub.json_lines import (
    MOST_LINE_BYTES,
    MOST_MESSAGE_BYTES,
    STRANGERS_LINE_BYTES,
    HubGone,
    Lines,
    accept_handshake,
    connect_handshake,
)

Pair = tuple[Lines, Lines, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """The hub's end, the machine's end, and the machine's socket."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        machine = socket.create_connection(server.getsockname())
        hub, _ = server.accept()
    ends = Lines(hub), Lines(machine)
    yield (*ends, machine)
    for one in ends:
        one.close()


def shake(pair: Pair, *, machines: str = "t", **about: Any) -> dict[str, Any]:
    found: list[Any] = []

    def accept() -> None:
        try:
            found.append(accept_handshake(pair[0], "t"))
        except HubGone as error:
            found.append(error)

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        connect_handshake(pair[1], machines, **about)
    finally:
        thread.join(20)
    if isinstance(found[0], Exception):
        raise found[0]
    return dict(found[0])


def test_messages_come_in_order_and_split_as_they_like(pair: Pair) -> None:
    hub, machine, sock = pair
    sent = machine.send("a", n=1)
    assert json.loads(sent) == {"say": "a", "n": 1}
    assert hub.receive(5) == {"say": "a", "n": 1}
    assert hub.last == sent
    for piece in (b'{"say": "b"}\n{"say"', b': "c"}\n'):
        sock.sendall(piece)
    assert [hub.receive(5)["say"], hub.receive(5)["say"]] == ["b", "c"]


def test_silence_is_the_end_after_its_time(pair: Pair) -> None:
    with pytest.raises(HubGone, match="no message for 0 s"):
        pair[0].receive(0.05)
    pair[1].close()
    with pytest.raises(HubGone, match="the other side left"):
        pair[0].receive(5)


def test_strangers_have_short_lines_and_machines_long_ones(pair: Pair) -> None:
    hub, machine, sock = pair
    shake(pair)
    long = "x" * (MOST_MESSAGE_BYTES - len(json.dumps({"say": "a", "x": ""})))
    threading.Thread(target=machine.send, args=("a",), kwargs={"x": long}).start()
    assert len(hub.receive(20)["x"]) == len(long)
    with pytest.raises(HubGone, match=f"a message 'a' of {MOST_MESSAGE_BYTES + 1} bytes is too long"):
        machine.send("a", x=long + "x")
    threading.Thread(target=sock.sendall, args=(b"x" * (MOST_LINE_BYTES + 10**6),), daemon=True).start()
    with pytest.raises(HubGone, match=f"a message of more than {MOST_LINE_BYTES} bytes"):
        hub.receive(20)


def test_a_stranger_that_ends_no_line_is_cut_off(pair: Pair) -> None:
    pair[2].sendall(b"x" * (2 * STRANGERS_LINE_BYTES + 1))
    with pytest.raises(HubGone, match=f"a message of more than {STRANGERS_LINE_BYTES} bytes"):
        pair[0].receive(5)


@pytest.mark.parametrize("line", [b"[]", b"5", b"{}", b'{"say": 5}', b"{", b"\xff"])
def test_lines_that_say_nothing_are_refused(pair: Pair, line: bytes) -> None:
    pair[2].sendall(line + b"\n")
    with pytest.raises(HubGone, match="not a valid message"):
        pair[0].receive(5)


def test_both_sides_prove_the_token_and_tell_about_themselves(pair: Pair) -> None:
    assert shake(pair, machine="worker/0", workers=2) == {"say": "about", "machine": "worker/0", "workers": 2}
    pair[0].send("welcome")
    assert pair[1].receive(5) == {"say": "welcome"}
    pair[2].sendall(b'{"say": "beat"}\n')
    with pytest.raises(HubGone, match="wrong tag: messages were changed, added or dropped on the way"):
        pair[0].receive(5)


def test_a_tagged_message_that_is_repeated_is_refused(pair: Pair) -> None:
    shake(pair)
    hub, machine, sock = pair
    machine.send("a")
    hub.receive(5)
    tags = hub._tags
    sock.sendall(b"0" * (2 * tags.size) + b' {"say": "a"}\n')
    with pytest.raises(HubGone, match="wrong tag"):
        hub.receive(5)


def test_a_wrong_token_is_refused_with_the_reason(pair: Pair) -> None:
    with pytest.raises(AccessDenied, match="the hub refuses this machine: 'wrong token'"):
        shake(pair, machines="other")


def ignore(_: object) -> None:
    """Discard what a call returns."""


def answer_as_hub(pair: Pair, answer: Callable[[Lines, dict[str, Any], bytes, str], None], **hello: Any) -> None:
    """What a machine makes of a hub that greets and answers like this."""

    def serve() -> None:
        nonce = frames.new_nonce()
        greeting = pair[0].send("hub", **{"version": json_lines.VERSION, "nonce": nonce, **hello})
        with contextlib.suppress(HubGone):
            answer(pair[0], pair[0].receive(5), greeting, nonce)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        connect_handshake(pair[1], "t")
    finally:
        pair[1].close()
        thread.join(5)


def test_a_hub_that_does_not_know_the_token_is_not_believed(pair: Pair) -> None:
    with pytest.raises(AccessDenied, match="the hub does not know this machine's token"):
        answer_as_hub(pair, lambda lines, *_: ignore(lines.send("known", proof="0" * 64)))


def test_a_hub_of_another_version_is_left(pair: Pair) -> None:
    with pytest.raises(HubGone, match="the peer is not a hub of version"):
        answer_as_hub(pair, lambda *_: None, version=json_lines.VERSION + 1)


@pytest.mark.parametrize("change", [{"version": json_lines.VERSION + 1}, {"say": "hallo"}, {"version": None}])
def test_a_machine_of_another_version_is_left(pair: Pair, change: dict[str, Any]) -> None:
    def machine() -> None:
        pair[1].receive(5)
        fields = {"version": json_lines.VERSION, "nonce": "n", **change}
        pair[1].send(fields.pop("say", "hello"), **fields)

    threading.Thread(target=machine, daemon=True).start()
    with pytest.raises(HubGone, match=f"the peer is not a machine of version {json_lines.VERSION}"):
        accept_handshake(pair[0], "t")


def test_a_machine_that_dialled_another_address_came_through_a_relay(pair: Pair) -> None:
    answers: list[dict[str, Any]] = []

    def machine() -> None:
        greeting = pair[1].receive(5)
        handshake = Handshake(
            protocol="hub", server_nonce=greeting["nonce"], client_nonce="n", greeting=pair[1].last,
            address="10.9.8.7:1",
        )  # fmt: skip
        proof = handshake.proof("t", "client")
        pair[1].send("hello", version=json_lines.VERSION, nonce="n", address="10.9.8.7:1", proof=proof)
        answers.append(pair[1].receive(5))

    thread = threading.Thread(target=machine)
    thread.start()
    with pytest.raises(
        HubGone, match=r"the machine dialled 10\.9\.8\.7:1, but the hub is at .*: a relay is in between"
    ):
        accept_handshake(pair[0], "t")
    thread.join(20)
    assert "a relay is in between" in answers[0]["why"]


def test_a_silent_peer_is_waited_for_no_longer_than_the_handshake(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lines, "HANDSHAKE_S", 0.05)
    with pytest.raises(HubGone, match="no message for 0 s"):
        accept_handshake(pair[0], "t")
    assert pair[1].receive(5)["say"] == "hub"
    with pytest.raises(HubGone, match="no message for 0 s"):
        connect_handshake(pair[1], "t")


def test_sending_to_a_machine_that_has_ended_is_its_receivers_matter(pair: Pair) -> None:
    connection = MachineConnection("worker/0", pair[0], "127.0.0.1")
    connection.send("a", n=1)
    assert pair[1].receive(5)["n"] == 1
    pair[0].close()
    connection.send("b")
    with pytest.raises(HubGone, match="the other side left"):
        pair[0].send("b")


# --- names -----------------------------------------------------------------------------------------------------------


def machine_named(name: str) -> Machine:
    role: Any = name.partition("/")[0]
    return Machine(
        name=name, role=role, instance="x", market="spot", usd_per_hour=1.0, on_demand_usd_per_hour=None
    )  # fmt: skip


MACHINES = {name: machine_named(name) for name in ("worker/0", "worker/1", "memory/0")}


def test_a_machine_gets_the_name_it_asks_for_or_the_first_free_one_of_its_role() -> None:
    assert assign_name("worker/1", MACHINES, set()) == "worker/1"
    assert assign_name("worker/auto", MACHINES, set()) == "worker/0"
    assert assign_name("worker/auto", MACHINES, {"worker/0", "memory/0"}) == "worker/1"
    assert assign_name("memory/auto", MACHINES, {"worker/0"}) == "memory/0"


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ("worker/auto", "every worker of this run is connected already"),
        ("worker/0", "worker/0 is connected already"),
        ("worker/7", "worker/7 is not a machine of this run: it has worker/0, worker/1, memory/0"),
        ("anchor/auto", "every anchor of this run is connected already"),
    ],
)
def test_a_name_that_is_taken_or_unknown_is_refused(asked: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        assign_name(asked, MACHINES, {"worker/0", "worker/1"})
