"""A run outlives a full disk and a deleted folder, and says so."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepvm.events import Event
from deepvm.runtime.cluster import Cluster
from deepvm.runtime.ledger import journal as journal_module
from deepvm.runtime.ledger.journal import Journal
from deepvm.runtime.ledger.ledger import Ledger
from deepvm.runtime.ledger.sqlite_file import LedgerError
from tests.support.runtime.machines import machine
from tests.support.runtime.whole_runs import running, words_for

pytestmark = pytest.mark.timeout(300)
CLUSTER = Cluster(
    machines=(machine("worker/0"),), architecture="tiering", catalog="a", checkpoint_bytes=None, restore_s=None
)


def steps(first: int, last: int) -> list[Event]:
    words = "x" * 500
    return [Event(at_s=float(n), kind="step", data={"step": n, "words": words}) for n in range(first, last + 1)]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(path)], capture_output=True).returncode:
        pytest.skip("a small disk needs root")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def fill(disk: Path) -> Path:
    """All of it but nothing: until not a byte more goes in."""
    path = disk / "full"
    with path.open("wb", buffering=0) as file:
        for size in (2**16, 1):
            try:
                while True:
                    file.write(b"0" * size)
            except OSError:
                pass
    return path


def test_a_full_disk_is_reported_once_and_nothing_is_missing_when_there_is_space_again(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "RETRY_S", 0.0)
    said: list[str] = []
    with Ledger.create(small_disk / "ledger.sqlite", run="run", cluster=CLUSTER) as ledger:
        journal = Journal(ledger, said.append)
        journal.append(steps(1, 10))
        full = fill(small_disk)
        for first in range(11, 1011, 100):
            journal.append(steps(first, first + 99))
        assert len(said) == 1
        assert "ledger.sqlite cannot be used now" in said[0]
        assert "full" in said[0]
        assert "training continues" in said[0]
        full.unlink()
        journal.check()
        assert "is written again" in said[1]
        assert [event.data["step"] for event in ledger.events("step")] == list(range(1, 1011))
        assert journal.close() == 0


def test_a_ledger_that_a_full_disk_has_no_room_for_is_not_begun(small_disk: Path) -> None:
    fill(small_disk)
    with pytest.raises(LedgerError, match=r"ledger\.sqlite cannot be written: "):
        Ledger.create(small_disk / "ledger.sqlite", run="run", cluster=CLUSTER)


def test_memory_is_bounded_and_what_is_rare_is_kept(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "MOST_WAITING", 1000)
    said: list[str] = []
    with Ledger.create(small_disk / "ledger.sqlite", run="run", cluster=CLUSTER) as ledger:
        journal = Journal(ledger, said.append)
        full = fill(small_disk)
        monkeypatch.setattr(journal_module, "RETRY_S", 0.0)
        journal.append([Event(at_s=0.0, kind="machine-up", machine="worker/0", data={"words": "x" * 100_000})])
        for first in range(1, 10_001, 100):
            journal.append(steps(first, first + 99))
        assert len(journal.waiting) <= 1000
        full.unlink()
        journal.check()
        assert "lacks" in said[-1]
        assert [event.machine for event in ledger.events("machine-up")] == ["worker/0"]


def test_of_too_many_events_that_wait_the_newest_half_is_kept_and_the_rest_is_counted(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "MOST_WAITING", 100)
    monkeypatch.setattr(journal_module, "RETRY_S", 0.0)
    with Ledger.create(small_disk / "ledger.sqlite", run="run", cluster=CLUSTER) as ledger:
        journal = Journal(ledger, lambda _: None)
        full = fill(small_disk)
        for n in range(101):
            journal.append([Event(at_s=float(n), kind="warning", data={"text": "x" * 10_000})])
        assert [event.at_s for event in journal.waiting] == list(range(51, 101))
        assert journal.close() == 101
        full.unlink()
        assert journal.close() == 51
        assert [event.at_s for event in ledger.events("warning")] == list(range(51, 101))


@pytest.mark.parametrize("how", ["deleted", "moved and made again"])
def test_a_run_folder_that_is_deleted_is_reported_prominently(tmp_path: Path, how: str) -> None:
    folder, said = tmp_path / "run", list[str]()
    folder.mkdir()
    with Ledger.create(folder / "ledger.sqlite", run="run", cluster=CLUSTER) as ledger:
        journal = Journal(ledger, said.append)
        journal.check()
        assert not said
        if how == "deleted":
            shutil.rmtree(folder)
        else:
            os.rename(folder, tmp_path / "moved")
            shutil.copytree(tmp_path / "moved", folder)
        journal._check_at_s = 0.0
        journal.check()
        journal.check()
        assert len(said) == 1
        assert f"{folder} was deleted or replaced" in said[0]
        assert journal.gone


def test_a_run_continues_over_a_full_disk_and_then_without_its_folder_to_a_whole_report(
    small_disk: Path, tmp_path: Path
) -> None:
    options = ["--json", "--save", "every 1000 steps"]
    words = words_for(tmp_path, "run", 150, "--step-s", "0.05", options=options, workers=1)
    env = {"env_more": {"DEEPVM_RUNS": str(small_disk / "runs")}}
    with running(tmp_path, words, name="run", **env) as run:
        run.folder = small_disk
        run.until_step(3)
        full = fill(small_disk)
        toy = tmp_path / "run" / "samples"
        lines = len(toy.read_bytes().splitlines())
        run.until(lambda: len(toy.read_bytes().splitlines()) > lines + 30, "further steps")
        full.unlink()
        run.until(lambda: [e for e in run.events("warning") if "written again" in e.data["text"]], "the end of it")
        shutil.rmtree(small_disk / "runs" / "run")
        out, err = run.process.communicate(timeout=100)
    assert run.process.returncode == 0, err
    report = json.loads(out)
    assert report["outcome"] == "finished"
    assert err.count("training continues, and events are written when") == 1
    assert "was deleted or replaced" in err
    assert report["steps"]["done"] >= 10, "those that were told before the folder, with what trainers tell, was gone"
