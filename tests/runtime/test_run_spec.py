"""A run's spec as documents: their keys are formats, on disk and between machines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepvm.runtime.run_spec import RunSpec

SPEC = RunSpec(
    script="x.py", args=("--epochs", "3"), run="r", folder=Path("/runs/r"), token_file=Path("/runs/r/token"),
    hub="10.0.0.1:7071", planned_world_size=4, memory_bytes=600, env={"A": "1"}, preempt="at:1s:worker/0",
)  # fmt: skip


def test_settings_have_what_the_user_asked_for_and_nothing_of_one_start() -> None:
    document = json.loads(json.dumps(SPEC.to_settings()))
    assert sorted(document) == [
        "after_loss", "args", "bandwidth_bits_per_s", "batch", "cwd", "durable", "isolate", "max_restarts",
        "memory_bytes", "module", "policy", "preempt", "rank", "script", "seed", "workers",
    ]  # fmt: skip
    assert RunSpec.from_settings(document).to_settings() == SPEC.to_settings()
    assert RunSpec.from_settings({**document, "hub": "elsewhere:1", "of_another_version": 1}).hub == ""


def test_settings_of_a_version_with_fewer_fields_get_defaults() -> None:
    assert RunSpec.from_settings({"script": "x.py", "args": []}) == RunSpec(script="x.py")


def test_a_job_has_what_machines_need_and_no_path_of_this_machine() -> None:
    document = json.loads(json.dumps(SPEC.to_job()))
    assert sorted(document) == [
        "after_loss", "args", "batch", "durable", "env", "max_restarts", "memory_bytes", "module",
        "planned_world_size", "policy", "run", "script",
    ]  # fmt: skip
    assert RunSpec.from_job(document).to_job() == SPEC.to_job()


@pytest.mark.parametrize("missing", ["run", "args", "env", "policy"])
def test_a_job_that_lacks_a_field_is_refused(missing: str) -> None:
    document = {name: value for name, value in SPEC.to_job().items() if name != missing}
    with pytest.raises(KeyError, match=missing):
        RunSpec.from_job(document)
