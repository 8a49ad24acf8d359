"""What a fleet tells its machines, and how it ends them. Machines are processes that speak the protocol alone."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepvm import variables
from deepvm.calibrate.network import fleet as fleet_module
from deepvm.calibrate.network import measure
from deepvm.calibrate.network.fleet import Fleet
from deepvm.calibrate.network.settings import NetworkSettings
from deepvm.calibrate.scratch import scratch_folder
from deepvm.errors import DeepvmError
from deepvm.performance.profile import read_profile

MACHINE = """
import json, os, signal, socket, sys, time
words = sys.argv[1:]
assert words[0] == "-m"
if words[1] == "deepvm":
    options = dict(zip(words[3::2], words[4::2]))
    ready, listen = options["--ready-file"], options["--listen"]
    scratch = os.path.dirname(ready)
    if os.path.exists(scratch + "/no-nodes"):
        print("first line", flush=True)
        sys.exit("deepvm: no place")
    with open(scratch + "/nodes", "a") as log:
        print(json.dumps([listen, options["--capacity"], options["--block"], os.environ["DEEPVM_TOKEN"],
                          open(options["--token-file"]).read(), sorted(n for n in os.environ if "DEEPVM_X" in n)]),
              file=log)
    host, _, port = listen.rpartition(":")
    with open(ready + ".part", "w") as file:
        file.write(f"{host}:{7000 + int(ready[-1])}\\n")
    os.rename(ready + ".part", ready)
    signal.signal(signal.SIGTERM, lambda *_: (os.unlink(ready), os._exit(0)))
    time.sleep(1000)
module, path, name, size = words[1:]
control = socket.socket(socket.AF_UNIX)
control.connect(path)
scratch = os.path.dirname(path)
control.sendall(json.dumps({"worker": name}).encode() + b"\\n")
saves = 0
for line in control.makefile("r"):
    message = json.loads(line)
    with open(scratch + "/" + name.replace("/", "-"), "a") as log:
        log.write(line)
    answer = {"ready": True}
    if message["do"] == "save":
        saves += 1
        answer = {"remote_s": saves + int(name[-1]) / 10, "steps_s": [0.5 + saves] * 3, "bytes": int(size)}
    fault = scratch + "/fault-" + name.replace("/", "-")
    if os.path.exists(fault):
        answer = {"error": "UsageError: no way"}
    if os.path.exists(scratch + "/leave"):
        sys.exit("deepvm: it left")
    data = json.dumps(answer).encode() + b"\\n"
    control.sendall(data[:4])
    control.sendall(data[4:])
"""
SETTINGS = NetworkSettings(workers=(1, 2), memory_nodes=(1, 2), checkpoint_bytes=400_000, repeats=3)


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    machine = tmp_path / "machine.py"
    machine.write_text(MACHINE)
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{machine}" "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(fleet_module, "sys", type("sys", (), {"executable": str(program)}))
    monkeypatch.setenv("DEEPVM_X", "ours")
    with (
        tempfile.TemporaryDirectory() as short,
        scratch_folder(Path(short)) as folder,
    ):  # a socket's path is 107 bytes at most
        yield folder


def test_a_folder_with_too_long_a_name_for_a_socket_is_told(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    with (
        pytest.raises(DeepvmError, match=r"cannot listen at .*control: .*too long: set TMPDIR"),
        Fleet(SETTINGS, long, limited=False),
    ):
        pass


def told(scratch: Path, worker: int) -> list[Any]:
    return [json.loads(line) for line in (scratch / f"worker-{worker}").read_text().splitlines()]


def test_workers_are_connected_saved_and_closed(scratch: Path) -> None:
    with Fleet(SETTINGS, scratch, limited=False) as fleet:
        assert sorted(fleet.pids) == ["worker/0", "worker/1"]
        fleet.start_nodes(2)
        assert sorted(fleet.pids) == ["memory/0", "memory/1", "worker/0", "worker/1"]
        fleet.limit(5.0)  # loopback has no limit
        fleet.connect(1, share=0.25)
        assert [each["remote_s"] for each in fleet.save(1, 4)] == [1.0]
        fleet.connect(2, share=0.5)
        assert [each["remote_s"] for each in fleet.save(2, 5)] == [2.0, 1.1]
        fleet.start_nodes(1)
        assert sorted(fleet.pids) == ["memory/0", "worker/0", "worker/1"]
        pids = list(fleet.pids.values())
    both = "memory://127.0.0.1:7000,127.0.0.1:7001"
    connected = {"do": "connect", "store": both, "run": "calibrate-worker-0", "share": 0.25}
    closed = {"do": "close"}
    assert told(scratch, 0) == [
        closed, connected, {"do": "save", "step": 4}, {**connected, "share": 0.5}, {"do": "save", "step": 5}, closed,
    ]  # fmt: skip
    assert told(scratch, 1) == [
        closed, closed, {**connected, "run": "calibrate-worker-1", "share": 0.5}, {"do": "save", "step": 5}, closed,
    ]  # fmt: skip
    token = (scratch / "token").read_text()
    assert len(token) == 64
    assert (scratch / "token").stat().st_mode & 0o777 == 0o600
    nodes = [json.loads(line) for line in (scratch / "nodes").read_text().splitlines()]
    block = str(SETTINGS.block_bytes)
    assert sorted(nodes) == sorted(
        ["127.0.0.1:0", str(SETTINGS.capacity_bytes(count)), block, token, token, []] for count in (1, 2, 2)
    )
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert fleet.pids == {}


def test_a_worker_that_cannot_connect_is_told_at_once(scratch: Path) -> None:
    with Fleet(SETTINGS, scratch, limited=False) as fleet:
        fleet.start_nodes(1)
        (scratch / "fault-worker-1").touch()
        with pytest.raises(
            DeepvmError, match=r"^a worker failed: UsageError: no way; what was measured before is kept$"
        ):
            fleet.connect(2, share=0.5)


def test_a_node_that_does_not_start_is_told_with_its_last_line(scratch: Path) -> None:
    (scratch / "no-nodes").touch()
    with (
        Fleet(SETTINGS, scratch, limited=False) as fleet,
        pytest.raises(
            DeepvmError, match=r"^memory/0 ended with exit code 1: no place; what was measured before is kept$"
        ),
    ):
        fleet.start_nodes(1)


def test_a_worker_that_leaves_is_told_with_its_last_line(scratch: Path) -> None:
    with Fleet(SETTINGS, scratch, limited=False) as fleet:
        fleet.start_nodes(1)
        fleet.connect(1, share=0.5)
        (scratch / "leave").touch()
        with pytest.raises(DeepvmError, match=r"^worker/0 ended with exit code 1: it left; what was measured"):
            fleet.save(1, 1)


def test_what_does_not_answer_in_time_is_told(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "START_S", -1.0)
    with (
        pytest.raises(
            DeepvmError, match=r"^the workers did not start in time; what was measured before is kept: the same"
        ),
        Fleet(SETTINGS, scratch, limited=False),
    ):
        pass


def test_every_combination_is_measured_once_and_the_first_saves_are_left_out(
    scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "no_links_because", lambda: "no root")
    monkeypatch.setattr(measure, "scratch_folder", lambda: scratch_folder(Path(tempfile.gettempdir())))
    monkeypatch.setattr(measure, "_cores", lambda: 4)
    asked: list[Any] = []
    connect = Fleet.connect
    monkeypatch.setattr(
        Fleet,
        "connect",
        lambda self, workers, *, share: (asked.append((workers, share)), connect(self, workers, share=share)),
    )
    steps: list[tuple[str, int, int]] = []
    output = tmp_path / "p.json"
    found = measure.calibrate_network(SETTINGS, output, progress=lambda *row: steps.append(row))
    assert steps == [
        ("1 worker to 1 memory node, without a limit", 0, 4),
        ("2 workers to 1 memory node, without a limit", 1, 4),
        ("1 worker to 2 memory nodes, without a limit", 2, 4),
        ("2 workers to 2 memory nodes, without a limit", 3, 4),
        ("done", 4, 4),
    ]
    assert asked == [(1, 0.8), (2, 0.4), (1, 0.8), (2, 0.4)]
    assert (found.measured, found.unlimited_because) == (4, "no root")
    seconds = [(p.workers, p.memory_nodes, p.remote_s.seconds) for p in found.points]
    assert seconds == [  # each worker counts its saves; the slowest of a group counts
        (1, 1, (3.0, 4.0, 5.0)),
        (2, 1, (8.0, 9.0, 10.0)),
        (1, 2, (13.0, 14.0, 15.0)),
        (2, 2, (18.0, 19.0, 20.0)),
    ]
    assert [len(p.step_s.seconds) for p in found.points if p.step_s] == [9, 18, 9, 18]
    assert {(p.link_gbps, p.checkpoint_bytes) for p in found.points} == {(None, 400_000)}
    assert found.profile.notes == (
        "network: all workers on one host; steps take 20% of its cores, as beside GPUs that compute",
    )
    assert read_profile(output) == found.profile
    steps.clear()
    more = NetworkSettings(workers=(1, 2), memory_nodes=(2, 3), checkpoint_bytes=400_000, repeats=1)
    again = measure.calibrate_network(more, output, progress=lambda *row: steps.append(row))
    assert [row[1:] for row in steps] == [(2, 4), (3, 4), (4, 4)]
    assert (again.measured, len(again.points), len(again.profile.network)) == (2, 4, 6)
    assert {p.memory_nodes for p in again.points} == {2, 3}
    document = again.to_json()
    assert [*document] == ["points", "fit", "saturation", "unlimited_because", "measured", "provenance"]
    assert again.fit is not None
    assert document["points"][0]["predicted_s"] == again.fit.model.predicted_s(again.points[0])
    assert document["points"][0]["bound_by"] == again.fit.model.bound_by(again.points[0])
    one = measure.calibrate_network(NetworkSettings(workers=(1,), memory_nodes=(1,), checkpoint_bytes=400_000), output)
    assert (one.fit, one.saturation, one.measured) == (None, (), 0)
    assert one.to_json()["points"][0]["predicted_s"] is None
    assert one.to_json()["fit"] is None


def test_cores_are_those_that_this_process_may_use() -> None:
    assert measure._cores() == len(os.sched_getaffinity(0))
    assert variables.TOKEN == "DEEPVM_TOKEN"
