"""job.json and profile.json: what is written is read again, each field up to its limit and not beyond."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepvm.errors import MalformedFile, UsageError
from deepvm.performance.job import Component, Job, job_of, read_job
from deepvm.performance.measured import Machine, Provenance, Samples, check_format, write_document
from deepvm.performance.profile import (
    ComputePoint,
    NetworkPoint,
    OverheadPoint,
    Profile,
    ScalingPoint,
    merge,
    profile_of,
    read_profile,
)
from deepvm.strict_json import MalformedJson

MACHINE = Machine(
    cpu="A CPU", cores=8, memory_bytes=2**34, instance="g4dn.xlarge", accelerator="T4", accelerator_count=2
)
WHERE = Provenance(machine=MACHINE, date="2026-11-18T12:00:00", versions={"torch": "2.13.0"})
JOB = Job(
    name="resnet",
    parameters=100,
    trainable_parameters=90,
    components={"model": Component(bytes=400, changed_bytes=360), "loader": Component(bytes=5)},
    gradient_bytes=360,
    batch=32,
    step_s=Samples((0.25, 0.5, 1.0)),
    data_share=0.125,
    flops_per_step=1e12,
    traffic_bytes_per_step=1e10,
    memory_bytes=5000,
    memory_parts={"weights": 400, "gradients": 400, "optimizer": 800, "activations": 3000},
    host_memory_bytes=6000,
    precision="bf16",
    parallel="fsdp",
    provenance=WHERE,
    origins={"step_s": "measured", "flops_per_step": "computed"},
    notes=("one", "two"),
)
PROFILE = Profile(
    workload="resnet",
    provenance=WHERE,
    precision="bf16",
    compute=(
        ComputePoint(
            batch=8, step_s=Samples((0.5,)), flops_per_step=1e9, traffic_bytes_per_step=1e8, operations_per_step=99,
            watts=60.5,
        ),
    ),
    scaling=(ScalingPoint(workers=2, batch=8, step_s=Samples((0.6,)), gradient_bytes=360, cores_per_worker=4),),
    network=(
        NetworkPoint(
            workers=3, memory_nodes=2, link_gbps=1.5, checkpoint_bytes=10**6, remote_s=Samples((0.1, 0.2)),
            step_s=Samples((0.3,)),
        ),
    ),
    overheads=(OverheadPoint(name="restore", state_bytes=10**6, seconds=Samples((0.4,))),),
    notes=("a note",),
)  # fmt: skip


def test_a_job_is_this_document(tmp_path: Path) -> None:
    JOB.write(tmp_path / "job.json")
    document = json.loads((tmp_path / "job.json").read_text())
    assert read_job(tmp_path / "job.json") == JOB
    assert document.pop("provenance")["machine"]["cores"] == 8
    step = document.pop("step_s")
    assert (step.pop("samples_s"), step) == (
        [0.25, 0.5, 1.0], {"median_s": 0.5, "p5_s": pytest.approx(0.275), "p95_s": pytest.approx(0.95)},
    )  # fmt: skip
    assert document == {
        "format": "deepvm-job/1",
        "name": "resnet",
        "parameters": 100,
        "trainable_parameters": 90,
        "checkpoint_bytes": 405,
        "components": {
            "model": {"bytes": 400, "changed_bytes": 360},
            "loader": {"bytes": 5, "changed_bytes": None},
        },
        "gradient_bytes": 360,
        "batch": 32,
        "data_share": 0.125,
        "flops_per_step": 1e12,
        "traffic_bytes_per_step": 1e10,
        "achieved_flops_per_s": 2e12,
        "memory_bytes": 5000,
        "memory_parts": {"weights": 400, "gradients": 400, "optimizer": 800, "activations": 3000},
        "host_memory_bytes": 6000,
        "precision": "bf16",
        "parallel": "fsdp",
        "origins": {"step_s": "measured", "flops_per_step": "computed"},
        "notes": ["one", "two"],
    }


def test_a_job_of_which_little_is_known_has_defaults() -> None:
    found = job_of(
        {
            "format": "deepvm-job/1", "name": "", "parameters": 0, "trainable_parameters": 0, "components": {},
            "gradient_bytes": 0,
        }
    )  # fmt: skip
    assert found == Job(name="", parameters=0, trainable_parameters=0, components={}, gradient_bytes=0)
    assert (found.checkpoint_bytes, found.sharded_bytes, found.achieved_flops_per_s) == (0, 0, None)
    assert (found.precision, found.parallel) == ("fp32", "ddp")


def test_sharded_memory_is_that_of_fsdp_and_no_more_than_there_is() -> None:
    assert JOB.sharded_bytes == 1600
    assert replace(JOB, memory_bytes=1500).sharded_bytes == 1500
    assert replace(JOB, memory_bytes=None).sharded_bytes == 0
    assert replace(JOB, parallel="ddp").sharded_bytes == 0
    assert replace(JOB, memory_parts={"weights": 7}).sharded_bytes == 7


def test_achieved_flops_need_both_figures() -> None:
    assert replace(JOB, flops_per_step=None).achieved_flops_per_s is None
    assert replace(JOB, step_s=None).achieved_flops_per_s is None
    assert replace(JOB, step_s=Samples((0.0,))).achieved_flops_per_s is None


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [({"parallel": "tensor"}, "it must be ddp or fsdp"), ({"precision": "fp8"}, "precision is 'fp8': it must be one")],
)
def test_a_job_of_unknown_kinds_is_refused(wrong: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        replace(JOB, **wrong)


def changed(document: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """A copy in which the value at ``a/0/b`` is another."""
    made = copy.deepcopy(document)
    *folders, name = path.split("/")
    at: Any = made
    for folder in folders:
        at = at[int(folder) if folder.isdigit() else folder]
    at[name] = value
    return made


JOB_LIMITS = [
    ("name", "n" * 200, "n" * 201),
    ("parameters", 2**60, 2**60 + 1),
    ("parameters", 0, -1),
    ("trainable_parameters", 2**60, 2**60 + 1),
    ("trainable_parameters", 0, -1),
    ("components/model/bytes", 2**60, 2**60 + 1),
    ("components/model/bytes", 0, -1),
    ("components/model/changed_bytes", 2**60, 2**60 + 1),
    ("components/model/changed_bytes", 0, -1),
    ("gradient_bytes", 2**60, 2**60 + 1),
    ("gradient_bytes", 0, -1),
    ("batch", 1, 0),
    ("batch", 2**40, 2**40 + 1),
    ("data_share", 0, -0.001),
    ("data_share", 1, 1.001),
    ("flops_per_step", 0, -1),
    ("flops_per_step", 1e30, 2e30),
    ("traffic_bytes_per_step", 0, -1),
    ("traffic_bytes_per_step", 1e24, 2e24),
    ("memory_bytes", 0, -1),
    ("memory_bytes", 2**60, 2**60 + 1),
    ("memory_parts/weights", 0, -1),
    ("memory_parts/weights", 2**60, 2**60 + 1),
    ("host_memory_bytes", 0, -1),
    ("host_memory_bytes", 2**60, 2**60 + 1),
    ("precision", "tf32", "fp8"),
    ("parallel", "ddp", "p" * 21),
    ("origins", {"batch": "guessed"}, {"batch": "read"}),
    ("notes", ["n" * 2000], ["n" * 2001]),
    ("notes", ["n"] * 100, ["n"] * 101),
    ("step_s", None, {"samples_s": []}),
    ("step_s", {"samples_s": [0]}, {"samples_s": [-1]}),
    ("step_s", {"samples_s": [1e9]}, {"samples_s": [2e9]}),
    ("provenance", None, []),
    ("provenance/machine/cpu", "c" * 200, "c" * 201),
    ("provenance/machine/cores", 1, 0),
    ("provenance/machine/cores", 1_000_000, 1_000_001),
    ("provenance/machine/memory_bytes", 1, 0),
    ("provenance/machine/memory_bytes", 2**60, 2**60 + 1),
    ("provenance/machine/instance", "i" * 200, "i" * 201),
    ("provenance/machine/accelerator", None, "a" * 201),
    ("provenance/machine/accelerator_count", 0, -1),
    ("provenance/machine/accelerator_count", 1024, 1025),
    ("provenance/date", "d" * 40, "d" * 41),
    ("provenance/versions/torch", "v" * 200, "v" * 201),
    ("format", "deepvm-job/1", "deepvm-job/2"),
]


@pytest.mark.parametrize(("path", "good", "bad"), JOB_LIMITS)
def test_each_figure_of_a_job_has_its_limits(path: str, good: object, bad: object) -> None:
    document = JOB.to_json()
    del document["checkpoint_bytes"]  # which follows from the components
    job_of(changed(document, path, good))
    with pytest.raises((MalformedJson, UsageError)):
        job_of(changed(document, path, bad))


@pytest.mark.parametrize("bad", [-5, "x", 1e30, True, JOB.checkpoint_bytes + 1])
def test_the_size_of_a_checkpoint_is_that_of_its_components(bad: object) -> None:
    with pytest.raises(MalformedJson, match="checkpoint_bytes is"):
        job_of(changed(JOB.to_json(), "checkpoint_bytes", bad))


PROFILE_LIMITS = [
    ("workload", "w" * 200, "w" * 201),
    ("precision", "p" * 20, "p" * 21),
    ("notes", ["n" * 2000], ["n" * 2001]),
    ("compute/0/batch", 1, 0),
    ("compute/0/batch", 2**40, 2**40 + 1),
    ("compute/0/flops_per_step", 0, -1),
    ("compute/0/flops_per_step", 1e30, 2e30),
    ("compute/0/traffic_bytes_per_step", 0, -1),
    ("compute/0/traffic_bytes_per_step", 1e24, 2e24),
    ("compute/0/operations_per_step", 0, -1),
    ("compute/0/operations_per_step", 2**40, 2**40 + 1),
    ("compute/0/watts", 0, -1),
    ("compute/0/watts", 1e6, 1e6 + 1),
    ("scaling/0/workers", 1, 0),
    ("scaling/0/workers", 1_000_000, 1_000_001),
    ("scaling/0/batch", None, 0),
    ("scaling/0/batch", 2**40, 2**40 + 1),
    ("scaling/0/gradient_bytes", 0, -1),
    ("scaling/0/gradient_bytes", 2**60, 2**60 + 1),
    ("scaling/0/cores_per_worker", 1, 0),
    ("scaling/0/cores_per_worker", 1_000_000, 1_000_001),
    ("network/0/workers", 1, 0),
    ("network/0/workers", 1_000_000, 1_000_001),
    ("network/0/memory_nodes", 1, 0),
    ("network/0/memory_nodes", 1_000_000, 1_000_001),
    ("network/0/link_gbps", None, 0),
    ("network/0/link_gbps", 1e-6, 1e-7),
    ("network/0/link_gbps", 1e6, 1e6 + 1),
    ("network/0/checkpoint_bytes", 0, -1),
    ("network/0/checkpoint_bytes", 2**60, 2**60 + 1),
    ("network/0/step_s", None, []),
    ("overheads/0/name", "start", "starts"),
    ("overheads/0/state_bytes", 0, -1),
    ("overheads/0/state_bytes", 2**60, 2**60 + 1),
    ("format", "deepvm-profile/1", None),
]


@pytest.mark.parametrize(("path", "good", "bad"), PROFILE_LIMITS)
def test_each_figure_of_a_profile_has_its_limits(path: str, good: object, bad: object) -> None:
    document = json.loads(json.dumps(PROFILE.to_json()))
    profile_of(changed(document, path, good))
    with pytest.raises((MalformedJson, UsageError)):
        profile_of(changed(document, path, bad))


def test_a_profile_is_written_whole_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    PROFILE.write(path, private=True)
    assert read_profile(path) == PROFILE
    assert path.stat().st_mode & 0o777 == 0o600
    document = json.loads(path.read_text())
    assert list(document) == [
        "format", "workload", "precision", "provenance", "compute", "scaling", "network", "overheads", "notes",
    ]  # fmt: skip
    least = profile_of({name: document[name] for name in ("format", "workload", "provenance")})
    assert least == Profile(workload="resnet", provenance=WHERE)
    assert [p.name for p in tmp_path.iterdir()] == ["profile.json"]


@pytest.mark.parametrize(("read", "what"), [(read_job, "a valid job"), (read_profile, "a valid profile")])
def test_other_files_are_refused_with_the_command_that_makes_one(tmp_path: Path, read: Any, what: str) -> None:
    for document, problem in (({}, "it has no format"), ({"format": "x/1"}, "its format is .*x/1"), ([], "no")):
        path = tmp_path / "file.json"
        path.write_text(json.dumps(document))
        with pytest.raises(MalformedFile, match=f"not {what}: .*{problem}"):
            read(path)
    with pytest.raises(UsageError, match=r"none\.json: it cannot be read"):
        read(tmp_path / "none.json")


def test_a_document_of_the_right_format_is_returned() -> None:
    assert check_format({"format": "a/1", "b": 2}, "a/1", "x") == {"format": "a/1", "b": 2}
    with pytest.raises(MalformedJson, match="this deepvm reads 'a/1': make it again with deepvm x"):
        check_format({"format": "a/2"}, "a/1", "deepvm x")


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "folder", tmp_path / "none" / "file"):
        with pytest.raises(UsageError, match="cannot be written"):
            write_document(path, {"a": 1})
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]
    write_document(tmp_path / "file", {"a": 1})
    assert (tmp_path / "file").read_text() == '{\n  "a": 1\n}\n'


def test_profiles_of_one_machine_workload_and_precision_merge_and_others_do_not() -> None:
    newer = replace(
        PROFILE,
        compute=(replace(PROFILE.compute[0], step_s=Samples((0.75,))), replace(PROFILE.compute[0], batch=16)),
        notes=("a note", "another"),
    )
    (joined,) = merge([PROFILE, newer])
    assert [(p.batch, p.step_s.seconds) for p in joined.compute] == [(8, (0.5, 0.75)), (16, (0.5,))]
    assert joined.scaling[0].step_s.seconds == (0.6, 0.6)
    assert joined.network[0].remote_s.seconds == (0.1, 0.2, 0.1, 0.2)
    assert joined.overheads[0].seconds.seconds == (0.4, 0.4)
    assert joined.notes == ("a note", "another")
    elsewhere = replace(PROFILE, provenance=replace(WHERE, machine=replace(MACHINE, cores=9)))
    others = (elsewhere, replace(PROFILE, workload="gpt"), replace(PROFILE, precision="fp16"))
    assert merge([PROFILE, *others]) == (PROFILE, *others)
    assert merge([]) == ()


@pytest.mark.parametrize("bad", [(), (-0.1,), (math.nan,), (math.inf,)])
def test_samples_are_at_least_one_time(bad: tuple[float, ...]) -> None:
    with pytest.raises(UsageError, match="samples need at least one time"):
        Samples(bad)


def test_quantiles_are_interpolated_between_samples() -> None:
    five = Samples((5.0, 1.0, 3.0, 2.0, 4.0))
    assert [five.quantile_s(share) for share in (0, 0.25, 0.3, 0.5, 1)] == pytest.approx([1.0, 2.0, 2.2, 3.0, 5.0])
    assert (five.median_s, five.spread) == (3.0, pytest.approx((4.8 - 1.2) / 3))
    assert (Samples((7.0,)).quantile_s(0.95), Samples((7.0,)).spread) == (7.0, 0.0)
    assert Samples((0.0, 0.0)).spread == 0.0


def test_a_machine_is_named_by_what_it_has() -> None:
    assert MACHINE.title == "g4dn.xlarge (2 × T4)"
    assert replace(MACHINE, instance=None).title == "2 × T4"
    assert replace(MACHINE, accelerator=None).title == "g4dn.xlarge (8 cores)"
    assert Machine(cpu="x", cores=8).title == "8 cores"
    assert Machine.from_json({"cpu": "x", "cores": 8}) == Machine(cpu="x", cores=8)
