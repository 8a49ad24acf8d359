"""A trainer's connection: what is held back leaves in time, and partial sends lose and repeat nothing."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import pytest
import xxhash

from deepvm.checkpoint.save.sender_threads import NodeUpload, Senders, Upload
from deepvm.errors import Corrupt
from deepvm.memnode import Limits, MemoryNode
from deepvm.store.base import Manifest, chunk_span
from deepvm.store.memory.buffers import group
from deepvm.store.memory.connection import Connection, Send
from deepvm.store.memory.store import MemoryStore
from deepvm.store.memory.upload import begin, publish_share, seal, seal_share

BLOCK = 2**20
SIZE = 5 * BLOCK + 4321
FRAME_S = 0.4


class Scattered:
    """The bytes of a save, in views of many lengths, none of which ends where a chunk does."""

    def __init__(self, seed: int = 1) -> None:
        chance = random.Random(seed)
        self.data = chance.randbytes(SIZE)
        self._cuts = [*sorted(chance.sample(range(1, SIZE), 2000)), SIZE]

    def views(self, start: int, end: int) -> Sequence[memoryview]:
        whole, at, found = memoryview(self.data), start, []
        for mark in self._cuts:
            if mark > at:
                found.append(whole[at : min(mark, end)])
                at = mark
            if mark >= end:
                break
        return found

    def digest(self, chunk: int) -> int:
        offset, length = chunk_span(chunk, SIZE, BLOCK)
        return xxhash.xxh3_64_intdigest(self.data[offset : offset + length])

    def hand_over(self, chunk: int, offset: int, send: Send) -> int:
        start, length = chunk_span(chunk, SIZE, BLOCK)
        return send(group(self.views(start + offset, start + length)))

    def sent(self, chunk: int) -> None: ...

    def readable(self, chunk: int) -> bool:
        return bool(chunk >= 0)


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    node = MemoryNode(
        capacity_bytes=32 * BLOCK, block_bytes=BLOCK, limits=Limits(frame_s=FRAME_S, stop_s=0, failure_delay_s=0.01)
    )
    node.start()
    found = MemoryStore([node.address])
    try:
        yield found
    finally:
        found.close()
        node.stop()


@pytest.fixture
def connection(store: MemoryStore) -> Iterator[Connection]:
    found = store.connect(store.nodes[0], "run", write=True)
    begin(found, 1, SIZE, BLOCK, layout="", rank=0, world_size=1, share=store.share_of(store.nodes[0]))
    try:
        yield found
    finally:
        found.close()


def put(connection: Connection, source: Scattered, chunks: Sequence[int], digests: Sequence[int]) -> None:
    lengths = [chunk_span(chunk, SIZE, BLOCK)[1] for chunk in chunks]
    found = dict(connection.put_several(1, chunks, lengths, digests, source.hand_over))
    assert found == {chunk: source.digest(chunk) for chunk in chunks}


def hash_and_put(connection: Connection, source: Scattered, *chunks: int) -> None:
    put(connection, source, chunks, [0] * len(chunks))


def put_hashed(connection: Connection, source: Scattered, *chunks: int) -> None:
    put(connection, source, chunks, list(map(source.digest, chunks)))


def put_half_hashed(connection: Connection, source: Scattered, *chunks: int) -> None:
    put(connection, source, chunks, [source.digest(chunk) * (chunk % 2) for chunk in chunks])


@pytest.mark.parametrize("together", [1, 6])
@pytest.mark.parametrize("way", [hash_and_put, put_hashed, put_half_hashed])
@pytest.mark.parametrize("buffer_bytes", [None, 50_000])
def test_many_views_and_partial_sends_arrive_as_they_are(
    store: MemoryStore,
    connection: Connection,
    way: Callable[..., None],
    buffer_bytes: int | None,
    together: int,
) -> None:
    if buffer_bytes is not None:  # a kernel that takes little at once
        with socket.socket(fileno=connection.fileno()) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
            sock.detach()
    source = Scattered()
    for first in range(0, 6, together):
        way(connection, source, *range(first, first + together))
    connection.finish()
    digests = [source.digest(chunk) for chunk in range(6)]
    manifest = Manifest(
        run="run", step=1, size_bytes=SIZE, chunk_bytes=BLOCK, digests=digests, created_s=1.0, nodes=store.nodes
    )
    seal_share(connection, manifest, 0, 60.0)
    publish_share(connection, manifest.step, 0, manifest.to_bytes())
    back = bytearray(SIZE)
    for chunk in range(6):
        offset, length = chunk_span(chunk, SIZE, BLOCK)
        store.read_chunk(manifest, chunk, memoryview(back)[offset : offset + length])
    assert back == source.data


def test_a_digest_leaves_when_it_is_flushed(store: MemoryStore, connection: Connection) -> None:
    source = Scattered()
    hash_and_put(connection, source, 0)
    connection.flush()
    with closing(store.connect(store.nodes[0], "run", write=True)) as other:
        begin(other, 1, SIZE, BLOCK, layout="", rank=0, world_size=1, share=store.share_of(store.nodes[0]))
        assert seal(other, 1, [0], timeout_s=5) == [source.digest(0)]


def test_a_refusal_is_received_at_the_end_or_before(connection: Connection) -> None:
    source = Scattered()
    assert list(connection.put_several(1, [0], [BLOCK], [5], source.hand_over)) == [(0, 5)]
    with pytest.raises(Corrupt, match="chunk 0 is not what was sent"):
        connection.finish()


def test_senders_that_wait_for_other_ranks_leave_no_chunk_half_sent(store: MemoryStore) -> None:
    """The header comes when all ranks have met, which may take longer than a node waits for the rest of a frame."""
    source, senders = Scattered(), Senders(store, store.nodes[0], "run", 0, 1)
    job = NodeUpload(Upload(source=source, step=1, size_bytes=SIZE, chunk_bytes=BLOCK, layout="", base=None))
    try:
        senders.start(job)
        for chunk in range(1, 6):
            job.waiting.put(chunk)
        with closing(store.connect(store.nodes[0], "run", write=True)) as other:
            begin(other, 1, SIZE, BLOCK, layout="", rank=0, world_size=1, share=store.share_of(store.nodes[0]))
            assert len(seal(other, 1, range(1, 6), timeout_s=10)) == 5, "whole, though the header is not there yet"
        job.waiting.put(0)
        job.waiting.put(None)
        assert job.finished.wait(10)
    finally:
        senders.close()
    assert job.failure is None
    assert job.upload.digests == [source.digest(chunk) for chunk in range(6)]
