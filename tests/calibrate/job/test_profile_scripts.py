"""``deepvm profile -- train.py``: what is measured is what a Checkpointer then writes, and nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

import deepvm
from deepvm.calibrate.job import profile_script
from deepvm.cli.app import run
from deepvm.performance.job import Job, read_job
from tests.support import ROOT

SCRIPTS = ROOT / "tests" / "support" / "calibrate"


def saved_bytes(state: dict[str, Any], folder: Path) -> int:
    """What a save of the state writes."""
    with deepvm.Checkpointer(state, f"file://{folder}", policy="at notice") as checkpointer:
        handle = checkpointer.save(1)
        handle.wait("remote", timeout_s=60)
        return int(handle.bytes_sent)


def processes_of(scratch: str) -> list[str]:
    """Return the processes that know this folder: all that a profile starts do, and none of another test does."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended, or belongs to another user
            about = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
            if os.fsencode(scratch) in about:
                found.append(f"{process.name} {(process / 'cmdline').read_bytes()!r}")
    return found


def profile(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **how: Any) -> Job:
    monkeypatch.chdir(tmp_path)
    with tempfile.TemporaryDirectory(prefix="t-") as scratch:  # a short name: workers make sockets in it
        monkeypatch.setattr("tempfile.tempdir", scratch)
        job = profile_script([str(SCRIPTS / script)], timeout_s=100, **how)
        assert os.listdir(scratch) == []
        assert processes_of(scratch) == []
    monkeypatch.setattr("tempfile.tempdir", None)
    created = next((note for note in job.notes if "created" in note), "")
    assert all(str(path) in created for path in tmp_path.iterdir())
    return job


@pytest.mark.parametrize(
    ("script", "names", "parameters", "batch", "precision"),
    [
        ("plain.py", ["model", "optimizer"], 300_746, 32, "fp32"),
        pytest.param("amp.py", ["model", "optimizer"], 302_090, 32, "bf16", marks=pytest.mark.chaos),
        pytest.param(
            "gan.py", ["generator", "discriminator", "optimizer_g", "optimizer_d"], 202_241, 24, "fp32",
            marks=pytest.mark.chaos,
        ),
        pytest.param("gpt.py", ["model", "optimizer"], 85_120, 8, "fp32", marks=pytest.mark.chaos),
    ],
)  # fmt: skip
def test_checkpoint_bytes_are_what_a_save_then_writes(
    script: str,
    names: list[str],
    parameters: int,
    batch: int,
    precision: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = profile(script, tmp_path, monkeypatch)
    state = runpy.run_path(str(SCRIPTS / script), run_name="__main__")
    written = saved_bytes({name: state[name] for name in names}, tmp_path / "store")
    assert job.checkpoint_bytes == pytest.approx(written, rel=0.01)
    assert {*job.components} == {*names, "header"}
    assert (job.parameters, job.batch, job.precision) == (parameters, batch, precision)
    assert job.trainable_parameters == parameters
    assert job.gradient_bytes == 4 * parameters
    assert job.step_s is not None
    assert len(job.step_s.seconds) == 10
    assert (job.data_share is not None) == (script in ("plain.py", "amp.py"))
    assert job.origins["components"] == job.origins["step_s"] == "measured"


def test_a_compiled_model_is_measured_and_what_its_script_leaves_is_removed_or_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = set(os.listdir("/dev/shm"))
    job = profile("compiled.py", tmp_path, monkeypatch, steps=3)
    assert not {name for name in set(os.listdir("/dev/shm")) - shared if name.startswith("deepvm-test-")}
    assert job.notes == (f"the script itself created {tmp_path / 'results'}",)
    assert (job.batch, job.parameters, len(job.step_s.seconds if job.step_s else ())) == (12, 676, 3)
    assert job.flops_per_step == 2 * 12 * (2 * 16 * 32 + 3 * 32 * 4)


@pytest.mark.chaos
def test_a_closure_frozen_layers_and_parameters_without_a_module_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = profile("lbfgs.py", tmp_path, monkeypatch, steps=3)
    state = runpy.run_path(str(SCRIPTS / "lbfgs.py"), run_name="__main__")
    held = [state["shift"]]
    parts = {"model": state["model"], "optimizer": state["optimizer"], "parameters": held}
    assert {*job.components} == {*parts, "header"}
    assert job.components["model"].bytes == 4 * (64 * 64 + 64 + 65)
    assert job.components["parameters"].bytes == 4 * 256
    assert job.components["model"].changed_bytes == 4 * 65
    assert (job.parameters, job.trainable_parameters) == (64 * 64 + 64 + 65 + 256, 65 + 256)
    assert job.gradient_bytes == 4 * (65 + 256)
    assert job.batch == 256


def test_a_script_with_a_checkpointer_has_the_components_of_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "profile",
        "--json",
        "-o",
        "job.json",
        "--timeout",
        "100s",
        "--",
        "python",
        str(ROOT / "examples/digits.py"),
    ]
    assert run(words) == 0
    document = json.loads(capsys.readouterr().out)
    assert os.listdir(tmp_path) == ["job.json"]
    job = read_job(tmp_path / "job.json")
    assert document == job.to_json()
    assert [*job.components] == ["model", "optimizer", "schedule", "loader", "header"]
    store = tmp_path / "store"
    environment = {**os.environ, "DEEPVM_STORE": f"file://{store}", "DEEPVM_POLICY": "every 5 steps"}
    command = [sys.executable, str(ROOT / "examples" / "digits.py"), "--steps", "5"]
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=100)
    written = max(path.stat().st_size for path in store.rglob("*") if path.is_file())
    assert job.checkpoint_bytes == pytest.approx(written, rel=0.01)
    assert job.batch == 64
    assert job.flops_per_step == pytest.approx(2 * 64 * (3 * 85_002 - 64 * 256), rel=0.02)
