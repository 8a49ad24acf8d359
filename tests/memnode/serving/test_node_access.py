"""Who may do what: tokens, run keys, certificates, and how many may come."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deepvm.errors import AccessDenied, StoreError, StoreUnavailable, UsageError
from deepvm.memnode import MemoryNode
from deepvm.memnode.monitoring.log import Log
from deepvm.protocol import frames
from deepvm.protocol.credentials import read_token
from deepvm.protocol.frames import Kind, ProtocolError
from deepvm.store.memory.connection import Connection
from tests.support.memnode.client import BLOCK, DEEPVM, Client, content, digest_of
from tests.support.waiting import wait_until

SIZE = 1000


class Lines:
    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


def raw(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host, int(port)), timeout=5)
    sock.recv(frames.HEADER.size, socket.MSG_WAITALL)
    return sock


def test_the_right_token_opens_and_the_node_proves_that_it_knows_it(start_node: Any, connect: Any) -> None:
    node = start_node(token="open sesame")
    client = connect(node.address, "run", token="open sesame")
    client.save(1, content(1, SIZE))
    assert client.read(1) == content(1, SIZE)


@pytest.mark.parametrize("token", ["wrong", None])
def test_a_wrong_token_is_denied_and_counted(start_node: Any, connect: Any, token: str | None) -> None:
    node = start_node(token="right")
    with pytest.raises(AccessDenied, match="token"):
        connect(node.address, token=token)
    assert node.counters.failed_logins == (token is not None)


@contextmanager
def false_node(hello: dict[str, Any], answer: dict[str, Any]) -> Iterator[str]:
    """Greets like this, and answers AUTH with OK whatever the client proves."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.sendall(frames.encode(Kind.HELLO, 0, hello))
                auth = sock.recv(frames.HEADER.size, socket.MSG_WAITALL)
                if auth:
                    sock.recv(frames.decode_header(auth).meta_bytes, socket.MSG_WAITALL)
                    sock.sendall(frames.encode(Kind.OK, 1, answer))
                    sock.recv(1)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join(10)


HELLO = {"version": 2, "block_bytes": 2**16, "nonce": "ab" * 32, "token": True}


@pytest.mark.parametrize("proof", ["00" * 32, "", None, 7, "é", ["x"]])
def test_a_node_without_the_token_is_unmasked(proof: Any) -> None:
    with (
        false_node(HELLO, {"proof": proof}) as address,
        pytest.raises(AccessDenied, match="does not know the token: it is not a memory node of this cluster"),
    ):
        Connection.connect(address, token="right")


@pytest.mark.parametrize(
    ("field", "value"),
    [("version", 1), ("version", "two"), ("block_bytes", True), ("block_bytes", 1e5), ("block_bytes", 2**40),
     ("nonce", "AB" * 32), ("nonce", "ab"), ("nonce", ["a"]), ("token", "yes"), ("token", None)],
)  # fmt: skip
def test_a_greeting_of_odd_types_is_a_sentence(field: str, value: Any) -> None:
    with (
        false_node({**HELLO, field: value}, {}) as address,
        pytest.raises(StoreUnavailable, match=r"has protocol version|does not greet like a memory node") as refused,
    ):
        Connection.connect(address, token="right")
    str(refused.value).encode()


def test_a_greeting_with_fields_that_are_not_known_is_accepted() -> None:
    with false_node({**HELLO, "token": False, "features": [7], "tomorrow": None}, {}) as address:
        Connection.connect(address).close()


def test_a_node_that_asks_for_no_token_is_not_of_the_cluster_where_one_is_set(node: MemoryNode, tmp_path: Path) -> None:
    with pytest.raises(AccessDenied, match="asks for no token, though one is set"):
        Connection.connect(node.address, token="t")
    command = [DEEPVM, "memory-node", "--status", node.address]
    done = subprocess.run(command, capture_output=True, text=True, env={"DEEPVM_TOKEN": "t"}, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "asks for no token" in " ".join(done.stderr.split())


def test_another_version_is_refused_with_the_reason(node: MemoryNode) -> None:
    with raw(node.address) as sock:
        sock.sendall(frames.encode(Kind.AUTH, 1, {"version": 3, "nonce": frames.new_nonce(), "proof": ""}))
        assert b"the client has protocol version 3, this node has 2" in sock.recv(9999) + sock.recv(9999)


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.AUTH])
def test_nothing_is_done_before_the_handshake(node: MemoryNode, kind: Kind) -> None:
    with raw(node.address) as sock:
        sock.sendall(frames.encode(kind, 1, {}))
        answer = b""
        while piece := sock.recv(9999):
            answer += piece
        assert b"before AUTH" in answer


def test_a_silent_client_is_sent_away(start_node: Any) -> None:
    node = start_node(limits={"handshake_s": 0.2})
    with raw(node.address) as sock:
        while sock.recv(9999):
            pass
    wait_until(lambda: node.connections == 0)


def test_a_frame_that_never_ends_is_given_up(start_node: Any, connect: Any) -> None:
    node = start_node(limits={"frame_s": 0.3})
    client = connect(node.address, "run")
    client.begin(1, SIZE)
    client.send(frames.encode(Kind.PUTS, 1, {"step": 1, "chunks": [0]}, SIZE + 8, 0) + bytes(10))
    wait_until(lambda: node.connections == 0)
    assert node.arena.used == 0


FRAME_S = 1.0
PAUSE_S = 0.7  # shorter than the deadline; two of them are longer


def send_slowly(sock: socket.socket, *pieces: bytes) -> None:
    """Send the pieces with a pause after each; the node may have dropped the connection meanwhile."""
    with contextlib.suppress(OSError):
        for piece in pieces:
            sock.sendall(piece)
            time.sleep(PAUSE_S)


def test_a_handshake_has_one_deadline_for_all_its_pieces(start_node: Any) -> None:
    node = start_node(limits={"handshake_s": FRAME_S})
    auth = frames.encode(Kind.AUTH, 1, {"version": 2, "nonce": "a" * 64, "address": node.address, "proof": ""})
    with raw(node.address) as sock:
        send_slowly(sock, b"", auth[:10], auth[10:40], auth[40:])
        wait_until(lambda: node.connections == 0)
        assert not node.counters.as_dict()["failed_logins"]


@pytest.mark.parametrize("part", ["the head", "the chunks"])
def test_a_frame_has_one_deadline_for_all_its_pieces(start_node: Any, connect: Any, part: str) -> None:
    node = start_node(limits={"frame_s": FRAME_S})
    client = connect(node.address, "run")
    data = bytes(1000)
    client.begin(1, BLOCK + len(data), nodes=1)
    body = data + frames.DIGEST.pack(digest_of(data))
    frame = client.head_of(Kind.PUTS, {"step": 1, "chunks": [1, 1, 1]}, 3 * len(body))
    head = [frame[:20], frame[20:35], frame[35:40], frame[40:] + 3 * body]
    send_slowly(client.sock, *(head if part == "the head" else [frame + body, body, body]))
    wait_until(lambda: node.connections == 0)


def test_a_run_opens_with_its_key_only(node: MemoryNode, connect: Callable[..., Client]) -> None:
    connect(node.address, "mine", key="a").save(1, content(1, SIZE))
    with pytest.raises(AccessDenied) as wrong:
        connect(node.address, "mine", key="b")
    with pytest.raises(AccessDenied):
        connect(node.address, "mine", key="b", write=False)
    with pytest.raises(AccessDenied):
        connect(node.address, "mine", key="b", write=False, both=False)
    assert connect(node.address, "mine", key="a", write=False, both=False).read(1) == content(1, SIZE)
    # without its key, a run that is here looks like one that is not
    with pytest.raises(AccessDenied) as absent:
        connect(node.address, "none", key="b", both=False)
    assert str(absent.value).replace("none", "mine") == str(wrong.value)


def test_a_captured_proof_opens_nothing(node: MemoryNode, connect: Callable[..., Client]) -> None:
    first = connect(node.address, "run")
    first.save(1, content(1, SIZE))
    verifier = frames.run_verifier("run", "key")
    captured = frames.proof(verifier, "run/run", first.node_nonce, first.client_nonce)
    with pytest.raises(AccessDenied):
        connect(node.address).ask(Kind.OPEN, {"run": "run", "session": "", "write": False, "proof": captured})


def test_a_reader_may_come_before_the_writer(node: MemoryNode, connect: Callable[..., Client]) -> None:
    early = connect(node.address, "run", write=False)
    assert early.steps() == {}
    with pytest.raises(StoreError, match="has no checkpoint here"):
        early.manifest(1)
    assert early.ask(Kind.RUNS)[1]["runs"] == []
    connect(node.address, "run").save(1, content(1, SIZE))
    assert early.read(1) == content(1, SIZE)
    assert early.ask(Kind.RUNS)[1]["runs"] == ["run"]


def test_a_reader_who_came_early_with_another_key_sees_nothing(node: MemoryNode, connect: Any) -> None:
    early = connect(node.address, "run", key="other", write=False)
    connect(node.address, "run").save(1, content(1, SIZE))
    assert early.steps() == {}
    with pytest.raises(StoreError):
        early.get(1, 0)


def test_the_number_of_runs_is_limited_and_empty_ones_make_way(start_node: Any, connect: Any) -> None:
    node = start_node(limits={"runs": 2})
    connect(node.address, "a").save(1, content(1, SIZE))
    connect(node.address, "b").close()
    wait_until(lambda: any(run.empty for run in node.runs))
    connect(node.address, "c").save(1, content(1, SIZE))
    with pytest.raises(StoreUnavailable, match="keeps 2 runs"):
        connect(node.address, "d")


def test_the_number_of_connections_is_limited(start_node: Any, connect: Any) -> None:
    node = start_node(limits={"connections": 3})
    clients = [connect(node.address) for _ in range(3)]
    with pytest.raises(StoreUnavailable):
        connect(node.address)
    clients[0].close()
    wait_until(lambda: node.connections < 3)
    connect(node.address).status()
    assert node.counters.connections_refused == 1


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "node.example", "[::]"])
def test_without_a_token_only_loopback_is_served(host: str) -> None:
    with pytest.raises(UsageError, match="without a token the node listens on loopback only"):
        MemoryNode(listen=f"{host}:0", capacity_bytes=2**24)


@pytest.mark.parametrize("host", ["localhost", "[::1]", "127.0.0.2"])
def test_loopback_needs_no_token(start_node: Any, connect: Any, host: str) -> None:
    assert connect(start_node(listen=f"{host}:0").address).status()["runs"] == 0


def test_a_token_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("secret\n")
    path.chmod(0o640)
    with pytest.raises(UsageError, match=f"can be read by others: chmod 600 {path}"):
        read_token(path)
    path.chmod(0o600)
    assert read_token(path) == "secret"
    path.write_text("\n")
    with pytest.raises(UsageError, match="is empty"):
        read_token(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_token(tmp_path / "none")
    assert read_token(None, {"DEEPVM_TOKEN": "from env"}) == "from env"
    assert read_token(None, {}) is None


def test_no_secret_is_logged(start_node: Any, connect: Any) -> None:
    lines = Lines()
    node = start_node(token="my-secret-token", log=Log(lines))  # type: ignore[arg-type]
    connect(node.address, "run", key="my-secret-key", token="my-secret-token").save(1, content(1, SIZE))
    for words in ({"token": "my-wrong-token"}, {"token": "my-secret-token", "key": "my-wrong-key"}):
        with pytest.raises(AccessDenied):
            connect(node.address, "run", **words)
    assert "published" in lines.text
    assert not [
        word for word in ("secret", "my-wrong", frames.run_verifier("run", "my-secret-key")) if word in lines.text
    ]
    assert "secret" not in repr(node.settings)


def test_malformed_frames_close_the_connection(node: MemoryNode, connect: Callable[..., Client]) -> None:
    client = connect(node.address)
    client.send(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" + bytes(40))
    with pytest.raises(ProtocolError, match="not the protocol of a deepvm memory node"):
        frames.raise_error(client.answer()[1])
