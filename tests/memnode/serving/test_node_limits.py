"""What one client can take from the others: each kind of greed has a limit."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import deepvm
from deepvm.errors import AccessDenied, NotFound, StoreError, StoreUnavailable, UsageError
from deepvm.memnode.peer_rule import PeerRule, _resolve
from deepvm.memnode.writeback.peers import Peers
from deepvm.protocol import frames
from deepvm.protocol.acceptor import Acceptor, Peer
from deepvm.protocol.frames import Kind
from deepvm.store.base import Manifest
from deepvm.store.memory.store import MemoryStore
from tests.support.certificates import make_certificate
from tests.support.memnode.client import BLOCK, Client, NodeProcess, chunks_of, content, manifest_of
from tests.support.waiting import wait_until

SIZE = 3 * BLOCK + 100


def dial(address: str) -> socket.socket:
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=10)


# --- connections --------------------------------------------------------------------------------------------------


def test_idle_connections_of_strangers_keep_no_client_out(start_node: Any, connect: Any) -> None:
    node = start_node(token="t")
    first = connect(node.address, "run", token="t")
    with ExitStack() as stack:
        for _ in range(400):
            stack.enter_context(dial(node.address))
        for _ in range(10):
            connect(node.address, "run", token="t").status()
        first.save(1, content(1, SIZE))
        assert node.connections <= node.settings.limits.handshakes + 11


def test_a_tls_handshake_that_is_never_finished_keeps_no_client_out(start_node: Any, tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    node = start_node(token="t", tls_cert=cert, tls_key=key, limits={"handshakes": 4})
    with ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(dial(node.address))
        store = MemoryStore.from_url(f"memory://{node.address}?tls={cert}", token="t")
        assert store.runs() == []
        store.close()
    wait_until(lambda: node.connections == 0)


def test_the_oldest_stranger_of_the_host_with_most_is_dropped() -> None:
    dropped: list[Peer] = []
    acceptor = Acceptor(
        "127.0.0.1:0", lambda peer: None, connections=2, connections_of_a_host=1, handshakes=3,
        dropped=lambda peer, reason: dropped.append(peer), failed=lambda error: None,
    )  # fmt: skip
    with ExitStack() as stack:
        stack.callback(acceptor.stop)

        def enter(host: str) -> Peer:
            ours, theirs = socket.socketpair()
            stack.enter_context(ours)
            stack.enter_context(theirs)
            return acceptor.enter(ours, (host, 1))

        quiet, *loud = enter("10.0.0.1"), enter("10.0.0.2"), enter("10.0.0.2")
        assert dropped == []
        fourth = enter("10.0.0.3")
        assert dropped == [loud[0]]
        assert "too many connections" in str(acceptor.admit(loud[0]))
        assert acceptor.admit(quiet) is None
        again = enter("10.0.0.1")
        assert "clients of 10.0.0.1" in str(acceptor.admit(again))
        assert acceptor.admit(fourth) is None
        assert "2 clients are connected" in str(acceptor.admit(loud[1]))
        for peer in (quiet, fourth, *loud, again):
            acceptor.leave(peer)
        assert len(acceptor) == 0


def test_a_client_above_the_limit_is_refused_with_the_reason(start_node: Any, connect: Any) -> None:
    node = start_node(limits={"connections_of_a_host": 2})
    for _ in range(2):
        connect(node.address)
    with pytest.raises(StoreUnavailable, match=r"2 clients of 127\.0\.0\.1 are connected"):
        connect(node.address)


# --- memory -------------------------------------------------------------------------------------------------------


def test_ranks_states_and_manifests_do_not_grow_beyond_their_limit(start_node: Any, connect: Any) -> None:
    node = start_node()
    most, state = node.settings.kept_documents_bytes, json.dumps("x" * (15 * 2**20)).encode()

    def leave_states() -> None:
        for number in range(20):
            client = connect(node.address, f"run-{number}")
            client.begin(1, SIZE, world_size=100)
            client.ask(Kind.EXTRA, {"step": 1, "rank": 0}, state)

    def publish() -> None:
        for number in range(20):
            client, data = connect(node.address, f"other-{number}"), content(number, BLOCK)
            client.begin(1, BLOCK)
            client.put(1, 0, data)
            client.publish(manifest_of(data, client.run, 1, facts={"text": "x" * 3 * 2**20}))

    with pytest.raises(StoreUnavailable, match="documents take"):
        leave_states()
    assert 0 < node.kept.used_bytes <= most
    with pytest.raises(StoreUnavailable, match="the manifest of step"):
        publish()
    assert node.kept.used_bytes <= most
    for run in node.runs:
        run.claim("another")
        for step in list(run.checkpoints):
            run.delete(step, None)
    wait_until(lambda: node.kept.used_bytes == 0)


def test_a_state_of_a_million_lists_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    """Parsing 15 MiB of them kept all threads of the node waiting for seconds."""
    state = b"[" + b"[]," * (5 * 2**20 - 2) + b"[]]"
    with (
        NodeProcess(tmp_path, capacity="64MiB") as node,
        Client(node.address, "greedy", timeout_s=30) as greedy,
    ):
        before = node.figures()["VmRSS"]
        greedy.begin(1, SIZE)
        with pytest.raises(StoreError, match="at most"):
            greedy.ask(Kind.EXTRA, {"step": 1, "rank": 0}, state)
        manifest = (
            manifest_of(content(1, SIZE), "greedy", 1)
            .to_bytes()
            .replace(b'"facts": {}', b'"facts": {"x": ' + state + b"}")
        )
        greedy.save_chunks(1, content(1, SIZE))
        with pytest.raises(StoreError):
            greedy.ask(Kind.PUBLISH, {"step": 1}, manifest)
        assert node.figures()["VmRSS"] - before < 300_000


def test_a_manifest_far_larger_than_its_checkpoint_is_refused_before_it_is_parsed(
    start_node: Any, connect: Any
) -> None:
    client = connect(start_node().address, "run", timeout_s=30)
    client.begin(1, SIZE)
    client.save_chunks(1, content(1, SIZE))
    whole = manifest_of(content(1, SIZE), "run", 1).to_bytes()
    for piece in (b'"",', b"[],"):
        greedy = whole.replace(b'"facts": {}', b'"facts": {"x": [' + piece * (20 * 2**20) + b"1]}")
        with pytest.raises(StoreError, match="at most 4194368 are allowed"):
            client.ask(Kind.PUBLISH, {"step": 1}, greedy)
    client.publish(manifest_of(content(1, SIZE), "run", 1))
    assert client.read(1) == content(1, SIZE)


def test_announced_documents_hold_up_nobody(start_node: Any, connect: Any) -> None:
    node = start_node(limits={"document_piece_s": 60.0})
    client = connect(node.address, "run")
    greedy = [connect(node.address, "greedy") for _ in range(8)]
    for one in greedy:  # announced, and never sent
        one.send(frames.encode(Kind.PUBLISH, 2, {"step": 1}, frames.MOST_DOCUMENT_BYTES, 0))
    client.save(1, content(1, SIZE))
    client.begin(2, SIZE)
    client.ask(
        Kind.EXTRA, {"step": 2, "rank": 0}, json.dumps("x" * 2**22).encode()
    )  # a large one waits for none either
    assert node.connections == 9  # the others are waited for still


def test_who_announces_a_document_and_sends_none_is_sent_away(start_node: Any, connect: Any) -> None:
    node = start_node(limits={"document_piece_s": 0.1})
    silent = connect(node.address, "greedy")
    silent.send(frames.encode(Kind.PUBLISH, 2, {"step": 1}, frames.MOST_DOCUMENT_BYTES, 0))
    wait_until(lambda: node.connections == 0)


def test_seals_and_keeps_name_no_more_chunks_than_there_are(start_node: Any, connect: Any) -> None:
    client = connect(start_node().address, "run")
    client.save(1, content(1, SIZE))
    client.begin(2, SIZE)
    with pytest.raises(StoreError, match="has 4 chunks, 5 were named"):
        client.seal(2, [0] * 5)
    with pytest.raises(StoreError, match="has 4 chunks, 1000 were named"):
        client.ask(Kind.KEEP, {"step": 2, "from_step": 1}, b"\0" * 12_000)


def test_an_upload_that_shares_blocks_is_not_larger_than_any_node(start_node: Any, connect: Any) -> None:
    client = connect(start_node().address, "run")
    with pytest.raises(StoreUnavailable, match=r"and the node has .* in all: start it with a larger --capacity"):
        client.begin(1, 2**22 * BLOCK, lean=True)


# --- runs ---------------------------------------------------------------------------------------------------------


def test_runs_that_are_only_opened_leave_nothing_behind(start_node: Any, connect: Any, tmp_path: Path) -> None:
    node = start_node(spill=tmp_path, limits={"runs": 50})
    client = connect(node.address)
    for number in range(300):
        client.open_run(f"run-{number}")
    assert len(node.runs) <= 50
    assert os.listdir(tmp_path) == [".node.lock"]


def test_an_empty_run_that_makes_way_takes_its_folder_with_it(start_node: Any, connect: Any, tmp_path: Path) -> None:
    node = start_node(spill=tmp_path, limits={"runs": 2})
    client = connect(node.address)
    for name in ("a", "b", "c", "d"):
        client.open_run(name)
        client.save(1, content(1, SIZE))
        wait_until(lambda: client.steps() == {1: "spilled"})
        client.ask(Kind.DELETE, {"step": 1})
    wait_until(lambda: not node.writeback.workers[0].waiting)
    assert len([name for name in os.listdir(tmp_path) if name[0] != "."]) <= 2


# --- addresses ----------------------------------------------------------------------------------------------------


@contextmanager
def listener(host: str) -> Iterator[tuple[str, list[Any]]]:
    """Counts who dials it."""
    dialled: list[Any] = []
    with socket.create_server((host, 0)) as server:
        server.settimeout(0.05)
        stop = threading.Event()

        def accept() -> None:
            while not stop.is_set():
                try:
                    sock, peer = server.accept()
                except TimeoutError:
                    continue
                dialled.append(peer)
                sock.close()

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"{host}:{server.getsockname()[1]}", dialled
        finally:
            stop.set()
            thread.join(10)


@pytest.mark.parametrize(("peers", "dials"), [(("127.0.0.8/29",), False), (("127.0.0.0/29",), True), ((), True)])
def test_a_manifest_makes_a_node_dial_only_its_peers(
    start_node: Any, connect: Any, tmp_path: Path, peers: tuple[str, ...], dials: bool
) -> None:
    with listener("127.0.0.1") as (address, dialled):
        node = start_node(spill=tmp_path, peers=peers, limits={"flush_s": 0.1})
        client = connect(node.address, "run")
        data = content(1, 4 * BLOCK)
        client.begin(1, len(data), nodes=2, node_index=0, replicas=1)
        for chunk in (0, 2):
            client.put(1, chunk, chunks_of(data)[chunk])
        client.publish(manifest_of(data, "run", 1, nodes=(node.address, address)), node_index=0)
        wait_until(lambda: client.status()["spill_failures"] >= 2)
        assert bool(dialled) == dials
        if not dials:
            assert "--peers" in client.status()["spill_error"]


@pytest.mark.parametrize(
    ("own", "address", "allowed"),
    [
        ("127.0.0.1", "127.0.0.1:7070", True),
        ("127.0.0.1", "10.0.0.9:7070", False),
        ("10.0.0.8", "10.0.0.9:7070", True),
        ("10.0.0.8", "[fd00::9]:7070", True),
        ("10.0.0.8", "127.0.0.1:7070", False),
        ("10.0.0.8", "[::ffff:127.0.0.1]:7070", False),
        ("10.0.0.8", "169.254.169.254:7070", False),
        ("10.0.0.8", "8.8.8.8:7070", False),
        ("10.0.0.8", "10.0.0.9:22", False),
        ("0.0.0.0", "8.8.8.8:7070", True),
        ("0.0.0.0", "169.254.169.254:7070", False),
        ("0.0.0.0", "0.0.0.0:7070", False),
        ("8.8.8.8", "10.0.0.9:7070", True),
    ],
)
def test_a_node_dials_addresses_of_its_own_kind(own: str, address: str, allowed: bool) -> None:
    if allowed:
        PeerRule(own).check(address)
    else:
        with pytest.raises(AccessDenied, match="is not dialled"):
            PeerRule(own).check(address)


def test_named_peers_are_the_only_ones() -> None:
    rule = PeerRule("10.0.0.8", ["node.example", "192.168.0.0/16"])
    rule.check("node.example:7070")
    rule.check("192.168.3.4:7070")
    with pytest.raises(AccessDenied):
        rule.check("10.0.0.9:7070")
    with pytest.raises(UsageError, match="is not a network"):
        PeerRule("10.0.0.8", ["10.0.0.0/99"])


def test_a_host_that_cannot_be_resolved_is_reported() -> None:
    with pytest.raises(StoreUnavailable, match=r"the host 'a\.\.b' cannot be resolved"):
        _resolve("a..b", 7070)


def test_a_node_that_failed_is_not_dialled_again_for_the_same_checkpoint() -> None:
    run: Any = SimpleNamespace(name="run", verifier="")
    peers = Peers(run, PeerRule("127.0.0.1"), token=None, tls=None)
    with socket.socket() as closed:  # nothing listens there
        closed.bind(("127.0.0.1", 0))
        nodes = ("127.0.0.1:7070", f"127.0.0.1:{closed.getsockname()[1]}")
        _fetch_in_vain(peers, manifest_of(content(1, 2 * BLOCK), "run", 1, nodes=nodes, replicas=1))
    peers.close()


def _fetch_in_vain(peers: Peers, manifest: Manifest) -> None:
    into = memoryview(bytearray(BLOCK))
    raised = []
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match=manifest.nodes[1]) as problem:
            peers.fetch(manifest, 1, into)
        raised.append(problem.value)
    assert raised[0] is raised[1]
    with pytest.raises(NotFound, match="no node has chunk 0 of step 1"):
        peers.fetch(manifest, 0, into)


def test_connections_that_ask_nothing_lock_no_client_out(start_node: Any, connect: Any) -> None:
    limits = {"connections": 3, "connections_of_a_host": 3, "first_request_s": 0.3}
    node = start_node(limits=limits)
    idle = [connect(node.address) for _ in range(3)]
    for client in idle:
        assert client.sock.recv(1) == b""  # the node ended it
    asking = connect(node.address, "run")
    asking.save(1, content(1, BLOCK))
    assert asking.steps() == {1: "remote"}


def test_a_silent_client_makes_room_for_another(start_node: Any, connect: Any) -> None:
    node = start_node(limits={"connections": 3, "connections_of_a_host": 2, "silent_s": 0.0})
    for _ in range(2):
        connect(node.address, "run")
    assert connect(node.address, "run").steps() == {}
    assert node.counters.as_dict()["connections_refused"] == 1


def test_the_client_that_was_silent_the_longest_loses_its_place_but_none_that_waits_for_its_answer() -> None:
    acceptor = Acceptor(
        "127.0.0.1:0", lambda peer: None, connections=2, connections_of_a_host=2, silent_s=0.0,
        dropped=lambda peer, reason: None, failed=lambda error: None,
    )  # fmt: skip
    with ExitStack() as stack:
        stack.callback(acceptor.stop)
        first, second, third, fourth = (
            acceptor.enter(stack.enter_context(socket.socket()), ("10.0.0.1", port)) for port in range(4)
        )
        assert acceptor.admit(first) is acceptor.admit(second) is None
        with first.asking():
            pass
        assert acceptor.admit(third) is None
        assert (first.dropped, second.dropped) == (False, True)
        with first.asking(), third.asking():
            assert "2 clients of 10.0.0.1 are connected" in str(acceptor.admit(fourth))


def test_a_trainer_whose_connections_were_dropped_saves_again(start_node: Any, connect: Any) -> None:
    node = start_node(limits={"connections_of_a_host": 8, "silent_s": 0.0})
    weights = torch.zeros(1000)
    with deepvm.Checkpointer({"w": weights}, store=f"memory://{node.address}", run="mine", policy="at notice") as ckpt:
        ckpt.save(1).wait("remote", timeout_s=30)
        others = [connect(node.address) for _ in range(20)]
        weights += 1
        ckpt.save(2).wait("remote", timeout_s=30)
        assert ckpt.status().last_remote_step == 2
    for client in others:
        client.close()
