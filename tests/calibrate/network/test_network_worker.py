"""One worker of a network calibration: its answers to commands, and its training between them."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepvm.calibrate.network import worker as worker_module
from deepvm.calibrate.network.worker import Worker
from deepvm.store.files.store import FileStore

STATE_BYTES = 2_400_000


@pytest.fixture
def owner() -> Iterator[tuple[socket.socket, Worker]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, Worker(theirs, STATE_BYTES, seed=1)


def commands(sock: socket.socket, *messages: dict[str, Any]) -> None:
    sock.sendall(b"".join(json.dumps(message).encode() + b"\n" for message in messages))
    sock.shutdown(socket.SHUT_WR)


def answers(sock: socket.socket, count: int) -> list[dict[str, Any]]:
    sock.settimeout(30)
    with sock.makefile("r") as lines:
        return [json.loads(next(lines)) for _ in range(count)]


def test_it_saves_trains_and_closes_as_it_is_told(owner: tuple[socket.socket, Worker], tmp_path: Path) -> None:
    sock, worker = owner
    store = {"store": f"file://{tmp_path}", "share": 1.0}
    commands(
        sock, {"do": "connect", "run": "one", **store}, {"do": "save", "step": 1}, {"do": "save", "step": 2},
        {"do": "connect", "run": "two", **store}, {"do": "save", "step": 7}, {"do": "close"}, {"do": "close"},
    )  # fmt: skip
    worker.run()
    ready, first, second, again, other, closed, idle = answers(sock, 7)
    assert ready == again == {"ready": True}
    assert closed == idle == {"closed": True}
    for save in (first, second, other):
        assert {*save} == {"remote_s", "stall_s", "bytes", "steps_s"}
        assert save["remote_s"] >= save["stall_s"] >= 0
        assert save["bytes"] == pytest.approx(STATE_BYTES, rel=0.2)
        assert len(save["steps_s"]) >= 1
        assert all(seconds > 0 for seconds in save["steps_s"])
    found = FileStore(tmp_path)
    assert {run: found.steps(run) for run in found.runs()} == {"one": [1, 2], "two": [7]}


def test_without_a_share_it_makes_the_step_before_each_save_alone(
    owner: tuple[socket.socket, Worker], tmp_path: Path
) -> None:
    sock, worker = owner
    commands(
        sock, {"do": "connect", "run": "r", "store": f"file://{tmp_path}", "share": 0.0}, {"do": "save", "step": 1}
    )
    worker.run()
    _, save = answers(sock, 2)
    assert len(save["steps_s"]) == 1


def test_what_fails_is_answered_in_one_sentence(owner: tuple[socket.socket, Worker]) -> None:
    sock, worker = owner
    commands(
        sock, {"do": "save", "step": 1}, {"do": "connect", "run": "r", "store": "nowhere://" + "x", "share": 0}
    )  # fmt: skip
    worker.run()
    lost, refused = answers(sock, 2)
    assert lost["error"].startswith("AttributeError: ")
    assert refused["error"].startswith("UsageError: no store is known for nowhere://: write it like")


def test_an_owner_that_says_nothing_is_left(
    owner: tuple[socket.socket, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, worker = owner
    monkeypatch.setattr(worker_module, "DEADLINE_S", 0.0)
    worker.run()


def test_half_a_command_waits_for_its_other_half(owner: tuple[socket.socket, Worker]) -> None:
    sock, worker = owner
    text = json.dumps({"do": "close"}).encode() + b"\n"
    sock.sendall(text + text[:5])
    assert worker._next(5.0) == {"do": "close"}
    sock.sendall(text[5:])
    assert worker._next(5.0) == {"do": "close"}
    sock.close()
    assert worker._next(5.0) is None


def test_steps_take_their_share_of_a_core(owner: tuple[socket.socket, Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rests are counted, not slept through: half a share rests as long as the step, a quarter three times as long."""
    _, worker = owner
    now_s, slept = [0.0], list[float]()

    def rest(seconds: float) -> None:
        slept.append(seconds)
        now_s[0] += seconds

    monkeypatch.setattr(worker_module.time, "sleep", rest)
    monkeypatch.setattr(worker_module.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(worker, "_step", lambda: 0.5)
    for share in (0.5, 0.25, 1.0):
        worker._share = share
        worker._train(0.001)
    worker._share = 0.0
    worker._train(0.001)
    assert slept == pytest.approx([0.5, 1.5, 0.001, 0.001])


def test_the_newest_thousand_steps_are_kept(
    owner: tuple[socket.socket, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, worker = owner
    monkeypatch.setattr(worker._training, "step", lambda: None)
    worker._steps_s[:] = [float(number) for number in range(1000)]
    taken_s = worker._step()
    assert len(worker._steps_s) == 1000
    assert worker._steps_s[0] == 1.0
    assert worker._steps_s[-1] == taken_s >= 0
