"""Data-parallel steps by workers: real processes here, their points, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from deepvm.calibrate.scaling import ScalingSettings, calibrate_scaling
from deepvm.calibrate.scaling.calibration import check_counts, default_share
from deepvm.calibrate.scaling.processes import cores_of_ranks, run_group
from deepvm.errors import DeepvmError, UsageError
from deepvm.performance.profile import read_profile
from tests.support.waiting import wait_until

QUICK = ScalingSettings(workload="tiny", workers=(1, 2), batch=1, repeats=2, limit_s=0.05)
TASK = {"workload": "tiny", "width": 4, "depth": 1, "batch": 1, "precision": "fp32", "device": "cpu", "repeats": 2,
        "limit_s": 0.05}  # fmt: skip


def test_one_and_two_workers_are_measured_fitted_and_continued(tmp_path: Path) -> None:
    output = tmp_path / "scaling.json"
    alone = calibrate_scaling(replace(QUICK, workers=(1,), cores_per_worker=1, output=output))
    assert alone.choice is None
    result = calibrate_scaling(replace(QUICK, cores_per_worker=1, output=output))
    assert result.measured == 1  # one worker was in the file
    profile = read_profile(output)
    assert [p.workers for p in profile.scaling] == [1, 2]
    assert profile.scaling[0] == alone.profile.scaling[0]
    assert profile.scaling[1].gradient_bytes == 312_168
    assert result.choice is not None
    assert result.choice.best.error is None
    assert result.choice.next_nodes is None or result.choice.next_nodes > 2


def test_a_rank_that_fails_is_one_sentence_and_leaves_no_process() -> None:
    with pytest.raises(DeepvmError, match=r"worker 0 of the calibration .*resnet52"):
        run_group({**TASK, "workload": "resnet52"}, workers=1, cores=None)
    assert ranks_here() == []


def test_silent_ranks_are_ended() -> None:
    with pytest.raises(DeepvmError, match=r"made no step for 0\.01 s"):
        run_group(TASK, workers=1, cores=None, silence_s=0.01)
    assert ranks_here() == []


@pytest.mark.chaos
def test_ranks_end_with_a_killed_calibration(tmp_path: Path) -> None:
    code = (
        "from deepvm.calibrate.scaling.processes import run_group\n"
        f"run_group({{**{TASK!r}, 'repeats': 10**6, 'limit_s': 600.0}}, workers=1, cores=None,"
        " tick=lambda: print('step', flush=True))\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    try:
        assert parent.stdout.readline() == "step\n"
        ranks = children_of(parent.pid)
        assert ranks
        parent.kill()
        parent.wait(timeout=30)
        wait_until(lambda: not any(alive(pid) for pid in ranks))
    finally:
        parent.kill()
        parent.stdout.close()


def test_cores_are_shared_evenly_and_in_turn() -> None:
    assert cores_of_ranks(4, 1, [0, 1]) == [[0], [1], [0], [1]]
    assert cores_of_ranks(2, 2, [0, 1, 4, 5]) == [[0, 1], [4, 5]]
    assert default_share((1, 2, 4), 8) == 2
    assert default_share((1, 2, 4), 2) == 1
    assert default_share((1,), 6) == 6


def test_more_workers_than_cores_are_warned_of_and_refused_above_four_each() -> None:
    assert check_counts((1, 2), 2, None) is None
    assert check_counts((1, 4), 2, None) == (
        "4 workers share 2 cores: such points tell of this machine, not of 4 machines"
    )
    with pytest.raises(UsageError, match="9 workers on 2 cores would only wait"):
        check_counts((1, 9), 2, None)
    with pytest.raises(UsageError, match="4 workers need 4 GPUs, this machine has 2"):
        check_counts((1, 4), 64, 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workers": ()}, "names no count"),
        ({"workers": (0,)}, "one or more"),
        ({"workers": (1_000_000,)}, "would only wait"),
        ({"on": "slurm"}, "--on slurm is unknown: write --on local, or --on ssh:HOST,HOST"),
        ({"on": "ssh:"}, "has the host ''"),
        ({"on": "ssh:-oProxyCommand=x"}, "has the host '-oProxyCommand=x'"),
        ({"on": "ssh:h1,h1"}, "names h1 twice"),
        ({"on": "ssh:h1"}, "2 workers need as many hosts, --on names 1"),
        ({"on": "ssh:h1,h2", "cores_per_worker": 1}, "a host of --on ssh: runs one worker"),
        ({"batch": 0}, "--batch"),
        ({"cores_per_worker": 10_000}, "--cores-per-worker is 10000"),
        ({"workload": "resnet51"}, "did you mean"),
        ({"limit_s": -1.0}, "--seconds"),
    ],
)
def test_bad_settings_get_one_sentence(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        calibrate_scaling(replace(QUICK, **settings))


def children_of(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def ranks_here() -> list[int]:
    """Children of this process that are ranks."""
    found = []
    for pid in children_of(os.getpid()):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        except OSError:
            continue
        if "deepvm.calibrate.scaling.worker" in words:
            found.append(pid)
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False
