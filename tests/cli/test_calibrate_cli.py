"""``deepvm calibrate`` as users meet it: tables, one JSON document, or one sentence."""

from __future__ import annotations

import json
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from deepvm.calibrate.compute import ComputeSettings
from deepvm.calibrate.network import NetworkSettings
from deepvm.calibrate.overheads import OverheadSettings
from deepvm.calibrate.profile_file import ProfileFile
from deepvm.calibrate.scaling import ScalingSettings
from deepvm.cli.app import run
from deepvm.cli.calibrate import session
from deepvm.cli.calibrate.command import app
from deepvm.cli.calibrate.machine import _warn
from deepvm.errors import DeepvmError, UsageError
from deepvm.performance.job import Job
from deepvm.performance.measured import Machine, Provenance, Samples
from deepvm.performance.profile import ComputePoint, NetworkPoint, OverheadPoint, Profile, ScalingPoint
from tests.cli.conftest import Screen
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


def test_show_takes_points_with_and_without_a_batch(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(file.read_text(encoding="utf-8"))
    del document["scaling"][1]["batch"]
    file.write_text(json.dumps(document), encoding="utf-8")
    assert run(["calibrate", "show", str(file)]) == 0
    assert "Scaling" in capsys.readouterr().out


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


class Stopped(Exception): ...


@pytest.mark.parametrize(
    ("command", "function", "usual"),
    [
        ("compute", "deepvm.calibrate.compute.calibrate_compute", ComputeSettings()),
        ("scaling", "deepvm.calibrate.scaling.calibrate_scaling", ScalingSettings()),
        ("network", "deepvm.calibrate.network.calibrate_network", NetworkSettings()),
        ("overheads", "deepvm.calibrate.overheads.calibrate_overheads", OverheadSettings()),
    ],
)
def test_without_options_settings_are_those_of_python(
    command: str, function: str, usual: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def calibrate(settings: Any, *_: Any, **__: Any) -> None:
        asked.append(settings)
        raise Stopped

    monkeypatch.setattr(function, calibrate)
    with pytest.raises(Stopped):
        run(["calibrate", command])
    assert asked == [usual]


def test_options_arrive_in_the_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def calibrate(settings: Any, *_: Any, **__: Any) -> None:
        asked.append(settings)
        raise Stopped

    job = Job(name="j", parameters=1, trainable_parameters=1, components={}, gradient_bytes=4)
    job.write(tmp_path / "job.json")
    monkeypatch.setattr("deepvm.calibrate.compute.calibrate_compute", calibrate)
    monkeypatch.setattr("deepvm.calibrate.scaling.calibrate_scaling", calibrate)
    common = "--workload gpt2 --precision bf16 --device cpu --instance g4dn.xlarge --repeats 7 --seconds 2s --again"
    with pytest.raises(Stopped):
        run(["calibrate", "compute", *common.split(), "--batch", "3,1", "--job", str(tmp_path / "job.json"), "-o", "p"])
    words = "--batch 3 --workers 1..3 --cores-per-worker 1 --most-workers 9 -o p --remote-python py"
    with pytest.raises(Stopped):
        run(["calibrate", "scaling", *common.split(), *words.split()])
    with pytest.raises(Stopped):
        run(["calibrate", "scaling", "--on", "ssh:a,b", "--workers", "2"])
    shared: dict[str, Any] = {
        "workload": "gpt2", "precision": "bf16", "device": "cpu", "instance": "g4dn.xlarge", "repeats": 7,
        "limit_s": 2.0, "again": True, "output": Path("p"),
    }  # fmt: skip
    assert asked == [
        ComputeSettings(**shared, batches=(1, 3), job=job),
        ScalingSettings(
            **shared, batch=3, workers=(1, 2, 3), cores_per_worker=1, most_workers=9, remote_python="py"
        ),
        ScalingSettings(on="ssh:a,b", workers=(2,)),
    ]  # fmt: skip


@pytest.mark.usefixtures("terminal")
def test_points_that_a_file_has_are_shown_and_drawn(
    screen: Screen, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = Provenance(
        machine=Machine(cpu="Xeon", cores=4), date="2026-11-18T12:00:00", versions={"torch": "2.0", "deepvm": "0"}
    )
    for place in ("compute.calibration", "scaling.calibration", "profile_file"):
        monkeypatch.setattr(f"deepvm.calibrate.{place}.here_and_now", lambda: here)
    job = Job(
        name="mine", parameters=1, trainable_parameters=1, components={}, gradient_bytes=4, batch=3,
        step_s=Samples((0.1, 0.2)), flops_per_step=1e9, traffic_bytes_per_step=1e8, provenance=here,
    )  # fmt: skip
    job.write(Path("job.json"))
    compute = ["calibrate", "compute", "--job", "job.json", "--device", "cpu", "-o", "p.json"]
    assert run(compute) == 0
    ProfileFile.open(Path("p.json"), workload="mine", provenance=here).add(notes=["compute is [noisy]"])
    assert run([*compute, "--figure", "c.svg", "--instance", "g4dn.xlarge"]) == 0
    assert run([*compute, "--json"]) == 0
    file = ProfileFile.open(Path("s.json"), workload="tiny", provenance=here)
    for workers, seconds in ((1, 0.1), (2, 0.12), (4, 0.2)):
        file.add(
            ScalingPoint(
                workers=workers, batch=32, step_s=Samples((seconds,)), gradient_bytes=10**6, cores_per_worker=1
            ),
            notes=["scaling with [noise]"],
        )
    scaling = "scaling --workload tiny --workers 1,2,4 --cores-per-worker 1 --most-workers 6 --device cpu -o s.json"
    assert run(["calibrate", *scaling.split(), "--figure", "s.svg"]) == 0
    screen("calibrate-known")
    usual = ProfileFile.open(Path("u.json"), workload="resnet18", provenance=here)
    usual.add(
        *(ScalingPoint(workers=n, batch=32, step_s=Samples((0.1,)), cores_per_worker=1) for n in (1, 2)),
        *(ScalingPoint(workers=n, batch=1, step_s=Samples((0.1,)), cores_per_worker=1) for n in (1, 2)),
    )
    for file, workload in (("u.json", "resnet18"), ("g.json", "gpt2")):
        replace(usual.profile, workload=workload).write(Path(file))
        words = f"scaling --workload {workload} --workers 2 --cores-per-worker 1 --device cpu --json -o {file}"
        assert run(["calibrate", *words.split()]) == 0
        assert json.loads(capsys.readouterr().out)["measured_now"] == 0


def test_what_is_warned_of_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    _warn("8 workers share [2] cores " + "x" * 200)
    assert capsys.readouterr().err == "8 workers share [2] cores " + "x" * 200 + "\n"


@pytest.mark.parametrize(
    ("output", "told"),
    [
        (Path("p.json"), "interrupted: p.json has what was measured, and the same command continues"),
        (None, "interrupted: give -o to continue"),
    ],
)
@pytest.mark.parametrize("number", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_signals_end_a_calibration_like_ctrl_c(number: str, output: Path | None, told: str) -> None:
    signals = [signal.SIGTERM, signal.SIGHUP]
    before = [signal.getsignal(each) for each in signals]
    sent = getattr(signal, number)
    ours = signal.signal(signal.SIGINT, signal.default_int_handler)

    def measure() -> None:
        with session.measuring(output) as progress:
            progress("[a] point", 1, 2)
            signal.raise_signal(sent)

    try:
        with pytest.raises(DeepvmError) as ended:
            measure()
    finally:
        signal.signal(signal.SIGINT, ours)
    assert str(ended.value) == told
    assert [signal.getsignal(each) for each in signals] == before


def test_another_thread_measures_without_signals() -> None:
    found: list[str] = []

    def measure() -> None:
        with session.measuring(None) as progress:
            progress("a point", 0, 1)
            found.append("measured")

    thread = threading.Thread(target=measure)
    thread.start()
    thread.join()
    assert found == ["measured"]


def test_at_most_a_thousand_numbers_are_counted() -> None:
    assert len(session.parse_counts("1..1000", "--workers")) == session.MOST_COUNTS == 1000
    with pytest.raises(UsageError, match=r"--workers '5..1005' has 1001 numbers: give at most 1000"):
        session.parse_counts("5..1005", "--workers")
    with pytest.raises(UsageError) as refused:
        session.parse_counts("x" * 200, "--workers")
    assert str(refused.value) == f"--workers {'x' * 80!r} is not a list of numbers: write 1,2,4 or 1..4"


def test_all_commands_are_there_and_no_other() -> None:
    command: Any = typer.main.get_command(app)
    assert [*command.commands] == ["compute", "scaling", "show", "network", "overheads"]
