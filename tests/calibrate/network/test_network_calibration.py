"""Real workers send real checkpoints to real memory nodes; whatever ends it, nothing is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepvm.calibrate.network import NetworkSettings, calibrate_network
from deepvm.calibrate.network.figure import draw_network
from deepvm.calibrate.network.fleet import Fleet
from deepvm.calibrate.scratch import scratch_folder
from deepvm.errors import DeepvmError
from deepvm.performance.profile import read_profile
from tests.support import ROOT
from tests.support.waiting import wait_until

root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces")
pytestmark = pytest.mark.timeout(300)  # processes with torch, on machines that may be busy
SMALL: dict[str, Any] = {"checkpoint_bytes": 400_000, "repeats": 1}


def left(pid: int) -> list[str]:
    """Networks, folders and processes of a calibration by that process."""
    digits, owner = "0123456789abcdefghijklmnopqrstuvwxyz", ""
    number = pid
    while number:
        number, digit = divmod(number, 36)
        owner = digits[digit] + owner
    places = [Path("/sys/class/net"), Path("/run/netns")]
    networks = [path.name for place in places if place.is_dir() for path in place.glob(f"dvm-{owner}-*")]
    folders = [path.name for path in Path(tempfile.gettempdir()).glob(f"deepvm-calibrate-{pid}-*")]
    mark, processes = f"deepvm-calibrate-{pid}-".encode(), []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark in path.read_bytes() and int(path.parent.name) != pid:
                processes.append(path.parent.name)
        except OSError:
            continue
    return [*networks, *folders, *processes]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    assert left(os.getpid()) == []


@root
def test_links_are_limited_each_point_is_kept_and_a_second_run_measures_what_is_missing(tmp_path: Path) -> None:
    path, told = tmp_path / "profile.json", list[str]()
    slow = NetworkSettings(workers=(1, 2), memory_nodes=(1,), links_gbps=(0.01,), **SMALL)
    found = calibrate_network(slow, path, progress=lambda what, *_: told.append(what))
    assert found.unlimited_because is None
    assert told == ["1 worker to 1 memory node, 0.01 Gbit/s", "2 workers to 1 memory node, 0.01 Gbit/s", "done"]
    one, two = sorted(found.points, key=lambda p: p.workers)
    assert one.remote_s.median_s > 0.9 * 400_000 * 8 / 10**7  # what the link needs, less its burst
    assert two.remote_s.median_s > 1.4 * one.remote_s.median_s
    assert read_profile(path).network == found.points
    before = path.read_bytes()
    again = calibrate_network(slow, path)
    assert (again.measured, again.points) == (0, found.points)
    assert path.read_bytes() == before
    draw_network(found, [tmp_path / "network.svg"])
    assert (tmp_path / "network.svg").stat().st_size > 5000
    assert json.dumps(found.to_json())


def test_without_root_it_measures_loopback_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepvm.calibrate.network.measure.no_links_because", lambda: "network namespaces need root")
    settings = NetworkSettings(workers=(1,), memory_nodes=(1, 2), links_gbps=(1.0, 5.0), **SMALL)
    found = calibrate_network(settings)
    assert found.unlimited_because == "network namespaces need root"
    assert [(point.memory_nodes, point.link_gbps) for point in found.points] == [(1, None), (2, None)]
    assert found.fit is not None


@root
@pytest.mark.chaos
def test_a_killed_worker_and_a_busy_port_are_told_in_one_sentence() -> None:
    settings = NetworkSettings(workers=(1,), memory_nodes=(1,), links_gbps=(1.0,), **SMALL)
    with scratch_folder() as scratch, Fleet(settings, scratch, limited=False) as fleet:
        with socket.create_server(("127.0.0.1", 0)) as busy:
            with pytest.raises(
                DeepvmError, match=r"memory/0 ended with exit code 1: cannot listen on .*in use"
            ) as told:
                fleet.start_nodes(1, listen_port=busy.getsockname()[1])
            assert "\n" not in str(told.value)
        fleet.start_nodes(1)
        fleet.connect(1, share=0.5)
        os.kill(fleet.pids["worker/0"], signal.SIGKILL)
        with pytest.raises(DeepvmError, match=r"worker.*ended.*what was measured before is kept") as told:
            fleet.save(1, 1)
        assert "\n" not in str(told.value)


@root
@pytest.mark.chaos
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_leaves_its_finished_points_and_nothing_else(number: int, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    words = ["calibrate", "network", "--workers", "1", "--memory-nodes", "1,2", "--links", "0.05"]
    words += ["--checkpoint-size", "400kB", "--repeats", "3", "-o", str(path), "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "deepvm", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        wait_until(path.exists, "the first point", timeout_s=120)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1, err
    assert json.loads(out)["error"]["message"] == (
        f"interrupted: {path} has what was measured, and the same command continues"
    )
    assert "Traceback" not in err
    assert left(process.pid) == []
    assert [point.memory_nodes for point in read_profile(path).network] == [1]
