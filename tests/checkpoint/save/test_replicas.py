"""Two copies of every chunk: one node may be lost, or damaged, and nothing is."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import xxhash

from deepvm.checkpoint import Checkpointer
from deepvm.checkpoint.ending import at_exit
from deepvm.errors import CheckpointError, StoreError
from deepvm.memnode import MemoryNode
from deepvm.protocol.frames import Kind
from deepvm.store.memory.repair import repair
from deepvm.store.memory.store import MemoryStore
from tests.support.checkpoint.processes import BLOCK, MIB, Node, Work, digest_of, nodes, url_of
from tests.support.waiting import wait_until


@pytest.fixture
def in_process(start_node: Callable[..., MemoryNode]) -> Callable[..., MemoryNode]:
    return partial(start_node, capacity_bytes=32 * MIB, block_bytes=BLOCK, limits={"flush_s": 1.0})


def saved(work: Work, ckpt: Checkpointer, step: int) -> str:
    digest = digest_of(work.model, work.optimizer, "")
    ckpt.save(step).wait("remote", 40)
    return digest


def restored(url: str, width: int = 200) -> tuple[int | None, str]:
    fresh = Work(width)
    with Checkpointer(fresh.state, url) as ckpt:
        return ckpt.restore(), digest_of(fresh.model, fresh.optimizer, "")


def flip_a_byte(node: MemoryNode, chunk: int) -> None:
    """In the node's memory, behind everybody's back."""
    (run,) = node.runs
    checkpoint = max(run.checkpoints.values(), key=lambda found: found.step)
    with checkpoint.chunk(chunk) as view:
        view[len(view) // 2] ^= 0xFF


def damaged_chunks(node: MemoryNode) -> list[int]:
    store = MemoryStore([node.address])
    manifest = store.manifest("default", store.steps("default")[-1])
    into = memoryview(bytearray(BLOCK))
    bad = []
    for chunk in range(len(manifest.digests)):
        length = manifest.span(chunk)[1]
        connection = store.connect(node.address, "default")
        try:
            connection.read_chunk(manifest, chunk, into[:length])
        except Exception:
            bad.append(chunk)
        finally:
            connection.close()
    store.close()
    return bad


def test_a_lost_node_loses_nothing_and_saves_continue_degraded_until_it_is_back() -> None:
    with nodes(2) as (first, second):
        url = url_of([first, second], replicas=2)
        work = Work(200)
        work.step()
        with Checkpointer(work.state, url, deadline_s=30) as ckpt:
            truth = saved(work, ckpt, 1)
            assert ckpt.status().nodes_down == ()
            first.kill()
            assert restored(url) == (1, truth)
            work.step()
            truth = saved(work, ckpt, 2)
            assert ckpt.status().nodes_down == (first.address,)
            assert restored(url) == (2, truth)
            first.start()  # empty
            wait_until(lambda: ckpt.status().nodes_down == (), "the repair", timeout_s=20)
            second.kill()
            assert restored(url) == (2, truth)  # from the copies that were made again
            second.start()
            work.step()
            truth = saved(work, ckpt, 3)
            wait_until(lambda: ckpt.status().nodes_down == (), "the repair", timeout_s=20)
        assert restored(url) == (3, truth)


def test_a_save_repairs_the_node_that_missed_the_one_before() -> None:
    with nodes(3) as started:
        url = url_of(started, replicas=2)
        work = Work(200)
        work.step()
        with Checkpointer(work.state, url, deadline_s=30) as ckpt:
            saved(work, ckpt, 1)
            started[1].kill()
            saved(work, ckpt, 2)
            assert ckpt.status().nodes_down == (started[1].address,)
            started[1].start()
            truth = saved(work, ckpt, 3)
            assert ckpt.status().nodes_down == ()
        for victim in started:
            victim.kill()
            assert restored(url) == (3, truth)
            victim.start()
            store = MemoryStore([node.address for node in started], replicas=2)
            assert len(repair(store, "default", 3)) == 3
            store.close()


@pytest.mark.parametrize("hung", [0, 1])
def test_a_node_that_hangs_is_passed_over_by_saves_and_restores_until_it_answers(
    hung: int, caplog: pytest.LogCaptureFixture
) -> None:
    with nodes(2) as started:
        url = url_of(started, replicas=2)
        work = Work(200)
        work.step()
        with Checkpointer(work.state, url, deadline_s=60) as ckpt:
            saved(work, ckpt, 1)
            os.kill(started[hung].pid, signal.SIGSTOP)
            try:
                for step in (2, 3, 4):
                    work.step()
                    truth = digest_of(work.model, work.optimizer, "")
                    ckpt.save(step).wait("remote", 9)  # one wait for the node would take 30 s, one to connect 10 s
                assert ckpt.status().nodes_down == (started[hung].address,)
                caplog.clear()
                assert restored(url) == (4, truth)
                assert f"{started[hung].address} hangs" in caplog.text
            finally:
                os.kill(started[hung].pid, signal.SIGCONT)
            wait_until(lambda: ckpt.status().nodes_down == (), "the repair", timeout_s=20)
            started[1 - hung].kill()
            assert restored(url) == (4, truth)


def test_two_lost_nodes_of_two_are_reported_and_training_continues() -> None:
    with nodes(2) as started:
        work = Work(200)
        work.step()
        with Checkpointer(work.state, url_of(started, replicas=2), deadline_s=15) as ckpt:
            saved(work, ckpt, 1)
            for node in started:
                node.kill()
            handle = ckpt.save(2)
            work.step()
            with pytest.raises(CheckpointError, match=r"127\.0\.0\.1"):
                handle.wait("remote", 30)
            assert ckpt.status().failed == 1
            for node in started:
                node.start()
            saved(work, ckpt, 3)


def test_a_damaged_copy_is_replaced_from_the_good_one_and_reported(
    in_process: Callable[..., MemoryNode], caplog: pytest.LogCaptureFixture
) -> None:
    pair = [in_process(), in_process()]
    url = f"memory://{pair[0].address},{pair[1].address}?replicas=2"
    work = Work(200)
    work.step()
    with Checkpointer(work.state, url) as ckpt:
        truth = saved(work, ckpt, 1)
    for node, chunk in ((pair[0], 0), (pair[1], 1), (pair[0], 2)):
        flip_a_byte(node, chunk)
    assert (damaged_chunks(pair[0]), damaged_chunks(pair[1])) == ([0, 2], [1])
    with caplog.at_level(logging.WARNING, "deepvm"):
        assert restored(url) == (1, truth)
    assert "replaced from a good replica" in caplog.text
    assert (damaged_chunks(pair[0]), damaged_chunks(pair[1])) == ([], [])
    assert restored(url) == (1, truth)


def test_without_a_good_copy_the_checkpoint_before_is_used_and_reported(
    in_process: Callable[..., MemoryNode], caplog: pytest.LogCaptureFixture
) -> None:
    node = in_process(buffers=3)
    url = f"memory://{node.address}"
    work = Work(200)
    work.step()
    with Checkpointer(work.state, url) as ckpt:
        before = saved(work, ckpt, 1)
        work.step()
        saved(work, ckpt, 2)
    flip_a_byte(node, 3)
    with caplog.at_level(logging.INFO, "deepvm"):
        assert restored(url) == (1, before)
    assert "passed over step 2" in caplog.text


def test_silence_is_not_taken_for_a_run_without_checkpoints() -> None:
    with nodes(2) as (first, second):
        url = url_of([first, second])
        work = Work(200)
        work.step()
        with Checkpointer(work.state, url) as ckpt:
            truth = saved(work, ckpt, 5)
        second.kill()
        fresh = Work(200)
        with Checkpointer(fresh.state, url) as ckpt, pytest.raises(CheckpointError, match="cannot be reached"):
            ckpt.restore()  # None would mean: begin anew, and overwrite what the other half belongs to
        assert restored(url_of([first, second]).replace(f",{second.address}", "")) == (None, digest_of_new())
        assert truth


def digest_of_new() -> str:
    work = Work(200)
    return digest_of(work.model, work.optimizer, "")


def test_more_nodes_than_before_still_find_what_fewer_kept() -> None:
    with nodes(2) as (first, second):
        work = Work(200)
        work.step()
        with Checkpointer(work.state, url_of([first])) as ckpt:
            truth = saved(work, ckpt, 4)
        both = url_of([first, second])
        assert restored(both) == (4, truth)
        with Checkpointer(work.state, both) as ckpt:
            work.step()
            truth = saved(work, ckpt, 5)
        assert restored(both) == (5, truth)


def test_half_a_commit_is_never_restored_and_pushes_out_no_whole_one() -> None:
    """A trainer ends between its two manifests. The first node would take the half for its newest."""
    with nodes(2) as started:
        url = url_of(started)
        work = Work(200)
        work.step()
        with Checkpointer(work.state, url, deadline_s=10) as ckpt:
            truth = saved(work, ckpt, 1)
            control = ckpt._transfer._commit_client  # type: ignore[union-attr]
            real = control.call

            def ends(node: str, question: Any) -> Any:
                if control._uncommitted.get(2) and node == started[1].address:
                    raise StoreError("killed")
                return real(node, question)

            control.call = ends  # type: ignore[method-assign]
            control.delete_uncommitted = lambda: None  # type: ignore[method-assign]
            with pytest.raises(CheckpointError, match="killed"):
                ckpt.save(2).wait("remote", 20)
        assert steps_at(started[0]) == [1, 2]
        assert restored(url) == (1, truth)
        with Checkpointer(work.state, url + "?pace=1000000&connections=1") as second:
            work.step()  # or nothing would have to be sent, and the save be over at once
            second.save(3)  # slowly
            at_exit.unregister(second)  # whoever restores is another process: it does not wait for this one
            wait_until(lambda: steps_at(started[0]) == [1], "tidying", timeout_s=20)
            assert restored(url) == (1, truth)  # while it is under way


def steps_at(node: Node) -> list[int]:
    store = MemoryStore([node.address])
    connection = store.connect(node.address, "default")
    try:
        return [row["step"] for row in connection.call(Kind.STEPS)[0]["steps"]]
    finally:
        connection.close()


def test_a_manifest_that_cannot_be_published_everywhere_is_published_nowhere_or_later() -> None:
    with nodes(2) as started:
        url = url_of(started)
        work = Work(200)
        work.step()
        with Checkpointer(work.state, url, deadline_s=3) as ckpt:
            truth = saved(work, ckpt, 1)
            control = ckpt._transfer._commit_client  # type: ignore[union-attr]
            real = control.call

            def loses(node: str, question: Any) -> Any:
                if control._uncommitted.get(2) and node == started[1].address:
                    started[1].kill()
                return real(node, question)

            control.call = loses  # type: ignore[method-assign]
            with pytest.raises(CheckpointError):
                ckpt.save(2).wait("remote", 20)
            control.call = real  # type: ignore[method-assign]
        assert steps_at(started[0]) == [1]  # half of 2 is gone, its half of 1 is not
        assert truth


def test_a_step_saved_twice_while_a_node_was_away_restores_as_the_second(tmp_path: Any) -> None:
    spills = [tmp_path / "a", tmp_path / "b"]
    for spill in spills:
        spill.mkdir()
    started: list[Node] = []
    try:
        started += [Node(spill=spill) for spill in spills]
        url = url_of(started, replicas=2)
        work = Work(200)
        work.step()
        with Checkpointer(work.state, url, deadline_s=20) as ckpt:
            ckpt.save(1).wait("durable", 20)
            started[0].kill()
            work.step()
            truth = saved(work, ckpt, 1)
            ckpt.close()
        started[0].start()  # with the first step 1
        assert restored(url) == (1, truth)
    finally:
        for node in started:
            node.kill()


@pytest.mark.parametrize("count", [1, 2])
def test_nodes_that_come_back_at_other_addresses_are_read_where_they_are_now(tmp_path: Any, count: int) -> None:
    spills = [tmp_path / str(number) for number in range(count)]
    for spill in spills:
        spill.mkdir()
    started: list[Node] = []
    try:
        started += [Node(spill=spill) for spill in spills]
        work = Work(200)
        work.step()
        with Checkpointer(work.state, url_of(started), deadline_s=20) as ckpt:
            truth = saved(work, ckpt, 1)
            ckpt.save(1).wait("durable", 40)
        for node in started:
            node.kill()
        again = [Node(spill=spill) for spill in spills]
        started += again
        assert restored(url_of(again)) == (1, truth)
    finally:
        for node in started:
            node.kill()


def test_a_second_attempt_at_a_step_has_nothing_of_the_first(in_process: Callable[..., MemoryNode]) -> None:
    """The first fails half-way, and its connections still speak: whatever they bring goes nowhere."""
    node = in_process()
    store = MemoryStore([node.address], session="trainer")
    data = memoryview(torch.arange(2 * BLOCK // 8).numpy()).cast("B")

    opened: list[Any] = []

    def begin(attempt: int) -> Any:
        connection = store.connect(node.address, "default", write=True)
        opened.append(connection)
        meta = {"step": 1, "size_bytes": 2 * BLOCK, "layout": "", "rank": 0, "world_size": 1, "attempt": attempt}
        connection.call(Kind.BEGIN, meta)
        return connection

    def put(connection: Any, chunk: int) -> None:
        piece = data[chunk * BLOCK : (chunk + 1) * BLOCK]
        digest = xxhash.xxh3_64_intdigest(piece)
        connection.put(1, chunk, piece, digest)
        connection.finish()

    old = begin(1)
    put(old, 0)
    new = begin(2)
    with pytest.raises(Exception, match="began anew"):
        put(old, 1)
    with pytest.raises(Exception, match="2 of 2 chunks are missing"):
        new.call(Kind.SEAL, {"step": 1, "timeout_s": 0}, b"\0\0\0\0\1\0\0\0")
    with pytest.raises(Exception, match="attempt"):
        begin(1)
    for connection in opened:
        connection.close()
    store.close()
