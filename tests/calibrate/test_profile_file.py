"""The file of a calibration: continued on the same machine, refused on another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deepvm.calibrate.profile_file import ProfileFile, identity, point_key
from deepvm.calibrate.scratch import scratch_folder
from deepvm.errors import MalformedFile, UsageError
from deepvm.performance.measured import Machine, Provenance, Samples
from deepvm.performance.profile import ComputePoint, NetworkPoint, OverheadPoint, Profile, ScalingPoint, read_profile
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


def test_machines_differ_in_cores_processor_accelerator_and_gibibytes() -> None:
    machine = Machine(cpu="Xeon", cores=4, memory_bytes=16 * 2**30)
    near = replace(machine, memory_bytes=16 * 2**30 + 2**20, instance="c5.xlarge")
    assert identity(near) == identity(machine) == ("Xeon", 4, 16, None, 0)
    assert identity(replace(machine, memory_bytes=None))[2] is None
    for change in ({"memory_bytes": 17 * 2**30}, {"cpu": "EPYC"}, {"cores": 8}, {"accelerator": "T4"}):
        assert identity(replace(machine, **change)) != identity(machine)


COMPUTE = ComputePoint(batch=4, step_s=Samples((0.5,)))
SCALING = ScalingPoint(workers=2, batch=4, step_s=Samples((0.5,)), cores_per_worker=1)


def test_a_point_is_known_by_what_was_measured() -> None:
    assert [point_key(each) for each in (COMPUTE, SCALING, POINT, OVERHEAD)] == [
        (4,), (2, 4, 1), (2, 1, 1.0, 10), ("restore", 10),
    ]  # fmt: skip


def test_forgetting_a_kind_keeps_the_others_and_their_notes() -> None:
    file = ProfileFile.open(None)
    file.add(COMPUTE, notes=["compute with a batch of 4: noisy"])
    file.add(SCALING, replace(SCALING, workers=1), notes=["scaling: noisy", "computer: new"])
    file.forget("compute")
    assert (file.profile.compute, len(file.profile.scaling)) == ((), 2)
    assert file.profile.notes == ("scaling: noisy", "computer: new")
    file.forget("scaling")
    assert file.profile.scaling == ()


def test_what_was_measured_of_checkpoints_continues_with_a_workload_and_the_other_way_round(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    ProfileFile.open(path).add(POINT)
    known = ProfileFile.open(path, workload="tiny", precision="bf16")
    assert (known.profile.workload, known.profile.precision, known.profile.network) == ("tiny", "bf16", (POINT,))
    known.add(COMPUTE)
    assert ProfileFile.open(path).profile == known.profile
    with pytest.raises(UsageError, match=r"p\.json is a profile of tiny in bf16, not of tiny in fp32: choose another"):
        ProfileFile.open(path, workload="tiny")
    with pytest.raises(UsageError, match="not of gpt2 in bf16"):
        ProfileFile.open(path, workload="gpt2", precision="bf16")


@pytest.mark.parametrize(("points", "refused"), [((COMPUTE,), True), ((SCALING,), True), ((POINT,), False)])
def test_another_torch_is_refused_only_beside_steps(points: tuple[object, ...], refused: bool, tmp_path: Path) -> None:
    path, here = tmp_path / "p.json", here_and_now()
    old, new = (replace(here, versions={"torch": version}) for version in ("2.0", "2.1"))
    ProfileFile.open(path, workload="tiny", provenance=old).add(*points)  # type: ignore[arg-type]
    if refused:
        with pytest.raises(UsageError, match=r"was measured with torch 2\.0, this is torch 2\.1: choose another"):
            ProfileFile.open(path, workload="tiny", provenance=new)
    else:
        assert ProfileFile.open(path, workload="tiny", provenance=new).profile.network == (POINT,)


def test_the_date_is_that_of_the_last_point(monkeypatch: pytest.MonkeyPatch) -> None:
    dates = iter(("2026-01-01T00:00:00", "2026-01-02T00:00:00"))
    machine = Machine(cpu="Xeon", cores=4)
    monkeypatch.setattr(
        "deepvm.calibrate.profile_file.here_and_now", lambda: Provenance(machine=machine, date=next(dates))
    )
    file = ProfileFile.open(None)
    file.add(COMPUTE)
    assert file.profile == Profile(
        workload="checkpoints", precision="fp32", compute=(COMPUTE,),
        provenance=Provenance(machine=machine, date="2026-01-02T00:00:00"),
    )  # fmt: skip


def test_a_folder_is_no_file_to_write(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written: it is a folder"):
        ProfileFile.open(tmp_path)


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
