"""What the fuzzer says to a memory node, to a client of one, and to the hub. Whatever it is, the other side raises only
its documented error, answers in time, and serves the next one."""

from __future__ import annotations

import contextlib
import io
import json
import queue
import socket
import struct
import threading
from functools import cache
from typing import Any

from deepvm.errors import DeepvmError, StoreError
from deepvm.memnode import Limits, MemoryNode
from deepvm.memnode.errors import RequestRefused
from deepvm.memnode.monitoring.log import Log
from deepvm.memnode.serving.requests import Requests
from deepvm.protocol import frames as wire
from deepvm.protocol.frames import Kind
from deepvm.runtime.cluster import Machine
from deepvm.runtime.hub.hub import Hub
from deepvm.runtime.hub.json_lines import HubGone, Lines, connect_handshake
from deepvm.runtime.run_spec import RunSpec
from deepvm.store.chunks import read_manifest
from deepvm.store.memory.answers import list_version, rank_states, run_names, step_rows
from deepvm.store.memory.connection import Connection
from deepvm.strict_json import MalformedJson
from tests.fuzz.fuzz_documents import Target, check_message, manifest
from tests.support.memnode.client import BLOCK, Client, content, digest_of, manifest_of

TOKEN = "secret"
WAIT_S = 5.0
SIZE = 2 * BLOCK + 100
NONCE = "0" * 64
MOST_EVENTS = 200  # of the hub, after one input
KINDS = list(Kind)
_failures: list[BaseException] = []


def watch_threads() -> None:
    """Whatever ends a thread of ours ends the fuzzing."""
    threading.excepthook = lambda found: _failures.append(found.exc_value or SystemExit())


def check_threads() -> None:
    if _failures:
        raise AssertionError("a thread of ours died") from _failures[0]


# --- decoding, without a socket -------------------------------------------------------------------------------------


def one_frame(data: bytes) -> None:
    try:
        frame = wire.decode_header(data[: wire.HEADER.size])
        assert frame.meta_bytes <= wire.MOST_META_BYTES
        assert wire.decode_meta(data[wire.HEADER.size :]) is not None
    except wire.ProtocolError as error:
        check_message(error)
    with contextlib.suppress(wire.ProtocolError):
        wire.decode_meta(data)


def frames() -> list[bytes]:
    return [
        wire.encode(kind, 7, {"step": 3, "chunk": 1, "run": "r", "write": True}, 12 if kind in (22, 27) else 0, 99)
        for kind in KINDS
    ]


def one_answer(data: bytes) -> None:
    for read in (
        lambda: step_rows(wire.decode_meta(data), "n:1"),
        lambda: list_version(wire.decode_meta(data), "n:1"),
        lambda: run_names(wire.decode_meta(data), "n:1"),
        lambda: rank_states(data, 2, "n:1"),
        lambda: wire.raise_error(wire.decode_meta(data)),
    ):
        try:
            read()
        except StoreError as error:
            check_message(error)


def answers() -> list[bytes]:
    documents: list[Any] = [
        {"steps": [{"step": 3, "size_bytes": 9, "state": "durable"}]},
        {"runs": ["a", "b"], "more": 0},
        [{"net": {}}, {"net": {}}],
        {"code": "no-room", "message": "full"},
    ]
    return [json.dumps(document).encode() for document in documents]


# --- requests: several in one input, each kind u8 · meta u16 · body u16 ----------------------------------------------


def packed(kind: Kind, meta: dict[str, Any], body: bytes = b"") -> bytes:
    text = json.dumps(meta).encode()
    return struct.pack("<BHH", KINDS.index(kind), len(text), len(body)) + text + body


def unpacked(data: bytes) -> list[tuple[Kind, bytes, bytes]]:
    found, at = [], 0
    while at + 5 <= len(data) and len(found) < 8:
        kind, meta, body = struct.unpack_from("<BHH", data, at)
        at += 5
        found.append((KINDS[kind % len(KINDS)], data[at : at + meta], data[at + meta : at + meta + body]))
        at += meta + body
    return found


def requests() -> list[bytes]:
    data = content(3, SIZE)
    begin = {"step": 3, "size_bytes": SIZE, "layout": "l", "rank": 0, "world_size": 1}
    column = struct.pack("<3I3Q", 0, 1, 2, *(digest_of(data[at : at + BLOCK]) for at in range(0, SIZE, BLOCK)))
    steps = [
        packed(Kind.BEGIN, begin),
        packed(Kind.KEEP, {"step": 3, "from_step": 1}, column),
        packed(Kind.OFFER, {"step": 3}, column),
        packed(Kind.LINK, {"step": 3}, column + bytes(96)),
        packed(Kind.EXTRA, {"step": 3, "rank": 0}, b'{"net": {"a": [1]}}'),
        packed(Kind.EXTRAS, {"step": 3, "world_size": 1, "timeout_s": 0}),
        packed(Kind.SEAL, {"step": 3, "timeout_s": 0}, struct.pack("<3I", 0, 1, 2)),
        packed(Kind.PUBLISH, {"step": 3}, manifest_of(data, "fuzz", 3).to_bytes()),
        packed(Kind.PUBLISH, {"step": 1}, manifest().to_bytes()),
        packed(Kind.ABORT, {"step": 3, "attempt": 0}),
    ]
    reads = [
        packed(Kind.STEPS, {}),
        packed(Kind.MANIFEST, {"step": 1}),
        packed(Kind.GET, {"step": 1, "chunk": 2}),
        packed(Kind.DELETE, {"step": 2}),
        packed(Kind.RUNS, {}),
        packed(Kind.STATUS, {}),
        packed(Kind.MEND, {"step": 1, "chunk": 2}, data[2 * BLOCK :]),
        packed(
            Kind.PUTS, {"step": 3, "chunks": [2]}, data[2 * BLOCK :] + wire.DIGEST.pack(digest_of(data[2 * BLOCK :]))
        ),
        packed(Kind.OPEN, {"run": "other", "session": "s", "write": True, "proof": NONCE, "verifier": NONCE}),
    ]
    return [*steps, *reads, b"".join(steps[:3]), b"".join(steps[4:8]), steps[0] + steps[4] + reads[0]]


class Alarm(io.StringIO):
    """Where the node's log goes: its own mistakes end the fuzzing."""

    def write(self, line: str) -> int:
        if "internal error" in line:
            _failures.append(AssertionError(line))
        return len(line)


@cache
def node() -> MemoryNode:
    limits = Limits(stop_s=0.0, failure_delay_s=0.0, room_s=0.0, frame_s=WAIT_S)
    found = MemoryNode(capacity_bytes=32 * BLOCK, block_bytes=BLOCK, limits=limits, log=Log(Alarm()))
    found.start()
    with Client(found.address, "fuzz") as client:
        client.save(1, content(1, SIZE))
    return found


def without_waiting(meta: dict[str, Any]) -> dict[str, Any]:
    if type(meta.get("timeout_s")) in (int, float):
        meta["timeout_s"] = 0  # it may be an hour, and is waited for
    return meta


def one_request(data: bytes) -> None:
    """Straight into what handles requests, as a connection does that has the run open."""
    handled = Requests(node(), NONCE, NONCE, is_gone=lambda: False)
    verifier = wire.run_verifier("fuzz", "key")
    proof = wire.proof(verifier, "run/fuzz", NONCE, NONCE)
    handled.answer(Kind.OPEN, {"run": "fuzz", "session": "s1", "write": True, "proof": proof}, b"")
    try:
        for kind, meta, body in unpacked(data):
            try:
                handled.answer(kind, without_waiting(wire.decode_meta(meta)), body)
            except (RequestRefused, wire.ProtocolError, MalformedJson):  # each is refused by the connection
                continue
    finally:
        handled.leave()
        for run in node().runs:
            for step, upload in list(run.uploads.items()):
                run.abort(step, run.session, upload.begin.attempt)


def one_conversation(data: bytes) -> None:
    """The same over a socket, frames with lengths that fit."""
    address = node().address
    try:
        with Client(address, "fuzz", timeout_s=WAIT_S) as client:
            for number, (kind, meta, body) in enumerate(unpacked(data), start=100):
                with contextlib.suppress(wire.ProtocolError):
                    meta = json.dumps(without_waiting(wire.decode_meta(meta))).encode()
                length = len(body)
                head = wire.HEADER.pack(wire.MAGIC, kind, 0, 0, number, len(meta), length, digest_of(body))
                client.send(head + meta + body)
            client.sock.shutdown(socket.SHUT_WR)
            while client.sock.recv(65536):
                pass
    except TimeoutError:
        raise
    except (OSError, StoreError):
        pass
    check_threads()


# --- a node that means harm -------------------------------------------------------------------------------------------


class BadNode:
    """Says to whoever connects what it was told to say, all at once, and no more."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.words = b""
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            sock, _ = self._listener.accept()
            with sock, contextlib.suppress(OSError):
                sock.settimeout(WAIT_S)
                sock.sendall(self.words)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(65536):
                    pass


@cache
def bad_node() -> BadNode:
    return BadNode()


HELLO = {"version": wire.VERSION, "block_bytes": BLOCK, "nonce": NONCE, "token": False}


def ask_bad_node(words: bytes) -> None:
    bad_node().words = words
    try:
        connection = Connection.connect(bad_node().address, connect_s=WAIT_S, progress_s=WAIT_S)
        with contextlib.closing(connection):
            connection.open("run-a", key="key")
            step_rows(connection.call(Kind.STEPS)[0], "n:1")
            read_manifest(bytes(connection.call(Kind.MANIFEST, {"step": 12})[1]), "run-a", 12, "n:1")
            connection.read_chunk(manifest(), 0, memoryview(bytearray(128)))
    except DeepvmError as error:
        check_message(error)
        if "did not answer in time" in str(error):
            raise AssertionError("it waited for what cannot come") from error
    check_threads()


def one_hello(data: bytes) -> None:
    ask_bad_node(wire.HEADER.pack(wire.MAGIC, Kind.HELLO, 0, 0, 0, min(len(data), 65536), 0, 0) + data)


def hellos() -> list[bytes]:
    return [json.dumps(HELLO).encode(), json.dumps({**HELLO, "token": True}).encode()]


def one_reply(data: bytes) -> None:
    ask_bad_node(wire.encode(Kind.HELLO, 0, HELLO) + wire.encode(Kind.OK, 1, {}) + data)


def replies() -> list[bytes]:
    document = manifest().to_bytes()
    opened, steps = wire.encode(Kind.OK, 2), wire.encode(Kind.OK, 3, {"steps": [{"step": 12, "state": "remote"}]})
    found = wire.encode(Kind.DATA, 4, None, len(document), digest_of(document)) + document
    chunk = wire.encode(Kind.DATA, 5, None, 128, 1) + bytes(128)
    refused = wire.encode(Kind.ERROR, 2, wire.error_meta("denied", "no"))
    return [opened, opened + steps, opened + steps + found, opened + steps + found + chunk, refused]


# --- the hub ----------------------------------------------------------------------------------------------------------


@cache
def hub() -> Hub:
    worker = Machine(
        name="worker/0", role="worker", instance="x", market="spot", usd_per_hour=1.0, on_demand_usd_per_hour=None
    )
    return Hub([worker], RunSpec(script="x.py", after_loss="wait:1s"), token=TOKEN).start()


@cache
def hub_lines() -> list[Lines]:
    return []


def one_line(data: bytes) -> None:
    lines = hub_lines().pop() if hub_lines() else meet()
    try:
        for line in data.split(b"\n")[:4]:
            tag = b"" if line.startswith(b"!") else lines._tags.next(line).hex().encode() + b" "
            lines._sock.sendall(tag + line + b"\n")
        lines.send("event", line=json.dumps({"kind": "step", "at_s": 1.0, "step": 7}))
        found = [hub().events.get(timeout=0.02)]
        while found[-1].data.get("step") != 7:
            assert len(found) < MOST_EVENTS, found[-3:]
            found.append(hub().events.get(timeout=0.02))
        hub_lines().append(lines)
    except (queue.Empty, HubGone, BrokenPipeError, ConnectionResetError):
        lines.close()
    check_threads()


def meet() -> Lines:
    host, _, port = hub().address.rpartition(":")
    for _ in range(500):  # until the one before is missed
        lines = Lines(socket.create_connection((host, int(port)), timeout=WAIT_S))
        with contextlib.suppress(HubGone):
            connect_handshake(lines, TOKEN, machine="worker/0")
            if lines.receive(WAIT_S)["say"] == "welcome":
                return lines
        lines.close()
    raise AssertionError("the hub takes nobody any more")


def messages() -> list[bytes]:
    event = json.dumps({"kind": "save", "at_s": 1.7e9, "step": 3, "state": "remote", "seconds": 0.5})
    said: list[dict[str, Any]] = [
        {"say": "beat"},
        {"say": "event", "line": event},
        {"say": "join"},
        {"say": "endpoint", "round": 1, "endpoint": "10.0.0.1:5"},
        {"say": "memory", "address": "10.0.0.1:7070"},
        {"say": "notice", "action": "terminate", "at_s": 1.7e9, "source": "aws"},
        {"say": "failing", "error": "x"},
        {"say": "finished"},
        {"say": "leave"},
    ]
    return [json.dumps(message).encode() for message in said]


TARGETS = {
    "frame": Target(one_frame, frames, 100_000),
    "answer": Target(one_answer, answers, 60_000),
    "request": Target(one_request, requests, 100_000),
    "conversation": Target(one_conversation, requests, 10_000),
    "hello": Target(one_hello, hellos, 10_000),
    "reply": Target(one_reply, replies, 10_000),
    "hub": Target(one_line, messages, 5_000),
}
