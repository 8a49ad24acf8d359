"""Steps of this machine: measured, written at once, continued, and doubted where they are doubtful."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deepvm.calibrate.compute import ComputeSettings, calibrate_compute
from deepvm.calibrate.compute import measuring as measuring_module
from deepvm.calibrate.compute.devices import check_precision, pick_device
from deepvm.calibrate.compute.power import PowerMeter
from deepvm.calibrate.compute.steady import doubts, is_steady
from deepvm.calibrate.compute.stepping import time_steps
from deepvm.calibrate.profile_file import ProfileFile
from deepvm.errors import UnknownName, UsageError
from deepvm.performance.job import Job
from deepvm.performance.measured import Provenance, Samples
from deepvm.performance.profile import ComputePoint, read_profile
from deepvm.runtime.this_machine import here_and_now

QUICK = ComputeSettings(workload="tiny", batches=(1, 2), repeats=2, limit_s=0.05)


@pytest.fixture(autouse=True)
def one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_calibration_writes_points_with_counts_and_a_rating(tmp_path: Path) -> None:
    output = tmp_path / "here.json"
    result = calibrate_compute(replace(QUICK, output=output))
    profile = read_profile(output)
    assert profile == result.profile
    assert [point.batch for point in profile.compute] == [1, 2]
    assert all(len(p.step_s.seconds) >= 5 and p.step_s.median_s > 0 for p in profile.compute)
    assert profile.compute[1].flops_per_step == 2 * (profile.compute[0].flops_per_step or 0)
    assert profile.provenance.versions["torch"]
    rating = result.ratings[0]
    assert rating.eflops is not None
    assert rating.eflops_low is not None
    assert rating.eflops_low < rating.eflops
    assert rating.mfu is None  # no data sheet of this processor is known


def test_an_interrupted_calibration_measures_only_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "here.json"
    calls = iter([False, True])  # the second point is interrupted

    def measure(*args: object, **options: object) -> object:
        if next(calls):
            raise KeyboardInterrupt
        return original(*args, **options)

    original = measuring_module.time_steps
    monkeypatch.setattr(measuring_module, "time_steps", measure)
    with pytest.raises(KeyboardInterrupt):
        calibrate_compute(replace(QUICK, output=output))
    before = read_profile(output)
    assert [p.batch for p in before.compute] == [1]
    monkeypatch.undo()
    torch.set_num_threads(1)
    result = calibrate_compute(replace(QUICK, output=output))
    assert result.measured == 1
    assert result.profile.compute[0] == before.compute[0]
    assert [p.batch for p in read_profile(output).compute] == [1, 2]
    assert [p.name for p in tmp_path.iterdir()] == ["here.json"]


def test_again_measures_what_the_file_has(tmp_path: Path) -> None:
    settings = replace(QUICK, batches=(1,), output=tmp_path / "here.json")
    first = calibrate_compute(settings)
    assert calibrate_compute(settings).measured == 0
    again = calibrate_compute(replace(settings, again=True))
    assert again.measured == 1
    assert again.profile.compute[0].step_s != first.profile.compute[0].step_s


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize(
    ("workload", "batches"),
    [("resnet18", (16, 32, 64)), ("resnet50", (1, 2, 4)), ("efficientnet-v2-m", (1, 2)), ("gpt2", (1, 2)),
     ("tiny", (16, 32, 64))],
)  # fmt: skip
def test_batches_unless_given_are_those_of_a_processor(workload: str, batches: tuple[int, ...], tmp_path: Path) -> None:
    output = tmp_path / "p.json"
    file = ProfileFile.open(output, workload=workload)
    file.add(*(ComputePoint(batch=batch, step_s=Samples((0.5,))) for batch in reversed(batches[:-1])))
    told: list[tuple[str, int, int]] = []

    def progress(*row: object) -> None:
        told.append(row)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    settings = ComputeSettings(workload=workload, output=output, device="cpu")
    with pytest.raises(KeyboardInterrupt):
        calibrate_compute(settings, progress)
    assert told == [(f"{workload}, batch {batches[-1]}", 0, 1)]
    file.add(ComputePoint(batch=batches[-1], step_s=Samples((0.5,))))
    found = calibrate_compute(settings, progress)
    assert found.measured == 0
    assert tuple(rating.point.batch for rating in found.ratings) == batches


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cpu": "another"}, "measured on another machine"),
        ({"workload": "gpt2"}, "a profile of gpt2 in fp32, not of tiny"),
        ({"torch": "0.1"}, "measured with torch 0.1"),
    ],
)
def test_a_file_of_another_machine_workload_or_torch_is_refused(
    tmp_path: Path, change: dict[str, str], message: str
) -> None:
    output = tmp_path / "here.json"
    calibrate_compute(replace(QUICK, batches=(1,), output=output))
    document = json.loads(output.read_text())
    if "cpu" in change:
        document["provenance"]["machine"] |= change
    elif "torch" in change:
        document["provenance"]["versions"] |= change
    else:
        document |= change
    output.write_text(json.dumps(document))
    with pytest.raises(UsageError, match=message):
        calibrate_compute(replace(QUICK, output=output))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workload": "resnet51"}, "did you mean"),
        ({"precision": "fp8"}, "precision"),
        ({"precision": "fp16"}, "needs a GPU"),
        ({"precision": "tf32"}, "NVIDIA"),
        ({"device": "tpu"}, "device"),
        ({"batches": (1_000_000,)}, "needs more than .* give a smaller --batch"),
        ({"output": Path("/nonexistent/here.json")}, "is not a folder"),
        ({"output": Path("/tmp")}, "it is a folder"),
    ],
)
def test_bad_settings_get_one_sentence(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        calibrate_compute(replace(QUICK, **settings))


@pytest.mark.parametrize("bad", [{"batches": (0,)}, {"batches": (2**21,)}, {"repeats": 0}, {"limit_s": 0.0}])
def test_settings_out_of_range_are_refused_at_construction(bad: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="must be"):
        replace(QUICK, **bad)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_device_that_is_not_here_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="no CUDA device"):
        pick_device("cuda")
    with pytest.raises(UnknownName):
        check_precision("int4", torch.device("cpu"))


def job(**changes: object) -> Job:
    plain = Job(name="mine", parameters=1, trainable_parameters=1, components={}, gradient_bytes=4, batch=3,
                step_s=Samples((0.1, 0.2)), flops_per_step=1e9, traffic_bytes_per_step=1e8)  # fmt: skip
    return replace(plain, **changes)


def test_a_job_that_was_measured_here_is_rated_without_another_run(tmp_path: Path) -> None:
    where = here_and_now()
    result = calibrate_compute(ComputeSettings(job=job(provenance=where), output=tmp_path / "job.json"))
    assert result.profile.workload == "mine"
    assert result.profile.compute[0].step_s == Samples((0.1, 0.2))
    assert read_profile(tmp_path / "job.json") == result.profile


def test_a_job_of_another_machine_is_refused() -> None:
    where = here_and_now()
    other = Provenance(machine=replace(where.machine, cores=512), date=where.date)
    with pytest.raises(UsageError, match="measured on another machine"):
        calibrate_compute(ComputeSettings(job=job(provenance=other)))
    with pytest.raises(UsageError, match="no measured step"):
        calibrate_compute(ComputeSettings(job=job(step_s=None)))


def test_a_job_named_like_a_workload_is_measured_with_its_batch() -> None:
    result = calibrate_compute(ComputeSettings(job=job(name="tiny", batch=2, step_s=None), repeats=2, limit_s=0.05))
    assert [p.batch for p in result.profile.compute] == [2]


def test_warm_up_lasts_until_steps_are_steady() -> None:
    times = iter([9.0, 5.0, 3.0, 2.0, 1.5, 1.2, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0] + [1.0] * 50)
    timing = time_steps(lambda: next(times), repeats=7, limit_s=60)
    assert timing.settled
    assert timing.step_s.seconds == (1.0,) * 7


def test_warm_up_is_bounded_and_says_that_it_did_not_settle() -> None:
    count = [0]

    def step() -> float:
        count[0] += 1
        return 1.1 ** count[0]

    assert not time_steps(step, repeats=5, limit_s=60).settled
    assert count[0] == 45


def test_steady_is_no_trend() -> None:
    assert is_steady([3, 1, 1, 1, 1, 1, 1])
    assert not is_steady([1, 1, 1, 1.2, 1.2, 1.2])
    assert not is_steady([1, 1])


def test_noise_and_load_are_doubted() -> None:
    calm, wild = Samples((1.0,) * 9), Samples((1.0, 1.0, 1.0, 2.0, 3.0))
    assert doubts("x", calm, load=0.1, cores=2, settled=True) == ()
    said = " ".join(doubts("x", wild, load=1.8, cores=2, settled=False))
    assert "noisy" in said
    assert "1.8 of 2 cores" in said
    assert "still changed" in said


def rapl(folder: Path, microjoules: int, most: int = 10**9) -> None:
    for name in ("intel-rapl:0", "intel-rapl:0:0"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "energy_uj").write_text(str(microjoules))
        (folder / name / "max_energy_range_uj").write_text(str(most))


def test_watts_come_from_the_package_counter_even_if_it_wraps(tmp_path: Path) -> None:
    rapl(tmp_path, 10**9 - 5)
    with PowerMeter(powercap=tmp_path) as meter:
        rapl(tmp_path, 1_000_000)
        meter._began -= 1.0  # a second ago
    assert meter.watts == pytest.approx(1.0, rel=0.5)


def test_watts_are_none_where_nothing_tells_them(tmp_path: Path) -> None:
    with PowerMeter(powercap=tmp_path / "none") as meter:
        pass
    assert meter.watts is None


def test_watts_of_a_gpu_come_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = tmp_path / "done"
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '[N/A]'\necho 60.5\necho 61.5\ntouch {done}\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with PowerMeter(0, powercap=tmp_path / "none") as meter:
        from tests.support.waiting import wait_until

        wait_until(lambda: done.exists() and meter._smi is not None and len(meter._smi.samples) == 2)
    assert meter.watts == pytest.approx(61.0)
