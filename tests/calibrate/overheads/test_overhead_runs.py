"""Overheads are measured by runs that lose a machine: their script, what a failing run says, and one of them whole."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import deepvm
from deepvm.calibrate.overheads import OverheadSettings, calibrate_overheads, measure, training
from deepvm.calibrate.overheads.settings import parse_sizes
from deepvm.calibrate.profile_file import ProfileFile
from deepvm.calibrate.sized_model import LEAST_BYTES, SizedTraining
from deepvm.checkpoint.handle import SaveHandle
from deepvm.errors import DeepvmError, UsageError
from deepvm.performance.measured import Samples
from deepvm.performance.profile import OVERHEADS, OverheadPoint, read_profile


def test_its_script_saves_a_state_of_the_size_and_continues_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPVM_STORE", f"file://{tmp_path}")
    monkeypatch.setenv("DEEPVM_POLICY", "every 2 steps")
    for steps in (2, 4):
        monkeypatch.setattr(sys, "argv", ["training.py", "1000000", "0", str(steps), str(tmp_path / "starts")])
        training.main()
        largest = max(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
        assert largest == pytest.approx(1_000_000, rel=0.1)
        with deepvm.Checkpointer(SizedTraining(1_000_000).state, policy="at notice") as ckpt:
            assert ckpt.restore() == steps


def test_its_script_waits_for_the_last_save_that_was_not_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPVM_STORE", f"file://{tmp_path}")
    monkeypatch.setenv("DEEPVM_POLICY", "every 1 steps")
    monkeypatch.setattr(sys, "argv", ["training.py", "1000000", "0", "5", str(tmp_path / "starts")])
    taken, real = list[int](), deepvm.Checkpointer.step

    def step(ckpt: deepvm.Checkpointer, number: int) -> SaveHandle | None:
        if number == 5:  # as if the save before were under way
            skipped = SaveHandle(number)
            skipped.advance("skipped", "step 4 is still being sent")
            return skipped
        handle = real(ckpt, number)
        if handle is not None and handle.state != "skipped":
            taken.append(number)
        return handle

    monkeypatch.setattr(deepvm.Checkpointer, "step", step)
    training.main()
    with deepvm.Checkpointer(SizedTraining(1_000_000).state, policy="at notice") as ckpt:
        assert ckpt.restore() == taken[-1]


def test_its_script_counts_its_starts_and_trains_past_the_losses_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = tmp_path / "starts"
    starts.write_text(".")
    monkeypatch.setenv("DEEPVM_STORE", f"file://{tmp_path}")
    monkeypatch.setenv("DEEPVM_POLICY", "every 4 steps")
    monkeypatch.setattr(sys, "argv", ["training.py", "1000000", "1", "2", str(starts)])
    training.main()
    assert starts.read_text() == ".."
    with deepvm.Checkpointer(SizedTraining(1_000_000).state, policy="at notice") as ckpt:
        assert ckpt.restore() == 4, "one loss, two steps before it and two after it"


def test_a_run_that_fails_is_one_sentence_and_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(measure, "_SCRIPT", tmp_path / "missing.py")
    output = tmp_path / "profile.json"
    with pytest.raises(DeepvmError, match=r"the run of 12 kB failed \(exit code 2\): .*missing\.py.* not found"):
        calibrate_overheads(OverheadSettings(sizes=(LEAST_BYTES,)), output)
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []
    assert not output.exists()


def test_sizes_that_the_file_has_are_not_measured_again(tmp_path: Path) -> None:
    file = ProfileFile.open(tmp_path / "profile.json")
    file.add(*(OverheadPoint(name=n, state_bytes=LEAST_BYTES, seconds=Samples((1.0,))) for n in reversed(OVERHEADS)))
    told: list[tuple[str, int, int]] = []
    settings = OverheadSettings(sizes=(LEAST_BYTES,))
    found = calibrate_overheads(settings, file.path, progress=lambda *row: told.append(row))
    assert found.kept == 1
    assert [point.name for point in found.points] == list(OVERHEADS)
    assert told == [("done", 1, 1)]


def test_a_state_larger_than_the_memory_is_refused_with_both_figures() -> None:
    settings = OverheadSettings(sizes=(10**9,))
    settings.check_memory(None)
    settings.check_memory(10**12)
    with pytest.raises(UsageError, match=r"a state of 1 GB on 2 workers .* needs about .* and 4 GB are free"):
        settings.check_memory(4 * 10**9)


def test_sizes_are_read_once_each_and_in_order() -> None:
    assert parse_sizes("1GB, 10MB,10MB") == (10**7, 10**9)


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_a_run_that_loses_a_worker_measures_every_overhead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    output = tmp_path / "profile.json"
    found = calibrate_overheads(OverheadSettings(sizes=(10**6,), repeats=1), output)
    assert {point.name for point in found.points} == {*OVERHEADS}
    assert all(point.state_bytes == 10**6 and point.seconds.median_s >= 0 for point in found.points)
    assert read_profile(output).overheads
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("deepvm-overheads")]
