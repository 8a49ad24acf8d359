"""Plans with measured profiles: measured machines get their own figures, all others a roofline's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from deepvm.catalog import load
from deepvm.catalog.accelerators import find
from deepvm.cli.app import run
from deepvm.errors import UsageError
from deepvm.performance import UniversalScalability
from deepvm.performance.measured import Machine, Provenance, Samples
from deepvm.performance.profile import ComputePoint, OverheadPoint, Profile, ScalingPoint
from deepvm.performance.roofline import accelerator_peaks, reference_roofline
from deepvm.performance.roofline.reference import RESNET18
from deepvm.plan import Request, plan
from deepvm.plan.profiles import Ratings, choose_scaling, rate_machines, rate_point
from deepvm.plan.search.instances import analyse_instances, eflops_of

CATALOG = load("aws-2026-08")


def step_s(accelerator: str, slower: float = 1.0) -> float:
    gpu = find(accelerator)
    assert gpu is not None
    return slower * reference_roofline().seconds(RESNET18, accelerator_peaks(gpu, "fp32"))


def profile(
    accelerator: str | None = "T4", *, count: int = 1, instance: str | None = None, slower: float = 1.0, **more: object
) -> Profile:
    machine = Machine(
        cpu="Xeon", cores=4, accelerator=accelerator, accelerator_count=count if accelerator else 0, instance=instance
    )
    seconds = step_s(accelerator or "T4", slower)
    point = ComputePoint(
        batch=128,
        step_s=Samples((seconds,) * 5),
        flops_per_step=RESNET18.flops,
        traffic_bytes_per_step=RESNET18.traffic_bytes,
    )
    made = Profile(
        workload="resnet18", provenance=Provenance(machine=machine, date="2026-11-18T12:00:00"), compute=(point,)
    )
    return replace(made, **more)


def rated(instance: str, *profiles: Profile) -> tuple[float | None, bool]:
    return eflops_of(CATALOG.instance(instance), rate_machines(CATALOG, profiles))


def test_a_measured_t4_has_377_by_definition() -> None:
    assert rated("g4dn.xlarge", profile(slower=3.0)) == (pytest.approx(377.0), False)


def test_a_measured_type_is_rated_beside_the_measured_t4() -> None:
    t4, l4 = profile("T4"), profile("L4", slower=2.0)
    ratings = rate_machines(CATALOG, [t4, l4])
    eflops, estimated = eflops_of(CATALOG.instance("g6.xlarge"), ratings)
    assert not estimated
    assert eflops == pytest.approx(377 * step_s("T4") / step_s("L4", 2.0))


def test_without_a_t4_the_roofline_predicts_it() -> None:
    eflops, estimated = rated("g6.xlarge", profile("L4"))
    assert not estimated
    assert eflops == pytest.approx(377 * step_s("T4") / step_s("L4"), rel=0.05)


def test_other_types_go_through_the_roofline_of_the_measured_ones() -> None:
    plain, _ = rated("g6.xlarge", profile("T4"))
    # A slow L40S shows that the newer generation reaches less of its data sheet than was known.
    moved, estimated = rated("g6.xlarge", profile("T4"), profile("L40S", slower=2.0))
    assert estimated
    assert plain is not None
    assert moved is not None
    assert moved < plain


def test_several_accelerators_count_and_must_match() -> None:
    ratings = rate_machines(CATALOG, [profile("T4", count=4)])
    assert "g4dn.xlarge" not in ratings.machines
    assert eflops_of(CATALOG.instance("g4dn.12xlarge"), ratings) == (pytest.approx(4 * 377.0), False)


def test_a_named_instance_matches_alone() -> None:
    ratings = rate_machines(CATALOG, [profile("T4", instance="g4dn.2xlarge")])
    assert list(ratings.machines) == ["g4dn.2xlarge"]


def test_scaling_points_become_the_curve_of_their_machine() -> None:
    truth = UniversalScalability(sigma=0.2, kappa=0.01)
    points = tuple(
        ScalingPoint(workers=n, batch=128, step_s=Samples((n / float(truth.speedup(n)),)), gradient_bytes=46_000_000)
        for n in (1, 2, 4, 8, 16)
    )
    ratings = rate_machines(CATALOG, [profile(scaling=points)])
    request = Request(budget_usd=3.0, gpu="T4", ratings=ratings)
    board = analyse_instances(CATALOG, request)
    curve = board.curve(CATALOG.index_by_name["g4dn.xlarge"])
    assert curve.measured == (1, 16)
    assert float(curve.speedup([8])[0]) == pytest.approx(float(truth.speedup(8)), rel=0.03)
    paper = load("paper-aws-2023")
    found = plan(paper, Request(budget_usd=3.0, gpu="T4", ratings=rate_machines(paper, [profile(scaling=points)])))
    assert found.recommendations[0].curves[0].measured == (1, 16)


def test_workers_of_one_machine_are_no_curve_of_several() -> None:
    local = tuple(ScalingPoint(workers=n, batch=8, step_s=Samples((1.0,)), cores_per_worker=1) for n in (1, 2, 4))
    ratings = rate_machines(CATALOG, [profile(scaling=local)])
    assert ratings.curve_spec("g4dn.xlarge") is None
    assert any("within one machine" in note for note in ratings.notes)
    assert choose_scaling(local) is not None  # for the machine itself


def test_points_of_other_batches_or_shares_are_not_mixed() -> None:
    points = [
        ScalingPoint(workers=n, batch=b, step_s=Samples((s,)), cores_per_worker=1)
        for n, b, s in ((1, 8, 1.0), (2, 8, 1.1), (4, 8, 1.2), (1, 16, 9.0), (2, 16, 9.0))
    ]
    choice = choose_scaling(points)
    assert choice is not None
    assert choice.nodes == (1, 2, 4)
    assert choose_scaling(points[:1]) is None


@pytest.mark.parametrize(
    ("profiles", "message"),
    [
        ([profile(None)], "has no accelerator: it says nothing about the GPU machines of aws-2026-08"),
        ([profile("T4", compute=())], "no points of compute, scaling or overheads"),
        ([profile("T4"), profile("L4", workload="gpt2")], "several workloads"),
    ],
)
def test_profiles_that_tell_nothing_get_one_sentence(profiles: list[Profile], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        rate_machines(CATALOG, profiles)


def test_overheads_of_a_machine_without_an_accelerator_forecast_restores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overhead = OverheadPoint(name="regroup", state_bytes=10**6, seconds=Samples((0.5,)))
    profile(None, overheads=(overhead,)).write(tmp_path / "run.json")
    assert run(["plan", "--budget", "3", "--profile", str(tmp_path / "run.json"), "--explain"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "the profiles only forecast restores; the profile of resnet18 on Xeon" in shown
    assert "measured: regroup" in shown


def test_an_unknown_accelerator_is_named() -> None:
    strange = profile("T4")
    machine = replace(strange.provenance.machine, accelerator="Quantum 9000")
    with pytest.raises(UsageError, match="'Quantum 9000', which the accelerator table does not have"):
        rate_machines(CATALOG, [replace(strange, provenance=replace(strange.provenance, machine=machine))])


def test_a_machine_that_the_catalogue_lacks_still_rates_others() -> None:
    ratings = rate_machines(CATALOG, [profile("RTX3090", slower=1.5)])
    assert ratings.machines == {}
    assert ratings.notes == ("aws-2026-08 has no machine like 1 × RTX3090: its measurements only rate others",)
    assert ratings.eflops_of(CATALOG.instance("g6.xlarge")) is not None


def test_ratings_survive_a_plan_as_json() -> None:
    ratings = rate_machines(CATALOG, [profile("L4")])
    again = Ratings.from_json(json.loads(json.dumps(ratings.to_json())))
    for name in ("g6.xlarge", "g5.xlarge", "p4d.24xlarge"):
        if name in CATALOG.index_by_name:
            assert again.eflops_of(CATALOG.instance(name)) == ratings.eflops_of(CATALOG.instance(name))


def test_mfu_is_told_where_the_peak_is_known() -> None:
    half = profile("T4", precision="fp16")
    rating = rate_point(half, half.compute[0])
    assert rating.flops_per_s is not None
    assert rating.mfu == pytest.approx(rating.flops_per_s / 65e12)
    assert rate_point(profile("T4"), half.compute[0]).mfu is None  # the table has no FP32


def test_the_command_line_marks_measured_and_estimated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "l4.json"
    profile("L4", instance="g6.xlarge").write(path)
    words = ["plan", "--budget", "3", "--profile", str(path), "--explain", "-o", str(tmp_path / "plan.json")]
    assert run(words) == 0
    shown = capsys.readouterr().out
    assert "measured with resnet18: g6.xlarge" in shown
    assert "by leaving one out" in " ".join(shown.split())
    document = json.loads((tmp_path / "plan.json").read_text())
    marks = {row["instance"]: row["eflops_estimated"] for row in document["instances"]}
    assert marks["g6.xlarge"] is False
    assert any(marks.values())
    assert document["request"]["ratings"]["roofline"]["devices"] == ["L4"]


def test_a_profile_of_another_version_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new.json"
    path.write_text(json.dumps({**profile().to_json(), "format": "deepvm-profile/2"}))
    assert run(["sweep", "--profile", str(path), "--from", "1", "--to", "1"]) == 2
    said = capsys.readouterr().err
    assert "this deepvm reads 'deepvm-profile/1'" in " ".join(said.split())
