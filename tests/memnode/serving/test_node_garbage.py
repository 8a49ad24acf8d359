"""Bytes that mean harm or nothing, clients that vanish, and a thousand saves: the node stays as it was."""

from __future__ import annotations

import contextlib
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepvm.errors import StoreError
from deepvm.memnode import MemoryNode
from deepvm.protocol import frames as wire
from deepvm.protocol.frames import HEADER, MAGIC, Kind
from tests.support.memnode.client import BLOCK, Client, NodeProcess, chunks_of, content, digest_of
from tests.support.waiting import wait_until

SIZE = 3 * BLOCK + 100
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20),
    st.just([]),
)
NAMES = [
    "step", "from_step", "chunk", "size_bytes", "layout", "rank", "world_size", "timeout_s", "run", "session",
    "write", "proof", "verifier", "nodes", "node_index", "replicas", "version", "nonce",
]  # fmt: skip


@pytest.fixture(scope="module")
def shared() -> Iterator[MemoryNode]:
    with MemoryNode(capacity_bytes=64 * BLOCK, block_bytes=BLOCK) as node:
        yield node


def survives(node_address: str, *, step: int = 1) -> None:
    """A well-behaved client is served as if nothing had happened."""
    with Client(node_address, f"good-{step}") as client:
        client.save(step, content(step, SIZE))
        assert client.read(step) == content(step, SIZE)
        client.ask(Kind.DELETE, {"step": step})


def is_empty(node: MemoryNode) -> bool:
    for run in node.runs:
        for step, upload in list(run.uploads.items()):
            run.abort(step, run.session, upload.begin.attempt)
    return node.arena.used == 0 and node.arena.reserved == 0


def send_once(address: str, data: bytes, *, opened: bool) -> None:
    client = Client(address, "bad" if opened else None, timeout_s=5)
    with client, contextlib.suppress(OSError, StoreError):
        if opened:
            client.begin(1, SIZE)
        client.send(data)
        client.sock.shutdown(1)
        while client.sock.recv(65536):
            pass


@given(data=st.binary(min_size=1, max_size=300), opened=st.booleans())
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_leave_the_node_whole(shared: MemoryNode, data: bytes, opened: bool) -> None:
    send_once(shared.address, data, opened=opened)
    send_once(shared.address, MAGIC + data, opened=opened)
    wait_until(lambda: shared.connections == 0)
    assert is_empty(shared)


@given(
    kind=st.sampled_from(list(Kind)), meta=st.dictionaries(st.sampled_from(NAMES), VALUES), body=st.binary(max_size=200)
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_frame_leaves_the_node_whole(shared: MemoryNode, kind: Kind, meta: dict[str, Any], body: bytes) -> None:
    meta = {**meta, "timeout_s": 0}
    send_once(shared.address, wire.encode(kind, 1, meta, len(body), digest_of(body)) + body, opened=True)
    wait_until(lambda: shared.connections == 0)
    assert is_empty(shared)
    survives(shared.address)


@pytest.mark.parametrize("kind", list(Kind))
def test_an_announced_length_takes_no_memory(shared: MemoryNode, kind: Kind) -> None:
    """The largest length of each kind, and larger, with nothing behind it."""
    for meta_bytes, body_bytes in ((2**32 - 1, 0), (0, 2**64 - 1), (2, 2**40)):
        send_once(shared.address, HEADER.pack(MAGIC, kind, 0, 0, 1, meta_bytes, body_bytes, 0), opened=True)
    wait_until(lambda: shared.connections == 0)
    assert is_empty(shared)


def fuzz(address: str, frames: int, seed: int) -> None:
    """Frames that are nearly right: a good one with bits turned, fields changed, cut off or run together."""
    chance = random.Random(seed)
    client: Client | None = None
    answered = 0
    for number in range(frames):
        if client is None:
            client = Client(address, "bad", session=f"s{seed}-{number}", timeout_s=10)
        meta = {
            "step": chance.randrange(3), "from_step": chance.randrange(3), "chunk": chance.randrange(5), "rank": 0,
            "world_size": 1, "size_bytes": SIZE, "layout": "l", "timeout_s": 0,
        }  # fmt: skip
        if chance.random() < 0.2:
            meta[chance.choice(NAMES)] = chance.choice([None, True, -1, 2**70, 1.5, "x", [], {}])
        kind = chance.choice([k for k in Kind if k is not Kind.OPEN])
        body = chance.randbytes(chance.choice([0, 0, 4, 12, 100])) if chance.random() < 0.5 else b""
        frame = bytearray(wire.encode(kind, number, meta, len(body), digest_of(body)) + body)
        if chance.random() < 0.3:
            frame[chance.randrange(len(frame))] ^= 1 << chance.randrange(8)
        if chance.random() < 0.05:
            del frame[chance.randrange(len(frame)) :]
        try:
            client.send(bytes(frame))
            client.sock.settimeout(0.02)
            client.answer()
            answered += 1
        except TimeoutError:  # the node waits for the rest of it: leave in the middle
            client.close()
            client = None
        except (OSError, StoreError):
            client.close()
            client = None
    if client is not None:
        client.close()
    assert answered > frames / 10


def fuzz_process(directory: Path, frames: int) -> None:
    with NodeProcess(directory) as node, Client(node.address, "bystander") as bystander:
        bystander.save(1, content(1, SIZE))
        fuzz(node.address, 200, seed=0)
        before = node.figures()
        fuzz(node.address, frames, seed=1)
        wait_until(lambda: bystander.status()["connections"] == 1)
        after = node.figures()
        assert bystander.read(1) == content(1, SIZE)
        bystander.save(2, content(2, SIZE))
        assert after["Threads"] <= before["Threads"]
        assert after["fds"] <= before["fds"]
        assert after["VmRSS"] - before["VmRSS"] < 16_000
        assert not [event for event in node.events() if event["event"] == "internal error"]
        Client(node.address, "bad", session="end").close()  # drops what the last session left
        wait_until(lambda: bystander.status()["reserved_bytes"] == 0)


def test_a_fuzzer_finds_nothing_in_3000_frames(tmp_path: Path) -> None:
    fuzz_process(tmp_path, 3_000)


@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_a_fuzzer_finds_nothing_in_100000_frames(tmp_path: Path) -> None:
    fuzz_process(tmp_path, 100_000)


def test_a_client_that_vanishes_leaves_others_their_upload(node: MemoryNode, connect: Callable[..., Client]) -> None:
    data = content(1, SIZE)
    first, second = connect(node.address, "run"), connect(node.address, "run")
    first.begin(1, SIZE)
    first.put(1, 0, chunks_of(data)[0])
    first.send(wire.encode(Kind.PUTS, 1, {"step": 1, "chunks": [1]}, BLOCK + 8, 0) + bytes(BLOCK // 2))
    wait_until(lambda: any(upload.receiving for run in node.runs for upload in run.uploads.values()))
    first.sock.setsockopt(1, 13, struct.pack("ii", 1, 0))  # SO_LINGER: a reset, as of a machine that is gone
    first.close()
    wait_until(lambda: node.connections == 1)
    assert (node.arena.used, node.arena.reserved) == (1, 3)
    for number in (1, 2, 3):
        second.put(1, number, chunks_of(data)[number])
    assert second.seal(1, range(4)) == [digest_of(chunk) for chunk in chunks_of(data)]


def test_hundreds_of_saves_leave_no_trace(tmp_path: Path) -> None:
    check_no_trace(tmp_path, 100, 300)


@pytest.mark.chaos
def test_a_thousand_saves_leave_no_trace(tmp_path: Path) -> None:
    check_no_trace(tmp_path, 200, 1000)


def check_no_trace(tmp_path: Path, warm: int, count: int) -> None:
    (tmp_path / "spill").mkdir()
    with NodeProcess(tmp_path, "--spill", str(tmp_path / "spill")) as node:

        def saves(first: int, last: int) -> None:
            for step in range(first, last):
                with Client(node.address, "run", session=f"s{step // 100}") as client:
                    client.save(step, content(step, BLOCK + 10))

        saves(0, warm)
        before = node.figures()
        saves(warm, count)
        with Client(node.address, "run", write=False) as client:
            wait_until(lambda: client.status()["spill_waiting"] == 0)
            assert client.read(count - 1) == content(count - 1, BLOCK + 10)
            status = client.status()
        assert status["saves"] == count
        assert status["used_bytes"] == 4 * BLOCK
        assert node.figures()["VmRSS"] - before["VmRSS"] < 8_000
        for what in ("fds", "Threads"):  # the last clients' leave a moment after them
            wait_until(lambda what=what: node.figures()[what] <= before[what] + 1)
        assert len(list((tmp_path / "spill" / "run").glob("step-*.json"))) == 2
