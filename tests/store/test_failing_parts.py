"""Parts of stores where something else fails first: an unreachable bucket, a lock, a file system, a slow socket."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import threading
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepvm.errors import AccessDenied, Corrupt, NotFound, StoreError, StoreUnavailable, UsageError
from deepvm.memnode import MemoryNode
from deepvm.protocol import frames
from deepvm.store import urls
from deepvm.store.base import MOST_MANIFEST_BYTES
from deepvm.store.files import staged_file
from deepvm.store.files.staged_file import StagedFile
from deepvm.store.files.store import FileStore
from deepvm.store.files.unfinished import _is_free
from deepvm.store.memory.answers import step_rows
from deepvm.store.memory.buffers import _without
from deepvm.store.memory.health import Health
from deepvm.store.memory.socket_io import NodeSocket
from deepvm.store.memory.store import MemoryStore
from deepvm.store.objects.store import ObjectStore, _plain_http_allowed, _store_error
from tests.support.store.checkpoints import CHUNK, manifest_of, payload, put, save

ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


# --- files --------------------------------------------------------------------------------------------------------


def test_a_file_that_another_process_has_locked_is_not_written_over(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.write_bytes(b"abc")
    with data.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert StagedFile.recycled(data, None) is None
        assert data.read_bytes() == b"abc"
        assert _is_free(data) is False
    assert _is_free(data) is True
    assert _is_free(tmp_path / "gone") is False
    spare = StagedFile.recycled(data, None)
    assert spare is not None
    assert not data.exists()
    spare.discard()
    assert list(tmp_path.iterdir()) == []


def test_space_is_allocated_where_the_file_system_can_and_else_the_length_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(number: int) -> Any:
        def call(*_: int) -> None:
            raise OSError(number, os.strerror(number))

        return call

    with StagedFile(tmp_path, "data") as staged:
        staged.resize(100)
        monkeypatch.setattr(staged_file.os, "posix_fallocate", refuse(errno.EOPNOTSUPP))
        for size in (300, 200):
            staged.resize(size)
            assert os.fstat(staged.fd).st_size == size
        monkeypatch.setattr(staged_file.os, "posix_fallocate", refuse(errno.ENOSPC))
        with pytest.raises(OSError, match="No space left"):
            staged.resize(400)


def test_only_one_deleted_file_is_kept_to_write_over(tmp_path: Path) -> None:
    with closing(FileStore(tmp_path)) as store:
        for step in range(4):
            save(store, payload(CHUNK, step), step=step)
        for step in range(3):
            store.delete("run-a", step)
        hidden = [path for path in (tmp_path / "run-a").iterdir() if path.name.startswith(".step-")]
        assert len(hidden) == 1
        assert store.steps("run-a") == [3]
        assert store.steps("another") == []


def test_stores_that_were_opened_are_closed_if_a_later_one_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Path] = []
    monkeypatch.setattr(FileStore, "close", lambda self: closed.append(self.root))
    with pytest.raises(UsageError, match="no store is known for odd://"):
        urls.open_stores([tmp_path / "a", tmp_path / "b", "odd://x"])
    assert closed == [tmp_path / "a", tmp_path / "b"]


# --- memory nodes -------------------------------------------------------------------------------------------------


def test_an_answer_that_drips_is_given_up_with_what_arrived() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        node = NodeSocket("n:1", ours, progress_s=60.0)
        theirs.sendall(b"x")
        with pytest.raises(StoreUnavailable, match="memory node n:1 answers too slowly: 1 of 2 bytes in time"):
            node.receive(memoryview(bytearray(2)), time.monotonic() + 60, end_s=0.0)
        assert node.broken is True
        node.close()


def test_an_interrupted_question_closes_its_connection_and_a_refused_one_keeps_it(node: MemoryNode) -> None:
    with closing(MemoryStore([node.address])) as store:
        asked: list[Any] = []

        def interrupted(connection: Any) -> None:
            asked.append(connection)
            raise KeyboardInterrupt

        def refused(connection: Any) -> None:
            asked.append(connection)
            raise NotFound("no")

        for question, error in ((interrupted, KeyboardInterrupt), (refused, NotFound), (refused, NotFound)):
            with pytest.raises(error):
                store._ask(node.address, None, question)
        first, second, third = asked
        assert first is not second is third
        with pytest.raises((OSError, ValueError, StoreError)):
            first.call(frames.Kind.STATUS)
        second.call(frames.Kind.STATUS)


@pytest.mark.parametrize("whole", [1, "yes", None])
def test_a_node_says_true_or_false_of_a_whole_step(whole: Any) -> None:
    row = {"step": 1, "state": "remote"}
    assert step_rows({"steps": [row, {**row, "whole": True}]}, "n") == [row, {**row, "whole": True}]
    with pytest.raises(StoreError, match=r"whole is .*, not true or false"):
        step_rows({"steps": [{**row, "whole": whole}]}, "n")


def test_nothing_is_left_behind_the_last_byte() -> None:
    views = [memoryview(b"ab"), memoryview(b"cde")]
    assert [b"".join(_without(views, at)) for at in range(6)] == [b"abcde", b"bcde", b"cde", b"de", b"e", b""]


def test_a_stalled_node_is_asked_once_and_only_if_it_can_be_spared() -> None:
    asked: list[str] = []
    problem: list[StoreError] = []

    def greet(node: str) -> None:
        asked.append(node)
        if problem:
            raise problem[0]

    unneeded = Health(greet, spare=1)
    with closing(unneeded):
        for _ in range(3):
            unneeded.stalled("a")
        assert asked == ["a"], "it greeted just now"
        problem.append(AccessDenied("wrong token"))
        unneeded.stalled("b")
        assert not unneeded.is_hung("b"), "a refusal is an answer"
        problem[0] = StoreUnavailable("silent")
        with pytest.raises(StoreUnavailable, match="silent"):
            unneeded.stalled("c")
        assert (unneeded.is_hung("c"), unneeded.can_spare("c"), unneeded.can_spare("a")) == (True, True, False)
        with pytest.raises(StoreUnavailable, match="silent"):
            unneeded.check("c")
        assert asked[:3] == ["a", "b", "c"]
    needed = Health(greet, spare=0)
    with closing(needed):
        asked.clear()
        needed.stalled("a")
        assert asked == []


# --- objects ------------------------------------------------------------------------------------------------------


class Bucket:
    """A client that answers as told, or never."""

    def __init__(self, data: bytes = b"", size: int = 0) -> None:
        self.data, self.size = data, size
        self.release = threading.Event()

    def get(self, key: str) -> Any:
        return SimpleNamespace(meta={"size": self.size}, bytes=lambda: b"{}")

    def get_range(self, key: str, *, start: int, length: int) -> bytes:
        return self.data[start : start + length]

    def delete(self, key: str) -> None: ...

    def put(self, key: str, stream: Any, **_: Any) -> dict[str, str]:
        for _chunk in stream:
            pass
        self.release.wait(60)
        return {"e_tag": ""}


def bucket_store(client: Bucket, **fields: Any) -> ObjectStore:
    return ObjectStore("s3://bucket/a", client, **{"memory_bytes": 2**24, "stall_s": 60.0, **fields})


def test_objects_of_another_size_than_was_published_are_corrupt() -> None:
    data = payload(2 * CHUNK)
    manifest = manifest_of(data, "run-a", 1)
    into = memoryview(bytearray(CHUNK))
    bucket_store(Bucket(data)).read_chunk(manifest, 1, into)
    assert bytes(into) == data[CHUNK:]
    with pytest.raises(Corrupt, match=str(2 * CHUNK - 5)):
        bucket_store(Bucket(data[:-5])).read_chunk(manifest, 1, into)
    with pytest.raises(Corrupt, match=f"has {MOST_MANIFEST_BYTES + 1} bytes, a manifest has at most"):
        bucket_store(Bucket(size=MOST_MANIFEST_BYTES + 1)).manifest("run-a", 1)
    with pytest.raises(Corrupt, match="cannot be read"):
        bucket_store(Bucket(size=MOST_MANIFEST_BYTES)).manifest("run-a", 1)


def test_an_upload_that_is_never_acknowledged_is_given_up() -> None:
    client, data = Bucket(), payload(CHUNK)
    store = bucket_store(client, stall_s=0.3)
    writer = store.writer("run-a", 1, size_bytes=CHUNK, chunk_bytes=CHUNK)
    manifest = manifest_of(data, "run-a", 1)
    put(writer, data, manifest, [0])
    with pytest.raises(StoreUnavailable, match="the upload was not acknowledged within"):
        writer.publish(manifest)
    client.release.set()
    writer.abort()


@pytest.mark.parametrize(
    ("endpoint", "consent", "allowed"),
    [
        ("", "", False),
        ("https://far.example", "", False),
        ("http://127.0.0.1:1", "", True),
        ("http://far.example", "yes", True),
        ("http://far.example", "no", None),
    ],
)
def test_http_without_encryption_is_for_this_machine_or_by_consent(
    endpoint: str, consent: str, allowed: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ALLOW_HTTP", consent)
    monkeypatch.setenv(ENDPOINTS[1], endpoint)
    if allowed is None:
        with pytest.raises(UsageError, match=r"the S3 endpoint at far\.example is not encrypted"):
            _plain_http_allowed()
    else:
        assert _plain_http_allowed() is allowed


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (OSError("<Code>NoSuchBucket</Code> status code: 404"), NotFound, "s3://bucket does not exist"),
        (OSError("status code: 416"), Corrupt, "an object is shorter than in its manifest"),
        (FileNotFoundError("status code: 404"), NotFound, "step 1 is missing"),
        (OSError("status code: 401"), AccessDenied, r"refused the credentials \(status 401\)"),
        (OSError("<Code>Forbidden</Code> status code: 403"), AccessDenied, r"refused the credentials \(Forbidden\)"),
        (OSError("no answer of http://169.254.169.254/"), AccessDenied, "no credentials for s3://bucket/a were found"),
        (OSError("status code: 503"), StoreUnavailable, r"failed \(status 503\): check the endpoint"),
        (OSError("https://me:secret@far failed\nmore"), StoreUnavailable, r"failed \(https://far failed\)"),
    ],
)
def test_failures_of_a_bucket_are_one_sentence_of_the_right_kind(
    error: Exception, kind: type[StoreError], text: str
) -> None:
    found = _store_error(error, "s3://bucket/a", "step 1 is missing")
    assert type(found) is kind
    with pytest.raises(kind, match=text):
        raise found


# --- numbers on the wire ------------------------------------------------------------------------------------------


def test_numbers_are_little_endian_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert frames.pack("I", [1, 258]) == b"\1\0\0\0\2\1\0\0"
    assert list(frames.unpack("Q", b"\1" + bytes(7))) == [1]
    monkeypatch.setattr(frames, "sys", SimpleNamespace(byteorder="big"))
    assert frames.pack("I", [1]) == b"\0\0\0\1"
    assert list(frames.unpack("I", b"\0\0\0\1")) == [1]
