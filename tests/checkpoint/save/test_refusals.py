"""Nodes that refuse, rivals, and clients that vanish: a clear status, and nothing that was committed is lost."""

from __future__ import annotations

import gc
import os
import re
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from deepvm.checkpoint import Checkpointer
from deepvm.checkpoint.ending import at_exit
from deepvm.errors import CheckpointError, UsageError
from deepvm.memnode import Limits, MemoryNode
from deepvm.protocol import frames
from deepvm.protocol.frames import Kind
from deepvm.store.memory.store import MemoryStore
from tests.support.checkpoint.processes import BLOCK, Forked, Work, digest_of, nodes, train, url_of
from tests.support.waiting import wait_until

SMALL = Limits(stop_s=0.0, room_s=0.1, failure_delay_s=0.01)


def failed(ckpt: Checkpointer, step: int, match: str) -> None:
    """The save fails with that reason, the status tells it, and training goes on."""
    with pytest.raises(CheckpointError, match=match):
        ckpt.save(step).wait("remote", 30)
    assert re.search(match, str(ckpt.status().last_error))


def test_a_node_out_of_memory_is_reported_and_what_it_has_stays() -> None:
    fields = {"capacity_bytes": 10 * BLOCK, "block_bytes": BLOCK, "limits": SMALL}  # one and a half checkpoints
    with MemoryNode(**fields) as node:
        work = Work(200)
        work.step()
        with Checkpointer(work.state, f"memory://{node.address}") as ckpt:
            truth = digest_of(work.model, work.optimizer, "")
            ckpt.save(1).wait("remote", 20)
            work.step()
            for step in (2, 3):
                failed(ckpt, step, r"needs .* are free")
                work.step()
            assert (ckpt.status().failed, ckpt.status().remote) == (2, 1)
            assert ckpt.restore() == 1
            assert digest_of(work.model, work.optimizer, "") == truth
            assert node.status()["uploads"] == 0


def test_one_full_replica_is_reported_and_the_other_serves() -> None:
    roomy = {"capacity_bytes": 40 * BLOCK, "block_bytes": BLOCK, "limits": SMALL}
    with MemoryNode(**roomy) as node, MemoryNode(**{**roomy, "capacity_bytes": 2 * BLOCK}) as full:
        work = Work(200)
        work.step()
        with Checkpointer(work.state, f"memory://{node.address},{full.address}?replicas=2") as ckpt:
            ckpt.save(1).wait("remote", 20)
            assert ckpt.status().nodes_down == (full.address,)
            assert ckpt.restore() == 1


@pytest.mark.parametrize(
    ("token", "key", "match"),
    [
        ("wrong", "key", "token"),
        (None, "key", "token"),
        ("right", "wrong", "wrong key"),
        ("right", None, "key"),
    ],
)
def test_a_wrong_token_or_key_is_reported_and_changes_nothing(token: str | None, key: str | None, match: str) -> None:
    fields = {"capacity_bytes": 20 * BLOCK, "block_bytes": BLOCK, "limits": SMALL, "token": "right"}
    with MemoryNode(**fields) as node:
        url, state = f"memory://{node.address}", {"model": torch.nn.Linear(3, 3)}
        with Checkpointer(state, url, token="right", key="key") as mine:
            at_exit.unregister(mine)  # as if another process had it
            mine.save(1).wait("remote", 20)
            with Checkpointer(state, url, token=token, key=key) as theirs:
                failed(theirs, 2, match)
                with pytest.raises(CheckpointError, match=match):
                    theirs.restore()
            mine.save(3).wait("remote", 20)
            assert mine.restore() == 3


def test_a_token_that_the_node_does_not_ask_for_is_not_given_away() -> None:
    with (
        MemoryNode(capacity_bytes=20 * BLOCK, block_bytes=BLOCK, limits=SMALL) as node,
        Checkpointer({"x": 1}, f"memory://{node.address}", token="mine") as ckpt,
    ):
        failed(ckpt, 1, "asks for no token")


@contextmanager
def impostor(speak: Callable[[socket.socket], None]) -> Iterator[str]:
    """Something else that listens where a node should be."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.1)
    ended = threading.Event()

    def serve() -> None:
        while not ended.is_set():
            try:
                client, _ = listener.accept()
            except TimeoutError:
                continue
            with client:
                client.settimeout(1)
                try:
                    speak(client)
                    client.recv(100)
                except OSError:
                    pass

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        ended.set()
        thread.join()
        listener.close()


def hello(**changes: object) -> bytes:
    greeting = {
        "version": frames.VERSION,
        "block_bytes": BLOCK,
        "nonce": frames.new_nonce(),
        "token": False,
    }
    return frames.encode(Kind.HELLO, 0, {**greeting, **changes})


@pytest.mark.parametrize(
    ("greeting", "match"),
    [
        (hello(version=1), "has protocol version '1', this client has 2"),
        (hello(block_bytes=None), "does not greet like a memory node"),
        (hello(block_bytes=1), "does not greet like a memory node"),
        (hello(nonce=""), "does not greet like a memory node"),
        (b"DVM9" + hello()[4:], "not the protocol of a deepvm memory node, or of another version"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n" + b" " * 40, "not the protocol of a deepvm memory node"),
        (b"", "closed the connection"),
        (hello() + frames.encode(Kind.OK, 7), "does not belong to the next request"),
        (hello() + frames.encode(Kind.HELLO, 1), "does not belong to the next request"),
    ],
)
def test_what_is_no_node_of_this_version_is_reported(greeting: bytes, match: str) -> None:
    with (
        impostor(lambda client: client.sendall(greeting) if greeting else client.close()) as address,
        Checkpointer({"x": torch.zeros(3)}, f"memory://{address}", deadline_s=10) as ckpt,
    ):
        failed(ckpt, 1, match)
        with pytest.raises(CheckpointError, match=match):
            ckpt.restore()


def test_a_second_trainer_of_one_run_fences_the_first_and_loses_nothing() -> None:
    with nodes(1) as started:
        url = url_of(started)
        first, second = Work(200), Work(200)
        with Checkpointer(first.state, url) as old:
            at_exit.unregister(old)  # as if another process had it
            old.save(1).wait("remote", 20)
            with Checkpointer(second.state, url) as new:
                assert new.restore() == 1  # reading takes the run from nobody
                first.step()
                old.save(2).wait("remote", 20)
                second.step()
                truth = digest_of(second.model, second.optimizer, "")
                new.save(3).wait("remote", 20)
                for step in (4, 5):
                    failed(old, step, "a newer session writes run 'default' now")
                assert new.restore() == 3
                assert digest_of(second.model, second.optimizer, "") == truth
                second.step()
                new.save(6).wait("remote", 20)
            assert old.status().failed == 2


def test_a_trainer_that_vanishes_in_the_middle_leaves_no_memory_taken(tmp_path: Path) -> None:
    with nodes(1) as started:
        trainer = Forked(train, url_of(started, pace=8_000_000), str(tmp_path / "log"), 0, {"width": 400})
        store = MemoryStore([started[0].address])
        try:
            trainer.receive()
            wait_until(lambda: store.status(started[0].address)["uploads"] == 1, "a save", timeout_s=20)
        finally:
            trainer.kill()
        wait_until(
            lambda: store.status(started[0].address)["connections"] == 1, "the end of its connections", timeout_s=20
        )
        work = Work(400)
        with Checkpointer(work.state, url_of(started)) as ckpt:
            ckpt.save(100).wait("remote", 20)
            status = store.status(started[0].address)
            assert (status["uploads"], status["reserved_bytes"]) == (0, 0)
            assert ckpt.restore() == 100
        store.close()


def figures(pid: int) -> dict[str, int]:
    """Threads, open files and resident kilobytes of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = {name: int(value) for name, value in re.findall(r"^(VmRSS|Threads):\s+(\d+)", status, re.M)}
    return {**found, "fds": len(os.listdir(f"/proc/{pid}/fd"))}


def check_no_growth(saves: int) -> None:
    with nodes(2) as started:
        work = Work(60)
        work.step()
        with Checkpointer(work.state, url_of(started, replicas=2)) as ckpt:

            def save(first: int, last: int) -> None:
                for step in range(first, last):
                    work.step()
                    ckpt.state["name"] = f"at {step}"
                    ckpt.save(step).wait("remote", 20)

            save(0, 50)
            gc.collect()
            pids = [os.getpid(), *(node.pid for node in started)]
            before = [figures(pid) for pid in pids]
            save(50, 50 + saves)
            gc.collect()
            for pid, then in zip(pids, before, strict=True):
                wait_until(lambda: figures(pid)["Threads"] <= then["Threads"], "the end of threads", timeout_s=10)  # noqa: B023
            for then, now in zip(before, [figures(pid) for pid in pids], strict=True):
                assert now["fds"] <= then["fds"] + 1, (then, now)  # the log of a poll may be open
                assert now["VmRSS"] <= then["VmRSS"] + 16 * 1024, (then, now)
            assert ckpt.status().remote == 50 + saves
            assert ckpt.status().failed == 0


def test_many_saves_leave_nothing_behind() -> None:
    check_no_growth(100)


@pytest.mark.chaos
def test_a_thousand_saves_leave_nothing_behind() -> None:
    check_no_growth(1000)


def test_checkpointers_that_are_closed_leave_nothing_behind() -> None:
    with nodes(1) as started:
        work = Work(60)

        def use() -> None:
            with Checkpointer(work.state, url_of(started)) as ckpt:
                ckpt.restore()
                ckpt.save(1).wait("remote", 20)

        use()
        gc.collect()
        before = figures(os.getpid())
        for _ in range(20):
            use()
        gc.collect()
        wait_until(lambda: figures(os.getpid())["Threads"] <= before["Threads"], "the end of all threads", timeout_s=10)
        assert figures(os.getpid())["fds"] <= before["fds"]


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_a_closed_checkpointer_and_its_state_go_at_once_without_a_collector(tmp_path: Path, scheme: str) -> None:
    with nodes(1) as started:
        url = url_of(started) if scheme == "memory" else f"file://{tmp_path}"
        gc.collect()
        gc.disable()
        try:
            model = torch.nn.Linear(10, 10)
            with Checkpointer({"model": model}, url) as ckpt:
                ckpt.restore()
                ckpt.save(1).wait("remote", 20)
            living = [weakref.ref(model), weakref.ref(ckpt)]
            del model, ckpt
            assert [one() for one in living] == [None, None]
        finally:
            gc.enable()


def test_a_closed_checkpointer_takes_no_more_steps(tmp_path: Path) -> None:
    ckpt = Checkpointer({"model": torch.nn.Linear(2, 2)}, f"file://{tmp_path}", policy="every 100 steps")
    ckpt.close()
    for call in (ckpt.step, ckpt.save):
        with pytest.raises(UsageError, match="is closed"):
            call(1)
