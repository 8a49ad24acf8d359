"""Groups of the hub as torch's rendezvous: stores, rounds that break before they begin, and ends."""

from __future__ import annotations

import socket
from contextlib import closing
from typing import Any, cast

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError, RendezvousTimeoutError

from deepvm.protocol.addresses import split_address
from deepvm.runtime.agent import rendezvous as module
from deepvm.runtime.agent.rendezvous import HubRendezvous, listening_store
from deepvm.runtime.hub.client import Group, HubClient

HERE = "127.0.0.1"


class Hub:
    """A hub's client that plays groups, each with the address of its store."""

    def __init__(self, *rounds: tuple[int, str | None]) -> None:
        """``rounds``: the rank of this machine, and the endpoint that the others tell it."""
        self.rounds = list(rounds)
        self.joined, self.ended = True, None
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.after: list[int] = []
        self.broken_by: str | None = None
        self.endpoint: str | None = None

    def join(self) -> None:
        self.said.append(("join", {}))

    def send(self, what: str, **fields: Any) -> None:
        self.said.append((what, fields))

    def await_group(self, after: int, timeout_s: float) -> Group | None:
        self.after.append(after)
        if not self.rounds:
            self.ended = "the run is over"  # type: ignore[assignment]
            return None
        rank, self.endpoint = self.rounds.pop(0)
        members = tuple({"address": HERE, "name": f"worker/{i}"} for i in range(2))
        return Group(number=after + 1, rank=rank, members=members, stores=("memory://x:1",))

    def await_endpoint(self, number: int, timeout_s: float) -> str | None:
        return self.endpoint

    def await_broken(self, number: int, timeout_s: float) -> str | None:
        return self.broken_by

    def broken(self, number: int) -> bool:
        return self.broken_by is not None


def made(hub: Hub) -> HubRendezvous:
    return HubRendezvous(cast(HubClient, hub), "run-1")


def test_rank_0_keeps_the_store_and_tells_its_address() -> None:
    hub = Hub((0, None))
    handler = made(hub)
    found = handler.next_rendezvous()
    assert (found.rank, found.world_size) == (0, 2)
    assert found.bootstrap_store_info.master_addr == HERE
    assert hub.said == [("endpoint", {"round": 1, "endpoint": f"{HERE}:{found.bootstrap_store_info.master_port}"})]
    assert hub.joined is False
    found.store.set("a", "b")
    assert found.store.get("a") == b"b"


def test_rounds_that_break_before_they_begin_are_followed_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(socket.create_server((HERE, 0))) as server:
        nobody = f"{HERE}:{server.getsockname()[1]}"
    store = listening_store(HERE)
    hub = Hub((1, None), (1, nobody), (1, f"{HERE}:{store.port}"))

    def await_endpoint(number: int, timeout_s: float) -> str | None:
        monkeypatch.setattr(module, "STORE_S", 0.2 if hub.endpoint == nobody else 60.0)
        return hub.endpoint

    monkeypatch.setattr(hub, "await_endpoint", await_endpoint)
    handler = made(hub)
    found = handler.next_rendezvous()
    assert (found.rank, found.world_size, found.bootstrap_store_info.master_port) == (1, 2, store.port)
    assert hub.said == [("join", {})] * 2, "it had joined the first one"
    assert hub.after == [0, 1, 2]
    store.set("from", "rank 0")
    assert found.store.get("from") == b"rank 0"
    assert handler.group is not None
    assert handler.group.number == 3


def test_a_run_that_ended_ends_the_rendezvous_gracefully() -> None:
    hub = Hub()
    handler = made(hub)
    assert not handler.is_closed()
    with pytest.raises(RendezvousGracefulExitError, match="the run is over"):
        handler.next_rendezvous()
    assert handler.is_closed()


def test_a_group_that_never_forms_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GROUP_S", 0.0)
    with pytest.raises(RendezvousTimeoutError, match="no group was formed within 0 s"):
        made(Hub((0, None))).next_rendezvous()


def test_torch_hears_of_a_broken_round_and_of_no_other_waiting_machine() -> None:
    hub = Hub((0, None))
    handler = made(hub)
    assert (handler.num_nodes_waiting(), handler.broke(0.0)) == (0, None)
    hub.broken_by = "worker/1"
    assert (handler.num_nodes_waiting(), handler.broke(0.0)) == (0, None), "there is no round yet"
    handler.next_rendezvous()
    assert (handler.num_nodes_waiting(), handler.broke(0.0)) == (1, "worker/1")
    hub.broken_by = None
    assert handler.num_nodes_waiting() == 0
    handler.set_closed()
    assert not handler.is_closed()
    assert (handler.get_backend(), handler.get_run_id(), handler.use_agent_store, handler.shutdown()) == (
        "deepvm", "run-1", True, True
    )  # fmt: skip


def test_a_store_listens_at_its_address_alone() -> None:
    store = listening_store(HERE)
    assert split_address(f"{HERE}:{store.port}") == (HERE, store.port)
    with pytest.raises(OSError, match=r"refused|unreachable|timed out"):
        socket.create_connection(("127.0.0.2", store.port), timeout=5)
