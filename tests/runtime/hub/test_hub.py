"""Machines meet at the hub over real connections; one that is killed is missed at once."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from deepvm.errors import AccessDenied, UsageError
from deepvm.events import Event
from deepvm.runtime.cluster import Machine
from deepvm.runtime.hub.client import HubClient
from deepvm.runtime.hub.hub import Hub
from deepvm.runtime.run_spec import RunSpec
from tests.support.waiting import wait_until

TOKEN = "t" * 32
WAIT_S = 10.0  # less than the silence that the hub takes for death


def machine(name: str) -> Machine:
    role: Any = name.partition("/")[0]
    market: Any = "spot" if role == "worker" else "on-demand"
    return Machine(
        name=name, role=role, instance="x", market=market, usd_per_hour=1.0, on_demand_usd_per_hour=3.0
    )  # fmt: skip


MACHINES = [machine(name) for name in ("memory/0", "worker/0", "worker/1")]


@pytest.fixture
def hub() -> Iterator[Hub]:
    spec = RunSpec(run="r", script="x.py", max_restarts=0)
    found = Hub(MACHINES, spec, token=TOKEN).start()
    yield found
    found.close()


@pytest.fixture
def come(hub: Hub) -> Iterator[Callable[..., HubClient]]:
    links: list[HubClient] = []

    def _come(name: str, **given: Any) -> HubClient:
        told: list[Any] = []
        link = HubClient.connect(
            hub.address, token=TOKEN, machine=name, address="127.0.0.1", workers=1, connect_s=5.0, **given
        )
        link.messages = told  # type: ignore[attr-defined]
        link.start(on_notice=told.append, on_broken=lambda: told.append("broken"), on_end=told.append)
        links.append(link)
        return link

    yield _come
    for link in links:
        link.close()


def events(hub: Hub, kind: str) -> list[Event]:
    found = []
    while True:
        try:
            found.append(hub.events.get_nowait())
        except queue.Empty:
            return [event for event in found if event.kind == kind]


def group(come: Callable[..., HubClient]) -> tuple[HubClient, HubClient, HubClient]:
    memory, first, second = come("memory/0"), come("worker/0"), come("worker/1")
    first.send("join")
    second.send("join")
    memory.send("memory", address="127.0.0.1:7070")
    assert first.await_group(0, WAIT_S) is not None
    assert second.await_group(0, WAIT_S) is not None
    return memory, first, second


def test_a_group_is_formed_once_the_memory_nodes_listen(hub: Hub, come: Callable[..., HubClient]) -> None:
    memory, first, second = come("memory/0"), come("worker/0"), come("worker/1")
    second.send("join")
    first.send("join")
    assert first.await_group(0, 0.3) is None
    memory.send("memory", address="127.0.0.1:7070")
    found = second.await_group(0, WAIT_S)
    assert found is not None
    assert (found.number, found.rank, found.stores) == (1, 1, ("127.0.0.1:7070",))
    assert first.spec.script == "x.py"
    first.send("endpoint", round=1, endpoint="127.0.0.1:4711")
    assert second.await_endpoint(1, WAIT_S) == "127.0.0.1:4711"
    assert events(hub, "group")[0].data["machines"] == ["worker/0", "worker/1"]


def test_a_machine_that_vanishes_is_missed_at_once_and_replaced(hub: Hub, come: Callable[..., HubClient]) -> None:
    _, first, second = group(come)
    saved = Event(at_s=1.0, kind="save", data={"step": 10, "state": "remote", "seconds": 0.1})
    first.send("event", line=saved.to_line())
    wait_until(lambda: hub.progress.saved_step == 10)
    second.close()
    assert first.await_broken(1, WAIT_S) == "worker/1"
    first.send("join")
    wait_until(lambda: "worker/1" not in hub.connected)
    again = come("worker/1")
    assert (first.stores, again.stores) == ((), ("127.0.0.1:7070",)), "where it finds a checkpoint, if there is one"
    again.send("join")
    found = first.await_group(1, WAIT_S)
    assert found is not None
    assert found.number == 2
    assert "broken" in first.messages  # type: ignore[attr-defined]


def test_whose_workers_fail_first_is_named_and_the_others_are_excused(hub: Hub, come: Callable[..., HubClient]) -> None:
    _, first, second = group(come)
    second.send("failing", error="ZeroDivisionError: my own mistake")
    assert first.await_broken(1, WAIT_S) == "worker/1"
    first.send("failing", error="Connection closed by peer")
    assert second.await_broken(1, WAIT_S) == "worker/1"
    second.send("failed", error="ZeroDivisionError: my own mistake")
    wait_until(lambda: hub.failed)
    assert "worker/1" in str(hub.failed)
    assert "my own mistake" in hub.failures["worker/1"]


def test_it_is_finished_when_all_are(hub: Hub, come: Callable[..., HubClient]) -> None:
    _, first, second = group(come)
    first.send("finished")
    assert not hub.finished.wait(0.2)
    second.send("finished")
    assert hub.finished.wait(WAIT_S)
    assert first.await_over(1)


def test_a_notice_reaches_all_with_what_is_to_be_done(hub: Hub, come: Callable[..., HubClient]) -> None:
    _, first, second = group(come)
    step = Event(at_s=time.time(), kind="step", data={"step": 7, "seconds": 0.1, "world_size": 2})
    first.send("event", line=step.to_line())
    wait_until(lambda: hub.progress.step == 7)
    second.send("notice", action="terminate", at_s=time.time() + 60, source="test")
    told: Any = wait_until(lambda: first.messages)  # type: ignore[attr-defined]
    assert (told[0]["machine"], told[0]["choice"]) == ("worker/1", "save")
    wait_until(lambda: second.messages)  # type: ignore[attr-defined]


def test_a_notice_before_the_first_step_waits_for_no_step(hub: Hub, come: Callable[..., HubClient]) -> None:
    _, first, second = group(come)
    second.send("notice", action="terminate", at_s=None, source="test")
    told: Any = wait_until(lambda: first.messages)  # type: ignore[attr-defined]
    assert (told[0]["step"], told[0]["choice"]) == (0, "rely")


def test_strangers_are_refused(hub: Hub, come: Callable[..., HubClient]) -> None:
    come("worker/0")
    kwargs: Any = {"address": None, "workers": 1, "connect_s": 2.0}
    with pytest.raises(AccessDenied):
        HubClient.connect(hub.address, token="wrong", machine="worker/1", **kwargs)
    with pytest.raises(UsageError, match="connected already"):
        HubClient.connect(hub.address, token=TOKEN, machine="worker/0", **kwargs)
    with pytest.raises(UsageError, match="not a machine of this run"):
        HubClient.connect(hub.address, token=TOKEN, machine="worker/9", **kwargs)
    assert come("worker/auto").name == "worker/1"
    with socket.create_connection(tuple(hub.address.rsplit(":", 1)), timeout=5) as sock:  # type: ignore[arg-type]
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(100_000))
    assert hub.connected == ("worker/0", "worker/1")


def dial(hub: Hub) -> socket.socket:
    host, port = hub.address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=5)


def test_idle_strangers_keep_no_machine_out(hub: Hub, come: Callable[..., HubClient]) -> None:
    before = threading.active_count()
    with ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(dial(hub))
        group(come)
        wait_until(
            lambda: threading.active_count() <= before + 80, timeout_s=5.0
        )  # long before a handshake's time is over
        assert hub.connected == ("memory/0", "worker/0", "worker/1")


def test_a_stranger_cannot_send_a_long_line(hub: Hub, come: Callable[..., HubClient]) -> None:
    with dial(hub) as sock:
        sock.recv(4096)  # who the hub is
        sock.sendall(b"x" * 8200)
        with suppress(ConnectionResetError):
            assert sock.recv(100) == b"", "it waits for the end of the line"
    first = come("worker/0")
    first.send("failing", error="x" * 100_000)  # a machine may
    wait_until(lambda: hub.connected == ("worker/0",))


def test_a_machine_that_leaves_is_to_blame_and_not_those_whose_workers_fail_without_it(
    hub: Hub, come: Callable[..., HubClient]
) -> None:
    _, first, second = group(come)
    second.send("leave")
    second.send("join")  # its agent may not know yet
    assert first.await_broken(1, WAIT_S) == "worker/1"
    first.send("failing", error="Connection closed by peer")
    first.send("join")
    assert first.await_group(1, 0.3) is None
    assert first.await_broken(1, WAIT_S) == "worker/1"
    second.close()
    wait_until(lambda: "worker/1" not in hub.connected)
    come("worker/1").send("join")
    assert first.await_group(1, WAIT_S) is not None


def test_a_memory_node_that_comes_back_elsewhere_makes_a_new_group_with_its_address(
    hub: Hub, come: Callable[..., HubClient]
) -> None:
    memory, first, second = group(come)
    memory.send("memory", address="127.0.0.1:7070")
    assert first.await_broken(1, 0.3) is None, "it is where it was"
    memory.close()
    wait_until(lambda: "memory/0" not in hub.connected)
    assert first.await_broken(1, 0.3) is None, "training goes on without it"
    come("memory/0").send("memory", address="127.0.0.1:7171")
    assert first.await_broken(1, WAIT_S) == "memory/0"
    first.send("join")
    second.send("join")
    found = second.await_group(1, WAIT_S)
    assert found is not None
    assert found.stores == ("127.0.0.1:7171",)


def test_lines_that_are_no_events_cost_nothing_but_themselves(hub: Hub, come: Callable[..., HubClient]) -> None:
    _, first, _ = group(come)
    whole = Event(at_s=time.time(), kind="step", data={"step": 7, "seconds": 0.1, "world_size": 2}).to_line()
    for line in (
        whole[:40] + whole,
        "",
        "null",
        '"step"',
        whole.replace("7", '"seven"'),
        whole.replace('"step": 7, ', ""),
    ):
        first.send("event", line=line)
    first.send("event", line='{"at_s": NaN, "kind": "machine-up"}')
    first.send("event", line=whole)
    wait_until(lambda: hub.progress.step == 7)
    assert [event.data["step"] for event in events(hub, "step")] == [7]
    assert "worker/0" in hub.connected


@pytest.mark.chaos
def test_two_hundred_thousand_events_of_one_machine_do_not_keep_the_others_waiting(
    hub: Hub, come: Callable[..., HubClient]
) -> None:
    _, first, second = group(come)
    line = Event(at_s=1.0, kind="step", data={"step": 1, "seconds": 0.1, "world_size": 2}).to_line()
    flood = threading.Thread(target=lambda: [first.send("event", line=line) for _ in range(200_000)])
    flood.start()
    for number in range(50):
        second.send("endpoint", round=1, endpoint=f"127.0.0.1:{number}")
        wait_until(lambda wanted=f"127.0.0.1:{number}": second.await_endpoint(1, WAIT_S) == wanted)
    assert hub.events.qsize() < 200_000, "the others were answered in the middle of the flood"
    flood.join(60.0)
    assert not flood.is_alive()
    wait_until(lambda: hub.events.qsize() >= 200_000, "the flood's end")
    assert len(events(hub, "step")) == 200_000


def test_a_machine_that_says_nothing_any_more_is_missed(
    hub: Hub, come: Callable[..., HubClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepvm.runtime.hub.hub.DEAD_S", 0.5)
    monkeypatch.setattr("deepvm.runtime.hub.client.BEAT_S", 0.05)
    _, first, second = group(come)
    second.ended = "mute"  # it beats no more
    assert first.await_broken(1, WAIT_S) == "worker/1"
    wait_until(lambda: hub.connected == ("memory/0", "worker/0"))


@pytest.mark.parametrize("problem", [RuntimeError("can't start new thread"), MemoryError()])
def test_a_hub_that_could_start_no_thread_accepts_the_next_machine(
    hub: Hub, come: Callable[..., HubClient], monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    start, failed = threading.Thread.start, threading.Event()

    def fail_once(thread: threading.Thread) -> None:
        if thread.name.startswith("deepvm-127.0.0.1:") and not failed.is_set():
            failed.set()
            raise problem
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail_once)
    with socket.create_connection(hub.address.rsplit(":", 1), timeout=WAIT_S) as sock:
        assert sock.recv(1) == b"", "it is sent away, not left waiting"
    assert failed.is_set()
    assert come("worker/0").name == "worker/0"
