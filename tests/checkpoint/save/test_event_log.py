"""The events that a trainer's checkpointer appends to a file."""

from __future__ import annotations

import json
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from deepvm.checkpoint import Checkpointer
from deepvm.checkpoint.handle import SaveHandle
from deepvm.checkpoint.save import event_log as event_log_module
from deepvm.checkpoint.save.event_log import EventLog
from deepvm.events import Event
from tests.support.waiting import wait_until


class Work:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(8, 8)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 8)).sum().backward()
        self.optimizer.step()


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "events.jsonl"
    monkeypatch.setenv("DEEPVM_EVENTS", str(path))
    return path


def read(path: Path, kind: str | None = None) -> list[Event]:
    found = [Event.from_line(line) for line in path.read_bytes().splitlines()]
    return [event for event in found if kind in (None, event.kind)]


def test_the_lines_are_those_of_the_runtime(tmp_path: Path) -> None:
    log = EventLog(str(tmp_path / "events"), rank=0, world_size=3)
    before_s = time.time()
    log.stepped(7, 0.25)
    log.close()
    line = (tmp_path / "events").read_text()
    event = Event.from_line(line)
    assert line == event.to_line() + "\n"
    assert (event.kind, event.machine) == ("step", None)
    assert event.data == {"step": 7, "seconds": 0.25, "world_size": 3}
    assert before_s <= event.at_s <= time.time()


def test_steps_saves_and_restores_are_logged(tmp_path: Path, events: Path) -> None:
    store = f"file://{tmp_path / 'kept'}"
    work = Work()
    with Checkpointer(work.state, store, policy="every 2 steps", on_busy="wait") as ckpt:
        assert ckpt.restore() is None
        for step in range(1, 6):
            work.step()
            ckpt.step(step)
    logged = read(events)
    assert [e.data["step"] for e in logged if e.kind == "step"] == [1, 2, 3, 4, 5]
    assert {e.data["world_size"] for e in logged if e.kind == "step"} == {1}
    saves = [(e.data["step"], e.data["state"]) for e in logged if e.kind == "save"]
    assert sorted(saves) == [(step, state) for step in (2, 4, 5) for state in ("durable", "remote")]
    for data in (e.data for e in logged if e.kind == "save"):
        assert data["place"] == store
        assert 0 <= data["stall_s"] <= data["seconds"]
        assert data["bytes"] == data["bytes_sent"] > 8 * 8 * 4
    with Checkpointer(work.state, store) as ckpt:
        ckpt.restore()
        ckpt.step(5)
    restored, step, *_ = read(events)[len(logged) :]
    assert (restored.kind, restored.data["step"], restored.data["place"]) == ("restored", 5, store)
    assert restored.data["rank"] == 0
    assert 0 < restored.data["seconds"] < 30
    assert step.data["seconds"] <= step.at_s - restored.at_s + 0.01  # since the restore


class Odd:
    def state_dict(self) -> dict[str, object]:
        return {"odd": object()}


def test_a_save_that_fails_or_is_skipped_says_why_and_once(events: Path, tmp_path: Path) -> None:
    with Checkpointer({"model": torch.nn.Linear(4, 4), "odd": Odd()}, str(tmp_path / "a")) as ckpt:
        ckpt.save(1)
    with Checkpointer({"model": torch.nn.Linear(4, 4)}, str(tmp_path / "b"), memory_budget_bytes=1) as ckpt:
        for step in (2, 3):
            ckpt.save(step)
    failed, skipped = read(events, "save")
    assert (failed.data["step"], failed.data["state"]) == (1, "failed")
    assert "object" in failed.data["why"]
    assert (skipped.data["step"], skipped.data["state"]) == (2, "skipped")
    assert skipped.data["why"]


def test_nothing_is_logged_of_a_step_that_is_replayed(tmp_path: Path, events: Path) -> None:
    work = Work()
    store, count = str(tmp_path / "kept"), [0]

    def one_step() -> None:
        work.step()
        count[0] += 1
        ckpt.step(100 + count[0])
        ckpt.save(100 + count[0])

    with Checkpointer(work.state, store, policy="every 100 steps", replay=one_step) as ckpt:
        work.step()
        ckpt.save(1).wait("remote", 20)
        work.step()
        ckpt.step(2)
        wait_until(lambda: ckpt.status().last_witness_step == 1, "the witness")
    before = len(read(events))
    with Checkpointer(work.state, store, replay=one_step) as ckpt:
        assert ckpt.restore(verify="replay") == 1
    assert count == [1]
    assert [e.kind for e in read(events)[before:]] == ["restored"]


def test_a_missing_folder_is_reported_once_and_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DEEPVM_EVENTS", str(tmp_path / "missing" / "events"))
    with Checkpointer(Work().state, str(tmp_path / "kept"), policy="every 2 steps", on_error="raise") as ckpt:
        for step in range(1, 9):
            ckpt.step(step)
    warnings = [record for record in caplog.records if "events cannot be written" in record.message]
    assert len(warnings) == 1
    assert "No such file" in warnings[0].message


def test_a_full_disk_is_reported_once_and_half_a_line_spoils_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "events"
    log = EventLog(str(path), rank=0, world_size=1)
    log.stepped(1, 0.5)
    room = path.stat().st_size + 20
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))  # the kernel writes what fits, then refuses
    try:
        for step in range(2, 5):
            log.stepped(step, 0.5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.stat().st_size == room
    log.stepped(5, 0.5)
    log.close()
    lines = path.read_bytes().splitlines()
    assert [json.loads(line)["step"] for line in (lines[0], lines[-1])] == [1, 5]
    assert len(lines) == 3
    assert [record.message for record in caplog.records if "events cannot be written" in record.message] != []
    assert len(caplog.records) == 1


def test_lines_of_several_writers_do_not_mix(tmp_path: Path) -> None:
    path = str(tmp_path / "events")
    writers = [EventLog(path, rank=0, world_size=4) for _ in range(4)]

    def write(writer: EventLog) -> None:
        for step in range(200):
            writer.saved(SaveHandle(step), "failed", why="x" * (step % 50))

    threads = [threading.Thread(target=write, args=(writer,)) for writer in writers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for writer in writers:
        writer.close()
        writer.stepped(1, 1.0)  # too late, and no harm
    assert len(read(tmp_path / "events", "save")) == 800


def test_the_file_is_for_its_owner_alone(tmp_path: Path, events: Path) -> None:
    with Checkpointer(Work().state, str(tmp_path / "kept")) as ckpt:
        ckpt.step(1)
    assert events.stat().st_mode & 0o077 == 0


def test_without_the_variable_nothing_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEEPVM_EVENTS", raising=False)

    def refuse(*_: Any) -> int:
        raise AssertionError("a file was opened")

    with Checkpointer(Work().state, str(tmp_path / "kept")) as ckpt, monkeypatch.context() as patched:
        patched.setattr(event_log_module.os, "open", refuse)
        ckpt.step(1)
