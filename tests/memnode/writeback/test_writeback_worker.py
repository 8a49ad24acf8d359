"""The worker of one sink: newest first, retried with growing pauses, flushed at once."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from deepvm.errors import StoreUnavailable
from deepvm.memnode.errors import RequestRefused
from deepvm.memnode.monitoring.log import Log
from deepvm.memnode.storage.arena import Arena
from deepvm.memnode.storage.checkpoint import Checkpoint
from deepvm.memnode.writeback import worker as worker_module
from deepvm.memnode.writeback.held_chunks import HeldChunks, Superseded
from deepvm.memnode.writeback.worker import ANSWER_S, WritebackWorker, pause_s
from deepvm.protocol.placement import Share
from tests.support.memnode.client import BLOCK, content, digest_of, manifest_of
from tests.support.waiting import wait_until

DATA = content(1, 2 * BLOCK)


class FakeSink:
    """Writes into a list; each write waits for ``go`` and fails as often as it is told to."""

    name = "disk"

    def __init__(self) -> None:
        self.written: list[tuple[str, int]] = []
        self.removed: list[int] = []
        self.failures: list[Exception] = []
        self.go = threading.Event()
        self.go.set()
        self.begun = threading.Event()
        self.lost = self.closed = False

    def wants(self, checkpoint: Checkpoint) -> bool:
        return not checkpoint.durable

    def write(self, run: Any, checkpoint: Checkpoint, source: HeldChunks) -> None:
        self.begun.set()
        assert self.go.wait(20)
        if self.failures:
            raise self.failures.pop(0)
        for chunk in range(2):
            with source.chunk(chunk) as view:
                assert digest_of(bytes(view)) == checkpoint.manifest.digests[chunk]
        self.written.append((run.name, checkpoint.step))

    def remove(self, run: Any, checkpoint: Checkpoint) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.removed.append(checkpoint.step)

    def is_lost(self) -> bool:
        return self.lost

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def arena() -> Iterator[Arena]:
    found = Arena(64 * BLOCK, BLOCK)
    yield found
    assert found.used == 0, "a block is held by nobody"
    found.close()


@pytest.fixture
def sink() -> FakeSink:
    return FakeSink()


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def worker(sink: FakeSink, stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> Iterator[WritebackWorker]:
    monkeypatch.setattr(worker_module, "FIRST_RETRY_S", 0.001)
    found = WritebackWorker(sink, Log(stream), lambda run, checkpoint: HeldChunks(checkpoint, None))
    yield found
    found.close()
    assert sink.closed


def a_run(name: str = "run") -> Any:
    run = SimpleNamespace(name=name, changes=0)

    def mark_changed() -> None:
        run.changes += 1

    run.mark_changed = mark_changed
    return run


@pytest.fixture
def checkpoint(arena: Arena) -> Iterator[Callable[[int], Checkpoint]]:
    made: list[Checkpoint] = []

    def make(step: int) -> Checkpoint:
        blocks = {}
        for chunk in range(2):
            blocks[chunk] = arena.take(reserved=False)
            arena.view(blocks[chunk], BLOCK)[:] = DATA[chunk * BLOCK : (chunk + 1) * BLOCK]
        manifest = manifest_of(DATA, "run", step)
        made.append(Checkpoint(arena, manifest, manifest.to_bytes(), share=Share(), blocks=blocks))
        return made[-1]

    yield make
    for one in made:
        one.evict()


Make = Callable[[int], Checkpoint]


def test_a_checkpoint_is_written_once_and_counted(worker: WritebackWorker, sink: FakeSink, checkpoint: Make) -> None:
    run = a_run()
    assert worker.status() == {
        "disk_waiting": 0, "disk_written": 0, "disk_skipped": 0, "disk_failures": 0, "disk_error": None,
    }  # fmt: skip
    worker.offer(run, checkpoint(1))
    assert worker.waiting == 1
    worker.start()
    assert worker.flush(time.monotonic() + 20)
    assert (sink.written, run.changes) == ([("run", 1)], 1)
    assert worker.status() == {
        "disk_waiting": 0, "disk_written": 1, "disk_skipped": 0, "disk_failures": 0, "disk_error": None,
    }  # fmt: skip


def test_of_each_run_only_the_newest_waits_and_what_the_sink_has_is_not_offered(
    worker: WritebackWorker, sink: FakeSink, checkpoint: Make
) -> None:
    known = checkpoint(4)
    known.durable = True
    for run, step in ((a_run(), 1), (a_run(), 2), (a_run("other"), 1), (a_run(), 3)):
        worker.offer(run, checkpoint(step))
    worker.offer(a_run(), known)
    assert (worker.waiting, worker.skipped) == (2, 2)
    ready_s = time.monotonic() + 2 * ANSWER_S
    wait_until(lambda: time.monotonic() > ready_s, "both may be written")
    worker.start()
    assert worker.flush(time.monotonic() + 20)
    assert sink.written == [("run", 3), ("other", 1)]  # the newest first


def test_a_write_that_fails_is_tried_again_and_its_attempts_are_logged(
    worker: WritebackWorker, sink: FakeSink, stream: io.StringIO, checkpoint: Make
) -> None:
    sink.failures = [StoreUnavailable("the disk is full"), ValueError("a bug"), OSError(5, "broken")]
    worker.start()
    worker.offer(a_run(), checkpoint(7))
    wait_until(lambda: sink.written, "the fourth attempt")
    wait_until(lambda: worker.waiting == 0, "its end")
    assert (worker.failures, worker.skipped, worker.written, worker.last_error) == (3, 0, 1, None)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    errors = [(line["attempt"], line["step"], line["error"]) for line in lines if line["level"] == "error"]
    assert errors == [(1, 7, "the disk is full"), (2, 7, "ValueError: a bug"), (3, 7, "[Errno 5] broken")]
    assert [line["step"] for line in lines if line["level"] == "info"] == [7]


def test_pauses_between_attempts_double_up_to_a_limit() -> None:
    assert [pause_s(attempts) for attempts in (1, 2, 3, 8, 9, 99)] == [0.25, 0.5, 1.0, 32.0, 60.0, 60.0]


def test_a_flush_retries_at_once_what_would_wait_for_its_next_turn(
    worker: WritebackWorker, sink: FakeSink, checkpoint: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "FIRST_RETRY_S", 3600.0)
    monkeypatch.setattr(worker_module, "LAST_RETRY_S", 3600.0)
    sink.failures = [StoreUnavailable("no")]
    worker.start()
    worker.offer(a_run(), checkpoint(1))
    wait_until(lambda: worker.failures == 1 and worker.waiting == 1, "the first failure")
    assert worker.flush(time.monotonic() + 60)
    assert (sink.written, worker.waiting) == ([("run", 1)], 0)


def test_an_older_checkpoint_that_failed_does_not_come_back_over_a_newer_one(
    worker: WritebackWorker, sink: FakeSink, checkpoint: Make
) -> None:
    sink.failures = [StoreUnavailable("no")]
    sink.go.clear()
    worker.start()
    worker.offer(a_run(), checkpoint(1))
    assert sink.begun.wait(20)
    worker.offer(a_run(), checkpoint(2))
    sink.go.set()
    wait_until(lambda: sink.written and not worker.waiting, "the newer one")
    assert (sink.written, worker.failures, worker.skipped) == ([("run", 2)], 1, 1)


def test_a_checkpoint_that_was_deleted_is_neither_written_nor_tried_again(
    worker: WritebackWorker, sink: FakeSink, checkpoint: Make
) -> None:
    run, deleted, failing = a_run(), checkpoint(1), checkpoint(2)
    deleted.delete()
    worker.offer(run, deleted)
    worker.start()
    assert worker.flush(time.monotonic() + 20)
    assert (sink.written, worker.written, run.changes) == ([], 0, 0)
    sink.failures = [StoreUnavailable("no")] * 100
    sink.begun.clear()
    sink.go.clear()
    worker.offer(run, failing)
    assert sink.begun.wait(20)
    failing.delete()
    sink.go.set()
    wait_until(lambda: not worker.waiting, "the end of it")
    assert (worker.failures, worker.skipped) == (1, 1)


def test_a_removal_is_retried_and_does_not_count_as_skipped(
    worker: WritebackWorker, sink: FakeSink, checkpoint: Make
) -> None:
    run, one, two = a_run(), checkpoint(1), checkpoint(2)
    sink.failures = [StoreUnavailable("no")]
    one.delete()
    with pytest.raises(RequestRefused, match="step 1 is deleted in this node, but not in its"):
        worker.remove(run, 1, one)
    two.delete()
    worker.remove(run, 2, two)
    assert (sink.removed, worker.waiting) == ([2], 1)
    worker.start()
    wait_until(lambda: not worker.waiting, "the other removal")
    assert (sorted(sink.removed), worker.failures, worker.skipped, worker.written) == ([1, 2], 1, 0, 0)


def test_a_flush_ends_when_the_sink_is_lost_or_the_time_is_up(
    worker: WritebackWorker, sink: FakeSink, checkpoint: Make
) -> None:
    sink.failures = [StoreUnavailable("no")] * 10**6
    sink.lost = True
    worker.offer(a_run(), checkpoint(1))
    assert not worker.flush(time.monotonic()), "nothing runs yet"
    worker.start()
    began = time.monotonic()
    assert not worker.flush(began + 60)
    assert time.monotonic() - began < 50
    assert worker.last_error == "no"


def test_an_evicted_checkpoint_makes_room_only_for_a_newer_one_and_not_twice_in_a_row(
    worker: WritebackWorker, sink: FakeSink, arena: Arena, checkpoint: Make, stream: io.StringIO
) -> None:
    run = a_run()
    worker.make_room(run)  # nothing is written: nothing to release
    worker.start()
    for step, released in ((1, True), (2, False)):
        sink.go.clear()
        sink.begun.clear()
        held = checkpoint(step)
        worker.offer(run, held)
        assert sink.begun.wait(20)
        worker.make_room(run)
        assert arena.used == 2, "it is in memory: its blocks are no room"
        held.evict()
        worker.make_room(run)
        assert arena.used == 2, "no newer one waits"
        newer = checkpoint(step + 10)
        worker.offer(run, newer)
        worker.make_room(run)
        assert arena.used == (2 if released else 4)
        newer.evict()
        newer.delete()
        sink.go.set()
        wait_until(lambda: not worker.waiting, "the end of both")
    assert (sink.written, worker.skipped) == ([("run", 2)], 1)
    assert stream.getvalue().count("made room") == 1


def test_held_chunks_are_all_or_superseded(arena: Arena, checkpoint: Make) -> None:
    one = checkpoint(1)
    with HeldChunks(one, None) as held:
        assert not held.release(abandon=True), "it is in memory"
        one.evict()
        assert arena.used == 2
        assert not held.release(abandon=False), "no copy has it"
        with held.chunk(0) as view:
            assert bytes(view) == DATA[:BLOCK]
        assert arena.used == 1
        with pytest.raises(Superseded), held.chunk(0):
            pass
        assert held.release(abandon=True)
        assert arena.used == 0
        assert not held.release(abandon=True), "nothing is left"
        with pytest.raises(Superseded), held.chunk(1):
            pass
    two = checkpoint(2)
    with HeldChunks(two, None) as held:
        two.delete()
        with pytest.raises(Superseded), held.chunk(0):
            pass
