"""The file of a calibration: continued on the same machine, refused on another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deepvm.calibrate.profile_file import ProfileFile
from deepvm.calibrate.scratch import scratch_folder
from deepvm.errors import MalformedFile, UsageError
from deepvm.performance.measured import Samples
from deepvm.performance.profile import NetworkPoint, OverheadPoint, read_profile
from deepvm.runtime.this_machine import here_and_now, this_machine

POINT = NetworkPoint(workers=2, memory_nodes=1, link_gbps=1.0, checkpoint_bytes=10, remote_s=Samples((0.5,)))
OVERHEAD = OverheadPoint(name="restore", state_bytes=10, seconds=Samples((0.5,)))


def test_each_point_is_in_the_file_at_once_and_a_later_calibration_continues_it(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    file = ProfileFile.open(path)
    assert not path.exists()
    file.add(POINT, notes=["one"])
    assert read_profile(path).network == (POINT,)
    file.add(OVERHEAD, notes=["one"])
    again = ProfileFile.open(path)
    assert (again.profile.network, again.profile.overheads) == ((POINT,), (OVERHEAD,))
    newer = replace(POINT, remote_s=Samples((0.25, 0.75)))
    again.add(newer)
    assert read_profile(path).network == (newer,)
    assert read_profile(path).notes == ("one",)
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]


def test_a_profile_of_another_machine_is_refused_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    file = ProfileFile.open(path)
    machine = replace(this_machine(), cpu="Another CPU", cores=96)
    file.profile = replace(file.profile, provenance=replace(here_and_now(), machine=machine))
    file.add(POINT)
    with pytest.raises(UsageError, match=r"another machine \(Another CPU, 96 cores\): choose another -o file") as told:
        ProfileFile.open(path)
    assert "\n" not in str(told.value)


def test_a_profile_with_a_little_more_memory_is_of_the_same_machine(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    file = ProfileFile.open(path)
    machine = this_machine()
    assert machine.memory_bytes is not None
    machine = replace(machine, memory_bytes=round(machine.memory_bytes / 2**30) * 2**30 + 4096)
    file.profile = replace(file.profile, provenance=replace(here_and_now(), machine=machine))
    file.add(POINT)
    assert ProfileFile.open(path).profile.network == (POINT,)


def test_other_files_and_places_are_refused(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text('{"format": "deepvm-job/1"}')
    with pytest.raises(MalformedFile, match="deepvm-job/1"):
        ProfileFile.open(tmp_path / "job.json")
    with pytest.raises(UsageError, match="is not a folder"):
        ProfileFile.open(tmp_path / "nowhere" / "profile.json")


def test_a_folder_of_a_killed_calibration_is_removed_by_the_next(tmp_path: Path) -> None:
    left = tmp_path / "deepvm-calibrate-999999999-x"
    left.mkdir()
    (left / "file").touch()
    other = tmp_path / "mine"
    other.mkdir()
    with scratch_folder(tmp_path) as made:
        assert {path.name for path in tmp_path.iterdir()} == {"mine", made.name}
        with scratch_folder(tmp_path):  # of the same process: it lives
            assert made.exists()
    assert list(tmp_path.iterdir()) == [other]
    with pytest.raises(UsageError, match="no folder can be created"), scratch_folder(Path("/proc/nowhere")):
        pass
