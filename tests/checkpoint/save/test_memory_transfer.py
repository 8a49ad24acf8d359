"""One rank's chunks to memory nodes: what senders take, and saves that a node, or a changed tensor, stops."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from deepvm.checkpoint.save import memory_transfer
from deepvm.checkpoint.save.memory_transfer import MemoryTransfer
from deepvm.checkpoint.save.save_job import HeaderFull, SaveJob
from deepvm.checkpoint.save.sender_threads import NodeUpload, Senders, Upload
from deepvm.checkpoint.state.layout import make_layout
from deepvm.errors import CheckpointError, StoreUnavailable
from deepvm.memnode import MemoryNode
from deepvm.store.memory.buffers import group
from deepvm.store.memory.connection import Send
from deepvm.store.memory.store import MemoryStore
from tests.support.memnode.client import BLOCK, content, digest_of

DATA = content(5, BLOCK)


class Source:
    """One chunk, whose digest is asked for before it is sent."""

    def __init__(self, digest: int = digest_of(DATA)) -> None:
        self._digest = digest
        self.release = threading.Event()
        self.release.set()

    def digest(self, chunk: int) -> int:
        self.release.wait(60)
        return self._digest

    def hand_over(self, chunk: int, offset: int, send: Send) -> int:
        return send(group([memoryview(DATA)[offset:]]))

    def sent(self, chunk: int) -> None: ...

    def readable(self, chunk: int) -> bool:
        return True


def upload_of(source: Source) -> Upload:
    return Upload(source=source, step=1, size_bytes=BLOCK, chunk_bytes=BLOCK, layout="", base=None, offering=True)


@pytest.fixture
def transfer(node: MemoryNode) -> Iterator[MemoryTransfer]:
    with closing(MemoryStore([node.address], connections=1)) as store:
        made = MemoryTransfer(store, "run")
        made.prepare()
        yield made
        made.close()


def soon() -> float:
    return time.monotonic() + 60


def test_chunks_are_sent_with_their_digests(transfer: MemoryTransfer) -> None:
    found = transfer.send(upload_of(Source()), [0], soon())
    assert (found.digests, found.bytes_sent, found.bytes_kept, found.nodes_down) == ([digest_of(DATA)], BLOCK, 0, ())


def test_a_chunk_that_changed_on_its_way_fails_the_save(transfer: MemoryTransfer) -> None:
    with pytest.raises(CheckpointError, match="a tensor was changed in place while it was sent, or on its way"):
        transfer.send(upload_of(Source(digest=7)), [0], soon())


def test_senders_are_stopped_at_the_deadline(transfer: MemoryTransfer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_transfer, "STOP_S", 0.0)
    interrupted: list[str] = []
    real: Callable[[Senders], None] = Senders.interrupt

    def interrupt(self: Senders) -> None:
        interrupted.append(self.node)
        real(self)

    monkeypatch.setattr(Senders, "interrupt", interrupt)
    source = Source()
    source.release.clear()
    with pytest.raises(StoreUnavailable, match="did not receive the checkpoint within its deadline"):
        transfer.send(upload_of(source), [0], time.monotonic())
    assert len(interrupted) == 1
    source.release.set()


@pytest.mark.parametrize(
    ("queued", "senders", "most", "taken"),
    [
        ([1, 2, 3, None], 1, 8, [[1, 2], [3], []]),
        ([1, 2, 3, 4, 5, 6, 7, 8, None], 1, 3, [[1, 2, 3], [4, 5, 6], [7, 8], []]),
        ([1, 2, 3, None], 9, 8, [[1], [2], [3], []]),
        ([None], 1, 8, [[], []]),
    ],
)
def test_a_sender_takes_a_share_of_what_waits(
    queued: list[int | None], senders: int, most: int, taken: list[list[int]]
) -> None:
    nothing: Any = None
    upload = NodeUpload(nothing, senders=senders)
    for chunk in queued:
        upload.waiting.put(chunk)
    waited: list[bool] = []
    assert [upload.next(most, lambda: waited.append(True)) for _ in taken] == taken
    assert waited == []


def test_a_sender_does_not_wait_with_chunks_in_hand_and_flushes_before_it_waits() -> None:
    nothing: Any = None
    upload = NodeUpload(nothing, senders=0)
    waited: list[bool] = []

    def before_waiting() -> None:
        waited.append(True)
        upload.waiting.put(9)

    upload.waiting.put(1)
    assert upload.next(8, before_waiting) == [1]
    assert waited == []
    assert upload.next(8, before_waiting) == [9]
    assert waited == [True]


def test_values_that_outgrow_the_header_fail_the_save_and_others_are_in_it() -> None:
    layout = make_layout([("a", "F32", (16,))], {}, 0)
    staging = SimpleNamespace(view=memoryview(bytearray(layout.size_bytes)))
    snapshot: Any = SimpleNamespace(chunk_map=SimpleNamespace(layout=layout), staging=staging)
    handle: Any = None
    job = SaveJob(handle=handle, snapshot=snapshot, plain_values='{"step": 1}')
    job.write_header([job.skeleton(), '{"step": 2}'])
    assert b'[{\\"step\\": 1}, {\\"step\\": 2}]' in bytes(staging.view[: layout.header_bytes])
    with pytest.raises(HeaderFull, match="have outgrown the header: the next save makes room"):
        job.write_header(["x" * layout.header_bytes])


def test_each_rank_sends_its_share_of_the_chunks_to_every_replica() -> None:
    with closing(MemoryStore(["127.0.0.1:7071", "127.0.0.1:7072"], replicas=2)) as store:
        chunk_map: Any = SimpleNamespace(count=10, header_chunks=1)
        found = [MemoryTransfer(store, "run", rank, 3).copies(chunk_map) for rank in range(3)]
        assert found == [[2] * 3 + [0] * 7, [0] * 3 + [2] * 3 + [0] * 4, [0] * 6 + [2] * 4]
        chunk_map = SimpleNamespace(count=4, header_chunks=3)
        found = [MemoryTransfer(store, "run", rank, 2).copies(chunk_map) for rank in range(2)]
        assert found == [[2, 2, 2, 0], [0, 0, 0, 2]]
        assert MemoryTransfer(store, "run").copies(chunk_map) == [2] * 4
