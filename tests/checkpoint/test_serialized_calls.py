"""One call of a checkpointer at a time, whichever thread or signal handler makes it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deepvm.checkpoint import Checkpointer, serialized_calls
from deepvm.errors import CheckpointError
from deepvm.memnode import MemoryNode
from deepvm.policy import Retention

SAVES, WAIT_S = 40, 30.0
SIZE = 300


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}"
        return
    with MemoryNode(listen="127.0.0.1:0", capacity_bytes=2**26, block_bytes=2**16) as node:
        yield f"memory://{node.address}"


def layers() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.Linear(SIZE, SIZE))


def fill(model: torch.nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def values(store: str, step: int) -> set[float]:
    model = layers()
    with Checkpointer({"model": model}, store, policy="1000000 steps") as ckpt:
        assert ckpt.restore(step) == step
    return {float(v) for parameter in model.parameters() for v in parameter.detach().unique()}


def test_a_save_of_another_thread_never_mixes_with_one_of_the_trainer(store: str) -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters())
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    kept: dict[int, Any] = {}
    with Checkpointer(
        {"model": model, "optimizer": optimizer}, store, policy="1000000 steps", retention=Retention(keep_last=10_000)
    ) as ckpt:
        over = threading.Event()

        def other() -> None:
            step = 10**6
            while not over.is_set():
                step += 1
                ckpt.save(step)

        thread = threading.Thread(target=other)
        thread.start()
        try:
            for step in range(1, SAVES + 1):
                fill(model, step)
                handle = ckpt.save(step)
                ckpt.settle()
                fill(model, -1.0)
                if handle.state != "skipped":
                    handle.wait("remote", WAIT_S)
                    kept[step] = handle
        finally:
            over.set()
            thread.join(WAIT_S)
            sys.setswitchinterval(before)
        assert ckpt.status().failed == 0
    newest = list(kept)[-3:]
    for step in newest:
        if step in _steps(store):
            assert values(store, step) == {float(step)}


def _steps(url: str) -> list[int]:
    from deepvm.store.urls import open_store

    store = open_store(url)
    try:
        return store.steps("default")
    finally:
        store.close()


def test_each_save_is_an_attempt_of_its_own_also_of_a_step_that_is_saved_again(store: str) -> None:
    with Checkpointer({"model": layers()}, store, policy="1000000 steps", on_error="raise") as ckpt:
        attempts = []
        for step in (1, 2, 2):
            handle = ckpt.save(step)
            handle.wait("remote", WAIT_S)
            attempts.append(handle.attempt)
    assert attempts == [1, 2, 3]


def test_a_save_within_a_save_is_skipped_and_says_why(store: str) -> None:
    handles: list[Any] = []

    class Interrupted(torch.nn.Linear):
        def state_dict(self, *arguments: Any, **named: Any) -> Any:
            os.kill(os.getpid(), signal.SIGUSR1)
            return super().state_dict(*arguments, **named)

    with Checkpointer({"model": Interrupted(8, 8)}, store, policy="1000000 steps") as ckpt:
        before = signal.signal(signal.SIGUSR1, lambda *_: handles.append(ckpt.save(7)))
        try:
            ckpt.save(1).wait("remote", WAIT_S)
            ckpt.save(2).wait("remote", WAIT_S)
        finally:
            signal.signal(signal.SIGUSR1, before)
    assert {handle.state for handle in handles} == {"skipped"}
    assert "within another call" in str(handles[0].reason)
    assert _steps(store) == [1, 2]


def test_closing_within_a_save_leaves_the_save_whole(store: str) -> None:
    class Closing(torch.nn.Linear):
        def state_dict(self, *arguments: Any, **named: Any) -> Any:
            ckpt.close()
            return super().state_dict(*arguments, **named)

    ckpt = Checkpointer({"model": Closing(8, 8)}, store, policy="1000000 steps")
    ckpt.save(1).wait("remote", WAIT_S)
    ckpt.close()
    assert _steps(store) == [1]


def test_a_call_that_never_gets_its_turn_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serialized_calls, "TURN_S", 0.0)
    turns, held, release = serialized_calls.Turns(), threading.Event(), threading.Event()

    def hold() -> None:
        with turns:
            held.set()
            release.wait(60)

    other = threading.Thread(target=hold)
    other.start()
    held.wait(60)
    with pytest.raises(CheckpointError, match="another thread has been in a call of this checkpointer for 0 s"), turns:
        pass
    release.set()
    other.join()
    with turns:
        assert turns.nested is False
        with turns:
            assert turns.nested is True
        assert turns.nested is False
