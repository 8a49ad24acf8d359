"""What became of a script: its job, or the sentence that says why there is none. No script runs here."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepvm import variables
from deepvm.calibrate.job import profile_script
from deepvm.calibrate.job import script as script_module
from deepvm.calibrate.job.script import ScriptFailed
from deepvm.errors import UsageError
from deepvm.performance.measured import Machine, Provenance
from deepvm.runtime.entry import parse_entry


def outcome(
    report: Mapping[str, Any], *, code: int | None = 0, lines: tuple[str, ...] = (), printed: int = 0, steps: int = 0,
    timeout_s: float = 60.0,
) -> Any:  # fmt: skip
    process: Any = SimpleNamespace(lines=lambda most: list(lines)[-most:], printed_bytes=printed)
    entry = parse_entry(["folder/train.py"])
    return script_module._Outcome(entry, report, code, process, 15, timeout_s, steps=steps)


def problem(report: Mapping[str, Any], **how: Any) -> str:
    with pytest.raises(ScriptFailed) as failed:
        outcome(report, **how).job(None)
    return str(failed.value)


def seen(steps: int = 0, text: str = "", *, torch: bool = True, optimizers: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"seen": {"steps": steps, "text": text, "torch": torch, "optimizers": list(optimizers)}}


RANK = "environment variable RANK expected"


@pytest.mark.parametrize(
    ("report", "how", "expected"),
    [
        ({"outcome": "crashed", "error": "E: x", "where": "a.py, line 2", **seen(1)}, {},
         "train.py failed after 1 step: E: x (a.py, line 2)"),
        ({"outcome": "crashed", "error": "E: x", **seen(2)}, {}, "train.py failed after 2 steps: E: x"),
        ({"outcome": "crashed", "error": RANK}, {},
         f"train.py failed before its first step: {RANK}: run it with RANK=0 "
         "WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29501 in front"),
        ({"outcome": "crashed", "error": "environment variable MASTER_ADDR"}, {},
         "train.py failed before its first step: environment variable MASTER_ADDR: run it with RANK=0 "
         "WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29501 in front"),
        ({"outcome": "exited", "code": 2}, {"lines": ("Usage: train.py X", "train.py: error: no X", "bye")},
         "train.py needs other arguments (no X): write them after it; Usage: train.py X"),
        ({"outcome": "exited", "code": 2}, {"lines": ("usage: train.py X",)},
         "train.py needs other arguments: write them after it; usage: train.py X"),
        ({"outcome": "exited", "code": 2}, {"lines": ("error: no X",)},
         "train.py exited with code 2 before its first step: error: no X"),
        ({"outcome": "exited", "code": 3, "said": "no data"}, {"lines": ("usage: x", "last")},
         "train.py exited with code 3 before its first step: no data"),
        ({"outcome": "exited", "code": 3, **seen(4)}, {},
         "train.py exited with code 3 after 4 steps: it printed nothing"),
        ({"outcome": "ended", **seen(4)}, {},
         "train.py ended after 4 steps, profiling needs 15: let it train longer, or lower --steps or --warmup"),
        ({"outcome": "ended", **seen(torch=False)}, {},
         "train.py ended without importing torch: profile a script that trains with PyTorch"),
        ({"outcome": "ended", **seen(optimizers=("Adam", "SGD"))}, {},
         "train.py ended without a step: its optimizer (Adam, SGD) never stepped"),
        ({"outcome": "ended", **seen(text="3 batches")}, {},
         "train.py ended without an optimizer (3 batches): profile a script that trains with torch.optim in its own "
         "process"),
        ({"outcome": "timeout", "where": "a.py, line 2", **seen(4)}, {},
         "train.py made 4 of 15 steps in 1 min; it was at a.py, line 2: raise --timeout, or lower --steps"),
        ({"outcome": "timeout", **seen(text="3 batches", optimizers=("SGD",))}, {"printed": 2_000_000},
         "train.py made no training step in 1 min (seen: 3 batches, made SGD; it printed 2 MB): raise --timeout"),
        ({"outcome": "timeout", "where": "b.py, line 1", **seen(text="3 batches")}, {"printed": 1_000_000},
         "train.py made no training step in 1 min (seen: 3 batches; it was at b.py, line 1): raise --timeout"),
        ({}, {"code": None}, "train.py did not respond within 1 min, and was ended"),
        ({}, {"code": -signal.SIGKILL, "steps": 3},
         "train.py was ended by SIGKILL after 3 steps, perhaps for want of memory"),
        ({}, {"code": -signal.SIGSEGV}, "train.py was ended by SIGSEGV before its first step"),
        ({}, {"code": 7, "lines": ("one", "two")}, "train.py exited with code 7 before its first step: two"),
        ({"outcome": "odd"}, {"code": 0}, "train.py exited with code 0 before its first step: it printed nothing"),
    ],
)  # fmt: skip
def test_a_script_that_was_not_measured_is_one_sentence(
    report: dict[str, Any], how: dict[str, Any], expected: str
) -> None:
    assert problem(report, **how).replace("60 s", "1 min") == expected


def test_the_end_of_the_output_is_shown_without_control_characters() -> None:
    with pytest.raises(ScriptFailed) as failed:
        outcome({}, code=1, lines=tuple(f"line {number}\x1b" for number in range(20))).job(None)
    assert failed.value.output == tuple(f"line {number}\\x1b" for number in range(12, 20))


REPORT: dict[str, Any] = {
    "outcome": "done", "fsdp": False, "components": {"model": [400, 300], "optimizer": [800, None]},
    "device_peak_bytes": None, "weight_bytes": 400, "gradient_bytes": 350, "optimizer_bytes": 800,
    "activation_bytes": 90, "savable": True, "accelerator": None, "torch": "2.9", "threads": 3, "parameters": 100,
    "trainable_parameters": 90, "batch": 5, "step_s": [0.1, 0.2], "data_share": 0.25, "flops_per_step": 1e6,
    "traffic_bytes_per_step": 1e4, "host_memory_bytes": 10**9, "precision": "fp32",
}  # fmt: skip


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Provenance:
    found = Provenance(machine=Machine(cpu="Xeon", cores=4), date="2026-11-18T12:00:00", versions={"deepvm": "0.1"})
    monkeypatch.setattr(script_module, "here_and_now", lambda: found)
    return found


def test_a_measured_script_is_a_job(here: Provenance) -> None:
    found = outcome(REPORT).job(None)
    assert found.to_json() == {
        "format": "deepvm-job/1", "name": "train.py", "parameters": 100, "trainable_parameters": 90,
        "checkpoint_bytes": 1200,
        "components": {"model": {"bytes": 400, "changed_bytes": 300},
                       "optimizer": {"bytes": 800, "changed_bytes": None}},
        "gradient_bytes": 350, "batch": 5,
        "step_s": found.step_s.to_json(), "data_share": 0.25, "flops_per_step": 1e6, "traffic_bytes_per_step": 1e4,
        "achieved_flops_per_s": pytest.approx(1e6 / 0.15), "memory_bytes": 400 + 350 + 800 + 90 + 350,
        "memory_parts": {"weights": 400, "gradients": 350, "optimizer": 800, "activations": 90, "buckets": 350},
        "host_memory_bytes": 10**9, "precision": "fp32", "parallel": "ddp",
        "provenance": {
            "machine": {"cpu": "Xeon", "cores": 4, "memory_bytes": None, "instance": None, "accelerator": None,
                        "accelerator_count": 0},
            "date": "2026-11-18T12:00:00", "versions": {"deepvm": "0.1", "torch": "2.9", "threads": "3"},
        },
        "origins": {
            "components": "measured", "gradient_bytes": "measured", "batch": "measured", "step_s": "measured",
            "data_share": "measured", "flops_per_step": "measured", "traffic_bytes_per_step": "computed",
            "memory_bytes": "computed", "host_memory_bytes": "measured",
        },
        "notes": [],
    }  # fmt: skip
    assert found.step_s.seconds == (0.1, 0.2)


def test_on_a_gpu_memory_is_measured_and_fsdp_is_recognised(here: Provenance) -> None:
    report = {
        **REPORT,
        "fsdp": True,
        "device_peak_bytes": 5000,
        "accelerator": "Tesla T4",
        "data_share": None,
        "batch": 0,
    }
    found = outcome(report).job(None)
    assert found.parallel == "fsdp"
    assert found.memory_parts == {"weights": 400, "gradients": 350, "optimizer": 800, "activations": 3450}
    assert found.origins["memory_bytes"] == "measured"
    assert (found.provenance.machine.accelerator, found.provenance.machine.accelerator_count) == ("T4", 1)
    assert (found.batch, "batch" in found.origins, "data_share" in found.origins) == (None, False, False)
    other = outcome({**report, "accelerator": "Unknown GPU 3000", "device_peak_bytes": 1000}).job("ddp")
    assert (other.provenance.machine.accelerator, other.parallel) == ("Unknown GPU 3000", "ddp")
    assert "activations" not in other.memory_parts


def test_what_could_not_be_counted_or_saved_is_noted(here: Provenance, tmp_path: Path) -> None:
    files = [tmp_path / f"file{number}" for number in range(8)]
    for file in files[:7]:
        file.write_text("")
    kept = {name: REPORT[name] for name in REPORT if name not in ("flops_per_step", "activation_bytes")}
    kept.pop("traffic_bytes_per_step")
    report = {**kept, "outcome": "timed", "savable": False, "why": "odd\nstate", "then": {"error": "E: no"},
              "new_files": [str(file) for file in files]}  # fmt: skip
    found = outcome(report).job(None)
    assert found.notes == (
        "a Checkpointer cannot save this state as it is: odd state",
        "FLOPs and activations could not be counted, and its GPU memory is without these: E: no",
        f"the script itself created {', '.join(map(str, files[:5]))} and 2 more",
    )
    assert found.origins["components"] == "computed"
    assert found.origins["memory_bytes"] == "guessed"
    assert found.flops_per_step is None
    few = {**report, "new_files": [str(file) for file in (*files[:5], files[7])], "then": {}, "why": "x" * 3000}
    notes = outcome(few).job(None).notes
    assert len(notes[0]) == 2000
    assert notes[1].endswith("the script ended, or ran out of time, meanwhile")
    assert notes[2] == f"the script itself created {', '.join(map(str, files[:5]))}"
    assert replace(found, notes=()).notes == ()


def test_the_scripts_environment_keeps_files_out_of_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (variables.EVENTS, variables.NOTICE_FILE, "TMPDIR", "OTHER"):
        monkeypatch.setenv(name, "ours")
    short, long = Path("/" + "x" * 67), Path("/" + "x" * 68)
    found = script_module._environment(short)
    assert variables.EVENTS not in found
    assert variables.NOTICE_FILE not in found
    assert (found["TMPDIR"], found["OTHER"], len(found["TMPDIR"])) == (f"{short}/t", "ours", 70)
    assert found[variables.STORE] == f"file://{short}/store"
    assert found["PYTHONDONTWRITEBYTECODE"] == found["PYTHONUNBUFFERED"] == "1"
    assert script_module._environment(long)["TMPDIR"] == "ours"


def test_reports_and_progress_that_are_not_whole_are_none(tmp_path: Path) -> None:
    assert (script_module._steps_done(tmp_path), script_module._read_report(tmp_path)) == (0, {})
    for content, steps in ((b"", 0), (b"7   ", 7), (b"x", 0)):
        (tmp_path / "progress").write_bytes(content)
        assert script_module._steps_done(tmp_path) == steps
    for text, report in (('{"a": 1}', {"a": 1}), ("[1]", {}), ('{"a"', {})):
        (tmp_path / "report.json").write_text(text)
        assert script_module._read_report(tmp_path) == report


@pytest.mark.parametrize(("steps", "warmup", "total"), [(10, 3, 15), (1, 1, 4), (4, 0, 7)])
def test_progress_counts_warm_up_timed_and_counted_steps(
    steps: int, warmup: int, total: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("print('no torch')")
    told: list[tuple[int, int]] = []
    with pytest.raises(ScriptFailed, match="without importing torch"):
        profile_script(["train.py"], steps=steps, warmup=warmup, timeout_s=300, progress=lambda *row: told.append(row))
    assert set(told) == {(0, total)}


def test_settings_of_the_script_reach_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    asked: list[Any] = []

    class Process:
        printed_bytes = 0

        def __init__(self, command: list[str], *, env: Mapping[str, str], scratch: Path) -> None:
            assert env["TMPDIR"] == str(scratch / "t")
            assert (scratch / "t").is_dir()
            asked.append(json.loads((scratch / "settings.json").read_text()))
            assert command[1:] == ["-m", "deepvm.calibrate.job.observer", str(scratch / "settings.json")]
            (scratch / "report.json").write_text('{"outcome": "ended"}')

        def wait(self, timeout_s: float) -> int | None:
            asked.append(timeout_s)
            return 5 if timeout_s > 1 else None

        def lines(self, most: int) -> list[str]:
            return []

        def end(self) -> None:
            asked.append("ended")

    monkeypatch.setattr(script_module, "ScriptProcess", Process)
    with pytest.raises(ScriptFailed, match="ended without importing torch"):
        profile_script(["train.py", "--lr", "1"], steps=4, warmup=0, timeout_s=7.0)
    settings, *rest = asked
    folder = settings.pop("scratch")
    assert not Path(folder).exists()
    assert settings == {
        "script": "train.py", "args": ["--lr", "1"], "module": False, "steps": 4, "warmup": 1, "timeout_s": 7.0,
    }  # fmt: skip
    assert rest == [0.1, 15.0, "ended"]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"steps": 0}, "steps is 0 and warmup 3: time at least one step, after zero or more"),
        ({"warmup": -1}, "steps is 10 and warmup -1"),
        ({"timeout_s": 0.0}, "the timeout is 0 s: it must be above zero"),
        ({"timeout_s": float("nan")}, "the timeout is nan s"),
        ({"parallel": "magic"}, "parallel is 'magic': it must be ddp or fsdp"),
    ],
)
def test_impossible_measurements_are_refused(how: dict[str, Any], expected: str) -> None:
    with pytest.raises(UsageError) as refused:
        profile_script(["train.py"], **how)
    assert expected in str(refused.value)
