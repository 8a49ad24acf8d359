"""A run's spec as documents: their keys are formats, on disk and between machines."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from deepvm.errors import UsageError
from deepvm.runtime.run_spec import RunSpec

SPEC = RunSpec(
    script="x.py", args=("--epochs", "3"), run="r", folder=Path("/runs/r"), token_file=Path("/runs/r/token"),
    hub="10.0.0.1:7071", planned_world_size=4, memory_bytes=600, env={"A": "1"}, preempt="at:1s:worker/0",
)  # fmt: skip


def test_settings_have_what_the_user_asked_for_and_nothing_of_one_start() -> None:
    document = json.loads(json.dumps(SPEC.to_settings()))
    assert sorted(document) == [
        "after_loss", "args", "bandwidth_bits_per_s", "batch", "cwd", "durable", "isolate", "max_restarts",
        "memory_bytes", "module", "origins", "policy", "preempt", "rank", "replan_threshold", "script", "seed",
        "steps",
        "workers",
    ]  # fmt: skip
    assert RunSpec.from_settings(document).to_settings() == SPEC.to_settings()
    assert RunSpec.from_settings({**document, "hub": "elsewhere:1", "of_another_version": 1}).hub == ""


def test_settings_of_a_version_with_fewer_fields_get_defaults() -> None:
    assert RunSpec.from_settings({"script": "x.py", "args": []}) == RunSpec(script="x.py")


def test_a_job_has_what_machines_need_and_no_path_of_this_machine() -> None:
    document = json.loads(json.dumps(SPEC.to_job()))
    assert sorted(document) == [
        "after_loss", "args", "batch", "durable", "env", "max_restarts", "memory_bytes", "module",
        "planned_world_size", "policy", "replicas", "run", "script",
    ]  # fmt: skip
    assert RunSpec.from_job(document).to_job() == SPEC.to_job()


@pytest.mark.parametrize("missing", ["run", "args", "env", "policy"])
def test_a_job_that_lacks_a_field_is_refused(missing: str) -> None:
    document = {name: value for name, value in SPEC.to_job().items() if name != missing}
    with pytest.raises(KeyError, match=missing):
        RunSpec.from_job(document)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"cwd": "/no/such/folder"}, "does not exist"),
        ({"batch": "smaller"}, "batch"),
        ({"workers": 0}, "workers"),
        ({"bandwidth_bits_per_s": 1e9}, "isolate"),
        ({"durable": "memory://10.0.0.1:1"}, "memory"),
        ({"durable": "ftp://nowhere"}, "durable"),
        ({"script": "missing.py"}, "missing.py"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_starts(
    tmp_path: Path, wrong: dict[str, object], says: str
) -> None:
    (tmp_path / "x.py").touch()
    spec = RunSpec(script="x.py", cwd=str(tmp_path), workers=1, durable=str(tmp_path / "kept"))
    assert spec.check() is spec
    with pytest.raises(UsageError, match=says):
        replace(spec, **wrong).check()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("script", "module", "stem"),
    [
        ("some/digits.py", False, "digits"), ("a.b", True, "a-b"), ("x/ü!.py", False, "run"),
        ("-a b-.py", False, "a-b"), (f"{'n' * 50}.py", False, "n" * 40),
    ],
)  # fmt: skip
def test_a_new_name_is_the_script_and_the_time(script: str, module: bool, stem: str) -> None:
    name = RunSpec(script=script, module=module).new_name()
    assert re.fullmatch(rf"{re.escape(stem)}-\d{{8}}-\d{{6}}", name)
