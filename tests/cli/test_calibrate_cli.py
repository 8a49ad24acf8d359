"""``deepvm calibrate`` as users meet it: tables, one JSON document, or one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepvm.cli.app import run
from deepvm.performance.measured import Machine, Provenance, Samples
from deepvm.performance.profile import ComputePoint, NetworkPoint, OverheadPoint, Profile, ScalingPoint
from tests.support.measured_scaling import MEASURED

POINTS = MEASURED["g4dn.xlarge"]
PROFILE = Profile(
    workload="resnet18",
    provenance=Provenance(
        machine=Machine(cpu="Xeon", cores=4, accelerator="T4", accelerator_count=1), date="2026-11-18T12:00:00"
    ),
    compute=tuple(
        ComputePoint(
            batch=b, step_s=Samples((t, t * 1.02)), flops_per_step=0.22e9 * b, traffic_bytes_per_step=4e8, watts=61.0
        )
        for b, t in ((64, 0.02), (128, 0.035), (256, 0.065))
    ),
    scaling=tuple(
        ScalingPoint(workers=n, batch=128, step_s=Samples((s * n / POINTS.steps,)), gradient_bytes=46_758_048)
        for n, s in zip(POINTS.nodes, POINTS.seconds, strict=True)
    ),
    network=(NetworkPoint(workers=2, memory_nodes=1, link_gbps=5.0, checkpoint_bytes=10**8, remote_s=Samples((0.4,))),),
    overheads=(OverheadPoint(name="restore", state_bytes=10**8, seconds=Samples((0.3,))),),
    notes=("compute with a batch of 64: noisy",),
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    PROFILE.write(tmp_path / "p.json")
    return tmp_path / "p.json"


def test_show_prints_points_curves_and_notes(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["calibrate", "show", str(file)]) == 0
    shown = capsys.readouterr().out
    for words in ("resnet18", "1 × T4", "all-reduce", "measure next", "noisy", "restore", "61"):
        assert words in shown


def test_show_draws_a_figure_and_prints_one_document(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = tmp_path / "f.svg"
    assert run(["calibrate", "show", str(file), "--json", "--figure", str(figure)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["profiles"][0]["scaling"]["best"] == "all-reduce"
    assert document["profiles"][0]["scaling"]["error"] < 0.1
    assert document["profiles"][0]["compute"][0]["eflops"] > 0
    assert figure.read_text().startswith("<?xml")


def test_compute_here_prints_json_and_writes_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "here.json"
    words = [
        "calibrate",
        "compute",
        "--workload",
        "tiny",
        "--batch",
        "1",
        "--repeats",
        "2",
        "--seconds",
        "50ms",
        "--json",
        "-o",
    ]
    assert run([*words, str(output)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["measured_now"] == 1
    assert document["profile"] == json.loads(output.read_text())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("compute --batch x", "is not a list of numbers"),
        ("compute --batch 0", "--batch is 0"),
        ("compute --workload nothing", "built-in workload"),
        ("compute --figure f.gif", "no known figure format"),
        ("compute --job missing.json", "cannot be read"),
        ("scaling --workers 1,,2", "is not a list of numbers"),
        ("scaling --workers 999999", "would only wait for each other"),
        ("scaling --on ec2", "--on ec2 is unknown: write --on local, or --on ssh:HOST,HOST"),
        ("show missing.json", "cannot be read"),
    ],
)
def test_bad_words_get_one_sentence_and_exit_code_2(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["calibrate", *words.split()]) == 2
    said = capsys.readouterr().err
    assert message in " ".join(said.split())
    assert "Traceback" not in said


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"format": "deepvm-profile/1"}', "\x00" * 50, '{"format": 7}'])
def test_garbage_instead_of_a_profile_is_one_sentence(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "garbage.json"
    path.write_text(content)
    assert run(["calibrate", "show", str(path)]) == 2
    assert "garbage.json" in capsys.readouterr().err
