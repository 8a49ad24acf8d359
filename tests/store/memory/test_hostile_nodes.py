"""A memory node that answers slowly, or with something else: the client reports it and turns to the next store."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import deepvm
from deepvm.errors import Corrupt, StoreError, StoreUnavailable
from deepvm.protocol import frames
from deepvm.protocol.frames import Kind
from deepvm.store.memory.store import MemoryStore
from tests.support.memnode.client import BLOCK, content, digest_of, manifest_of

Answer = Callable[[int], Iterator[bytes]]  # a request's number -> the pieces to send
STEPS = {"steps": [{"step": 9, "size_bytes": 1, "state": "remote"}], "writes_on": False, "version": 1}


def ok(meta: dict[str, Any]) -> Answer:
    return lambda request: iter([frames.encode(Kind.OK, request, meta)])


def document(body: bytes) -> Answer:
    return lambda request: iter([frames.encode(Kind.DATA, request, None, len(body), digest_of(body)) + body])


@contextlib.contextmanager
def hostile_node(**answers: Answer) -> Iterator[str]:
    """A node without a token, with these answers by the names of kinds; all others are OK."""
    server, ended = socket.create_server(("127.0.0.1", 0)), threading.Event()

    def serve(sock: socket.socket) -> None:
        hello = {"version": frames.VERSION, "block_bytes": BLOCK, "nonce": "0" * 64, "token": False}
        with sock, contextlib.suppress(OSError, EOFError):
            sock.settimeout(30)
            sock.sendall(frames.encode(Kind.HELLO, 0, hello))
            while True:
                frame = frames.decode_header(_exactly(sock, frames.HEADER.size))
                _exactly(sock, frame.meta_bytes + frame.body_bytes)
                for piece in answers.get(frame.kind.name, ok({}))(frame.request):
                    sock.sendall(piece)
                    if ended.is_set():
                        return

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = server.accept()
                threading.Thread(target=serve, args=(sock,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.getsockname()[1]}"
    finally:
        ended.set()
        server.shutdown(socket.SHUT_RDWR)
        server.close()


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


def test_a_node_that_drips_its_answer_is_given_up() -> None:
    def drip(request: int) -> Iterator[bytes]:
        frame = frames.encode(Kind.OK, request, {"padding": "x" * 60_000})
        yield frame[:40]
        for byte in frame[40:]:
            time.sleep(0.05)
            yield bytes([byte])

    with hostile_node(STEPS=drip) as address, closing(MemoryStore([address])) as store:
        connection = store.connect(address, "run")
        connection._channel.progress_s = 0.5
        with closing(connection), pytest.raises(StoreUnavailable, match=r"too slowly|in time"):
            connection.call(Kind.STEPS)


@pytest.mark.parametrize(("run", "step"), [("other", 9), ("job", 8)], ids=["of another run", "of another step"])
def test_a_manifest_of_something_else_is_reported(tmp_path: Path, run: str, step: int) -> None:
    def model() -> dict[str, Any]:
        return {"model": torch.nn.Linear(2, 2)}

    with deepvm.Checkpointer(model(), f"file://{tmp_path}", run="job") as ckpt:
        ckpt.save(3).wait("durable", 30)
    wrong = manifest_of(content(1, BLOCK), run, step).to_bytes()
    with hostile_node(STEPS=ok(STEPS), MANIFEST=document(wrong)) as address:
        with closing(MemoryStore([address])) as store:
            assert store.steps("job") == [9]
            assert store.uncommitted_steps("job") == {9: [address]}
            with pytest.raises(Corrupt):
                store.manifest("job", 9)
        with deepvm.Checkpointer(model(), [f"memory://{address}", f"file://{tmp_path}"], run="job") as ckpt:
            assert ckpt.restore() == 3
            assert ckpt.restored is not None
            assert any("step 9" in problem for problem in ckpt.restored.passed_over)


@pytest.mark.parametrize("number", ["1" + "0" * 400, str(2**64), "-" + "9" * 40])
def test_an_integer_of_more_than_64_bits_in_an_answer_is_refused(number: str) -> None:
    def answer(request: int) -> Iterator[bytes]:
        text = f'{{"capacity_bytes": {number}}}'.encode()
        yield frames.HEADER.pack(frames.MAGIC, Kind.OK, 0, 0, request, len(text), 0, 0) + text

    with (
        hostile_node(STATUS=answer) as address,
        closing(MemoryStore([address])) as store,
        pytest.raises(StoreError, match="64 bits"),
    ):
        store.status(address)


def test_the_largest_integers_of_64_bits_are_read() -> None:
    meta = {"most": 2**64 - 1, "least": -(2**64 - 1)}
    assert frames.decode_meta(json.dumps(meta).encode()) == meta
