"""Scaling over several hosts: what they answer, and a measurement. ``ssh`` is replaced by a shell; ranks are real."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepvm.calibrate.scaling import ScalingSettings, calibrate_scaling
from deepvm.calibrate.scaling.hosts import Hosts, examine, parse_hosts
from deepvm.calibrate.scaling.processes import run_group
from deepvm.calibrate.scaling.worker import own_address
from deepvm.errors import DeepvmError, UsageError
from deepvm.performance.measured import Machine, Provenance
from deepvm.performance.profile import read_profile

HERE = Provenance(
    machine=Machine(cpu="EPYC", cores=2, memory_bytes=2**33),
    date="2026-11-18T20:00:00+0000",
    versions={"deepvm": "0.1.0", "torch": "2.13.0"},
)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An ssh that runs the command here. Its hosts are h1, h2 ...; a host named ``lost`` cannot be reached."""
    folder = tmp_path / "bin"
    folder.mkdir()
    ssh = folder / "ssh"
    ssh.write_text(
        "#!/bin/sh\n"
        'while [ "$#" -gt 2 ]; do shift; done\n'
        'if [ "$1" = lost ]; then echo "ssh: connect to host lost port 22: Connection refused" >&2; exit 255; fi\n'
        'export OMP_NUM_THREADS=1 NAME="$1" SSH_CONNECTION="127.0.0.1 50000 127.0.0.1 22"\n'
        'exec sh -c "$2"\n'
    )
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def answering(folder: Path, answers: dict[str, Any]) -> str:
    """Make a Python of all hosts that prints an answer for each."""
    for name, answer in answers.items():
        (folder / name).write_text(answer if isinstance(answer, str) else json.dumps(answer))
    python = folder / "python"
    python.write_text(f'#!/bin/sh\ncat "{folder}/$NAME"\n')
    python.chmod(0o755)
    return str(python)


def about(provenance: Provenance = HERE, device: str = "cpu") -> dict[str, Any]:
    return {"device": device, "provenance": provenance.to_json()}


def test_hosts_of_one_kind_are_one_machine(shell: Path) -> None:
    python = answering(shell, {"h1": about(), "h2": about(replace(HERE, date="2026-11-18T21:00:00+0000"))})
    hosts = examine(("h1", "h2"), python=python, device="auto")
    assert (hosts.provenance, hosts.device) == (HERE, "cpu")
    command = hosts.command(1, {"rank": 1})
    assert command[-2:] == ["h2", f"{python} -m deepvm.calibrate.scaling.worker '{{\"rank\": 1}}'"]


BIGGER = replace(HERE, machine=replace(HERE.machine, cores=8))
OLDER = replace(HERE, versions={**HERE.versions, "torch": "2.4.0"})
FOUR = replace(HERE, machine=replace(HERE.machine, accelerator="T4", accelerator_count=4))


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (about(BIGGER), r"h2 is a different machine \(EPYC, 8 cores\) than h1 .*: a curve is of one kind of machine"),
        (about(HERE, "cuda"), "h2 is a different machine"),
        (about(OLDER), r"h2 has torch 2\.4\.0, h1 has 2\.13\.0: install the same on all hosts"),
        (about(FOUR), "h2 has 4 GPUs: --on ssh: measures hosts with one GPU each"),
        ("", "h2 did not answer as a worker does"),
        ("[1]", "h2 did not answer as a worker does"),
        ({"device": "cpu"}, "h2 did not answer as a worker does"),
    ],
)
def test_hosts_that_differ_are_refused(shell: Path, second: Any, message: str) -> None:
    python = answering(shell, {"h1": about(), "h2": second})
    with pytest.raises((UsageError, DeepvmError), match=message):
        examine(("h1", "h2"), python=python, device="auto")


def test_a_host_that_cannot_be_reached_or_has_no_deepvm_is_one_sentence(shell: Path) -> None:
    with pytest.raises(DeepvmError, match=r"^lost cannot run a worker: ssh: .*Connection refused$"):
        examine(("lost",), python="python3", device="auto")
    with pytest.raises(DeepvmError, match=r"^h1 cannot run a worker: .*name its Python with --remote-python"):
        examine(("h1",), python="/nothing/python3", device="auto")


def test_a_machine_without_ssh_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="install openssh-client"):
        examine(("h1",), python="python3", device="auto")


def test_hosts_are_parsed() -> None:
    assert parse_hosts("local") == ()
    assert parse_hosts("ssh:h1, ubuntu@10.0.0.2,ssh://h3:2222") == ("h1", "ubuntu@10.0.0.2", "ssh://h3:2222")


def test_a_host_meets_the_others_at_the_address_that_ssh_arrived_at() -> None:
    assert own_address({"SSH_CONNECTION": "10.0.0.1 40000 10.0.0.2 22"}) == "10.0.0.2"
    assert own_address({}) == "127.0.0.1"


@pytest.mark.timeout(300)
def test_ranks_of_two_hosts_meet_at_a_port_of_the_first(shell: Path) -> None:
    hosts = Hosts(names=("h1", "h2"), python=sys.executable, provenance=HERE, device="cpu")
    ticks: list[int] = []
    task = {"workload": "tiny", "width": 4, "depth": 1, "batch": 1, "precision": "fp32", "device": "cpu", "repeats": 2,
            "limit_s": 0.05}  # fmt: skip
    answer = run_group(task, workers=2, hosts=hosts, tick=lambda: ticks.append(1), silence_s=200.0)
    assert {*answer} == {"seconds", "settled", "gradient_bytes"}
    assert len(answer["seconds"]) >= 2
    assert answer["gradient_bytes"] > 0
    assert len(ticks) > len(answer["seconds"])  # the meeting, warm-up and timed steps


@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_two_hosts_are_measured_as_a_curve_of_machines(shell: Path, tmp_path: Path) -> None:
    output = tmp_path / "hosts.json"
    settings = ScalingSettings(
        workload="tiny", workers=(1, 2), batch=1, repeats=2, limit_s=0.05, on="ssh:h1,h2", remote_python=sys.executable,
        instance="g4dn.xlarge", output=output,
    )  # fmt: skip
    result = calibrate_scaling(settings)
    assert result.measured == 2
    profile = read_profile(output)
    assert [(p.workers, p.cores_per_worker, p.gradient_bytes) for p in profile.scaling] == [
        (1, None, 312_168),
        (2, None, 312_168),
    ]
    assert profile.provenance.machine.instance == "g4dn.xlarge"
    assert calibrate_scaling(settings).measured == 0
