"""When ranks save after a step: notices in a file, and the schedule of one rank alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deepvm.checkpoint import Checkpointer, ranks
from deepvm.checkpoint.save.schedule import NoticeFile, Pace, SaveSchedule
from deepvm.policy import EverySteps, Moment
from deepvm.runtime.notices.files import FileNotices, write_notice


def test_a_notice_in_a_file_is_what_the_runtime_writes(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    notices = NoticeFile(str(path))
    assert notices.seconds_left() is None
    write_notice(path, seconds_left=60.0)
    left_s = notices.seconds_left()
    assert left_s is not None
    assert 30 < left_s <= 60
    assert notices.seconds_left() is None  # it is returned once
    write_notice(path, seconds_left=None)
    assert FileNotices(path).poll() is not None
    assert notices.seconds_left() == 30.0
    write_notice(path, seconds_left=-5.0)
    assert notices.seconds_left() == 0.0
    path.unlink()
    assert notices.seconds_left() is None


@pytest.mark.parametrize("text", ["{", "[]", '{"at_s": "soon"}', "\xff", '{"at_s": [1]}'])
def test_a_notice_that_cannot_be_read_is_logged_and_forgotten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    path = tmp_path / "notice"
    path.write_text(text, encoding="latin-1")
    notices = NoticeFile(str(path))
    assert [notices.seconds_left(), notices.seconds_left()] == [None, None]
    assert len(caplog.records) == 1
    write_notice(path, seconds_left=9.0)
    assert notices.seconds_left() is not None


def test_a_notice_makes_a_trainer_save_that_would_not_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "notice"
    monkeypatch.setenv("DEEPVM_NOTICE_FILE", str(path))
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    with Checkpointer(state, str(tmp_path / "kept"), policy="every 1000 steps") as ckpt:
        ckpt._pace._last_saved_s -= 60  # a save that is younger than 15 s would be good enough
        saved = []
        for step in range(1, 6):
            if step == 3:
                write_notice(path, seconds_left=120.0)
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            if ckpt.step(step) is not None:
                saved.append(step)
    assert saved == [3]


def test_alone_every_step_is_decided_by_itself() -> None:
    schedule = SaveSchedule(EverySteps(2), 1, expects_notices=True)
    plain = Moment(step=1, now_s=100.0)
    assert not schedule.due(plain, 0.01)
    assert schedule.due(Moment(step=2, now_s=100.0), 0.01)
    assert schedule.due(Moment(step=3, now_s=100.0, notice_s_left=20.0), 0.01)


@pytest.mark.parametrize(
    ("step_s", "asked"),
    [
        (1.0, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]),  # a step takes longer than the time between two questions
        (0.04, [1, 3, 5, 7, 9, 11]),
        (0.001, [1, 11]),
    ],
)
def test_ranks_ask_each_other_a_few_times_a_second_and_all_at_the_same_steps(
    monkeypatch: pytest.MonkeyPatch, step_s: float, asked: list[int]
) -> None:
    questions: list[int] = []

    def of_all_ranks(what: str, values: tuple[int, int]) -> tuple[int, int]:
        questions.append(int(what.removeprefix("step(").removesuffix(")")))
        return values

    monkeypatch.setattr(ranks, "all_reduce_max", of_all_ranks)
    schedule = SaveSchedule(EverySteps(6), 2, expects_notices=True)
    due = [
        step for step in range(1, 13) if schedule.due(Moment(step=step, now_s=100.0, last_saved_step=step - 1), step_s)
    ]
    assert questions == asked
    assert due == [6, 12], "what follows from the step alone needs no question"


@pytest.mark.parametrize("at_s", ["1" + "0" * 400, '"soon"', "[]", "NaN"])
def test_a_notice_with_an_impossible_time_is_logged_and_ends_nothing(tmp_path: Path, at_s: str) -> None:
    path = tmp_path / "notice.json"
    path.write_text(f'{{"action": "interrupt", "at_s": {at_s}}}', encoding="utf-8")
    notices = NoticeFile(str(path))
    assert notices.seconds_left() is None
    assert not notices.interrupts


def test_policies_learn_what_a_save_costs_from_the_restore_and_then_from_saves() -> None:
    pace = Pace()
    assert pace.moment(1, last_stall_s=None, last_save_s=None, under_way=False).save_cost_s is None
    pace.restored(10, 2.5)
    now = pace.moment(11, last_stall_s=None, last_save_s=None, under_way=False)
    assert (now.save_cost_s, now.save_took_s) == (2.5, None)
    now = pace.moment(12, last_stall_s=0.1, last_save_s=1.5, under_way=False)
    assert (now.save_cost_s, now.save_took_s) == (0.1, 1.5)


def test_a_checkpointer_tells_policies_how_long_its_saves_stalled_training(tmp_path: Path) -> None:
    asked: list[Moment] = []

    class Asked(EverySteps):
        def due(self, now: Moment) -> bool:
            asked.append(now)
            return super().due(now)

    model = torch.nn.Linear(8, 8)
    with Checkpointer({"model": model}, str(tmp_path / "kept"), policy=Asked(2)) as ckpt:
        for step in range(1, 4):
            if (handle := ckpt.step(step)) is not None:
                handle.wait("remote", timeout_s=30)
        stall_s, took_s = ckpt.status().last_stall_s, ckpt.status().last_save_s
    assert stall_s is not None
    assert took_s is not None
    assert 0 < stall_s <= took_s
    assert [moment.save_cost_s for moment in asked] == [None, None, stall_s]
    assert asked[-1].save_took_s == took_s
