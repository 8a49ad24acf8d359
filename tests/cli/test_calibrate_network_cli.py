"""``deepvm calibrate network`` and ``overheads``: bad input in one sentence, before anything starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepvm.calibrate.profile_file import ProfileFile
from deepvm.cli.app import run
from deepvm.performance.measured import Samples
from deepvm.performance.profile import OVERHEADS, NetworkPoint, OverheadPoint


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["network", "--links", "0"], "--links has 0 Gbit/s"),
        (["network", "--links", "1e99"], "--links has 1e+99"),
        (["network", "--workers", "1000000"], "1000000 workers"),
        (["network", "--workers", "0"], "--workers has 0"),
        (["network", "--workers", "many"], "is not a list of numbers"),
        (["network", "--memory-nodes", "1..1000000000"], "--memory-nodes '1..1000000000'"),
        (["network", "--checkpoint-size", "1PB"], "of memory, and"),
        (["network", "--checkpoint-size", "0"], "--checkpoint-size is 0 B"),
        (["network", "--figure", "f.gif"], "has no known figure format"),
        (["network", "-o", "/nowhere/at/all/p.json"], "is not a folder"),
        (["overheads", "--sizes", "1PB"], "of memory, and"),
        (["overheads", "--sizes", "10MB,huge"], "is not a size"),
        (["overheads", "--repeats", "0"], "--repeats is 0"),
        (["overheads", "--figure", "f.gif"], "has no known figure format"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(words: list[str], message: str, capsys: Any) -> None:
    assert run(["calibrate", *words, "--json"]) == 2
    captured = capsys.readouterr()
    error = json.loads(captured.out)["error"]
    assert message in error["message"]
    assert "\n" not in error["message"]
    assert "Traceback" not in captured.err


@pytest.mark.parametrize("command", ["network", "overheads"])
def test_a_profile_of_another_machine_is_refused(command: str, tmp_path: Path, capsys: Any) -> None:
    file = ProfileFile.open(tmp_path / "p.json")
    machine = replace(file.profile.provenance.machine, cpu="Another CPU")
    file.profile = replace(file.profile, provenance=replace(file.profile.provenance, machine=machine))
    file.add()
    assert run(["calibrate", command, "-o", str(tmp_path / "p.json")]) == 2
    assert "was measured on another machine (Another CPU" in capsys.readouterr().err


def test_without_root_one_sentence_says_that_links_have_no_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    file = ProfileFile.open(tmp_path / "p.json")
    for nodes in (1, 2):
        file.add(
            NetworkPoint(
                workers=1, memory_nodes=nodes, link_gbps=None, checkpoint_bytes=10**6, remote_s=Samples((0.5 / nodes,)),
                step_s=Samples((0.01,)),
            )
        )  # fmt: skip
    words = ["--workers", "1", "--memory-nodes", "1,2", "--checkpoint-size", "1MB", "-o", str(tmp_path / "p.json")]
    assert run(["calibrate", "network", *words]) == 0  # all of it is in the file already
    captured = capsys.readouterr()
    assert "network namespaces need root: all links are loopback without a limit" in " ".join(captured.err.split())
    assert "500 ms" in captured.out
    assert "2 of 2 points were in the file already" in captured.out


def test_overheads_that_are_known_are_shown_and_drawn(tmp_path: Path, capsys: Any) -> None:
    file = ProfileFile.open(tmp_path / "p.json")
    for size in (10**7, 10**8):
        points = [OverheadPoint(name=name, state_bytes=size, seconds=Samples((0.5, 0.7, 0.6))) for name in OVERHEADS]
        file.add(*points)
    words = ["--sizes", "10MB,100MB", "-o", str(tmp_path / "p.json"), "--figure", str(tmp_path / "o.svg")]
    assert run(["calibrate", "overheads", *words]) == 0
    out = capsys.readouterr().out
    assert "first step" in out
    assert "600 ms (n=3)" in out
    assert "2 of 2 sizes were in the file already" in out
    assert (tmp_path / "o.svg").stat().st_size > 5000
    assert run(["calibrate", "overheads", *words[:4], "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["points"]) == 2 * len(OVERHEADS)
    assert document["kept"] == 2
