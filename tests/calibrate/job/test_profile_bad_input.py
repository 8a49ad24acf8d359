"""Scripts that cannot be profiled, and damaged job files: one clear sentence each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deepvm.calibrate.job import profile_script
from deepvm.calibrate.job.process import MOST_OUTPUT_BYTES, ScriptProcess
from deepvm.calibrate.job.script import ScriptFailed
from deepvm.cli.app import run
from deepvm.errors import MalformedFile, UsageError
from deepvm.performance.job import FORMAT, Component, Job, job_of, read_job
from tests.support.waiting import wait_until


def script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "train.py"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "def f():\n    raise ValueError('no data')\nf()",
            "train.py failed before its first step: ValueError: no data (train.py, line 2)",
        ),
        ("x = (", "train.py failed before its first step: SyntaxError: '(' was never closed (train.py, line 1)"),
        ("import nothing_like_this", "ModuleNotFoundError: No module named 'nothing_like_this' (train.py, line 1)"),
        ("import argparse\np = argparse.ArgumentParser()\np.add_argument('--data', required=True)\np.parse_args()",
         "train.py needs other arguments (the following arguments are required: --data): write them after it; "
         "usage: train.py [-h] --data DATA"),
        (
            "import sys\nsys.exit('the data is missing')",
            "train.py exited with code 1 before its first step: the data is missing",
        ),
        ("import os\nprint('bye', flush=True)\nos._exit(7)", "train.py exited with code 7 before its first step: bye"),
        ("raise ValueError('no data:\\nrun prepare.py\\nthen this')",
         "failed before its first step: ValueError: no data: run prepare.py (train.py, line 1)"),
        (
            "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
            "train.py was ended by SIGKILL before its first step, perhaps for want of memory",
        ),
        ("print('hello')", "train.py ended without importing torch: profile a script that trains with PyTorch"),
        ("raise RuntimeError('environment variable RANK expected, but not set')", "run it with RANK=0 WORLD_SIZE=1"),
    ],
)  # fmt: skip
def test_a_script_that_fails_is_described_in_one_sentence(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ScriptFailed) as failed:
        profile_script([script(tmp_path, text)], timeout_s=60)
    assert expected in str(failed.value)
    assert "\n" not in str(failed.value)
    assert failed.value.exit_code == 1


def test_a_script_that_never_steps_is_ended_with_what_was_seen(tmp_path: Path) -> None:
    text = "import time\nprint('waiting')\ntime.sleep(1000)"
    with pytest.raises(ScriptFailed) as failed:
        profile_script([script(tmp_path, text)], timeout_s=0.5)
    expected = "train.py made no training step in 500 ms (seen: torch was not imported; it was at train.py, line 3)"
    assert str(failed.value).startswith(expected)
    assert failed.value.output == ("waiting",)


def test_a_script_that_prints_forever_is_ended_and_its_output_is_bounded(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = script(tmp_path, "while True:\n    print('x' * 1000 + '\\x1b[31m')")
    assert run(["profile", "--timeout", "1.5s", "--", path]) == 1
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "train.py made no training step in 1.5 s" in shown.err.replace("\n", " ")
    assert "it printed" in shown.err
    assert "xxx" in shown.err
    assert "\x1b[31m" not in shown.err
    assert len(shown.err) < 10_000


def test_output_is_kept_up_to_its_bound(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "for i in range(30000): print('line', i)"]
    process = ScriptProcess(command, env=dict(os.environ), scratch=tmp_path)
    assert process.wait(60) == 0
    process.end()
    assert len(process.output) == MOST_OUTPUT_BYTES < process.printed_bytes
    assert process.lines(2) == ["line 29998", "line 29999"]


def test_processes_that_a_script_starts_end_with_it(tmp_path: Path) -> None:
    text = (
        "import subprocess, sys\n"
        "left = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'], start_new_session=True)\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(left.pid))\n"
    )
    with pytest.raises(ScriptFailed, match="ended without importing torch"):
        profile_script([script(tmp_path, text)], timeout_s=60)
    assert not Path("/proc", (tmp_path / "pid").read_text()).exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["profile"], "give a script or a model"),
        (["profile", "--model", "gpt2", "--", "train.py"], "give a script or a model"),
        (["profile", "--", "nothing.py"], "script 'nothing.py' not found"),
        (["profile", "--", "-m", "nothing.like.this"], "module 'nothing' not found"),
        (["profile", "--", "torchrun", "train.py"], "torchrun"),
        (["profile", "--batch", "8", "--", "train.py"], "--batch has no effect on a script"),
        (["profile", "--steps", "8", "--model", "gpt2"], "--steps has no effect on --model"),
        (["profile", "--steps", "0", "--", "train.py"], "--steps"),
        (["profile", "--timeout", "0s", "--", "train.py"], "the timeout is 0 s"),
        (["profile", "-o", "nowhere/job.json", "--", "train.py"], "is in a folder that does not exist"),
        (["profile", "--parallel", "magic", "--", "train.py"], "it must be ddp or fsdp"),
    ],
)
def test_bad_usage_is_refused_before_anything_runs(
    words: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    script(tmp_path, "open('ran', 'w')")
    assert run(words) == 2
    assert expected in capsys.readouterr().err.replace("\n", " ")
    assert os.listdir(tmp_path) == ["train.py"]


def test_an_interrupted_profile_ends_the_script(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        "import os, time\nopen('pid', 'w').write(str(os.getpid()))\nos.rename('pid', 'ready')\ntime.sleep(1000)",
    )
    command = [sys.executable, "-m", "deepvm", "profile", "--json", "--", path]
    profiling = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: (tmp_path / "ready").exists())
    pid = (tmp_path / "ready").read_text()
    profiling.send_signal(signal.SIGINT)
    out, _ = profiling.communicate(timeout=60)
    assert profiling.returncode in (1, 130)
    assert out == "" or "error" in json.loads(out)
    assert not Path("/proc", pid).exists()


LOOP = """
import torch
w = torch.nn.Linear(4, 4)
o = torch.optim.SGD(w.parameters(), lr=0.1)
for step in range(1000):
    {body}
"""
STEP = "w(torch.ones(2, 4)).sum().backward(); o.step()"


def failure(tmp_path: Path, text: str, **how: float) -> str:
    with pytest.raises(ScriptFailed) as failed:
        profile_script([script(tmp_path, text)], timeout_s=how.get("timeout_s", 100))
    return str(failed.value)


def test_a_script_that_ends_before_enough_steps_says_how_many_are_needed(tmp_path: Path) -> None:
    found = failure(tmp_path, LOOP.replace("1000", "4").format(body=STEP))
    assert found.startswith("train.py ended after 4 steps, profiling needs 15: let it train longer")


@pytest.mark.chaos
def test_an_exit_that_nothing_can_catch_counts_the_steps_before_it(tmp_path: Path) -> None:
    found = failure(tmp_path, LOOP.format(body=f"{STEP}; import os; step < 5 or os._exit(7)"))
    assert found == "train.py exited with code 7 after 6 steps: it printed nothing"


@pytest.mark.chaos
def test_a_script_without_an_optimizer_says_so(tmp_path: Path) -> None:
    found = failure(tmp_path, "import torch\ntorch.nn.Linear(2, 2)(torch.ones(3, 2)).sum().backward()")
    assert found.startswith("train.py ended without an optimizer (1 forward passes)")


@pytest.mark.chaos
def test_an_optimizer_that_never_steps_is_named(tmp_path: Path) -> None:
    assert "its optimizer (SGD) never stepped" in failure(tmp_path, LOOP.format(body="w(torch.ones(2, 4))"))
    late = LOOP.format(body="import time; time.sleep(1)")
    found = failure(tmp_path, late, timeout_s=20)
    assert found.startswith(
        "train.py made no training step in 20 s (seen: no forward pass and no batch, made SGD; it was"
    )


@pytest.mark.chaos
def test_a_crash_after_some_steps_counts_them(tmp_path: Path) -> None:
    found = failure(tmp_path, LOOP.format(body=f"{STEP}; 1 / (3 - step)"))
    assert found == "train.py failed after 4 steps: ZeroDivisionError: division by zero (train.py, line 6)"


@pytest.mark.chaos
def test_a_script_that_swallows_everything_is_stopped_all_the_same(tmp_path: Path) -> None:
    body = f"try:\n        {STEP}\n    except BaseException as error:\n        import time; time.sleep(0.5)"
    job = profile_script([script(tmp_path, LOOP.format(body=body))], timeout_s=100)
    assert job.parameters == 20


@pytest.mark.chaos
def test_a_script_that_cannot_bear_counting_keeps_its_other_figures(tmp_path: Path) -> None:
    refuse = "from torch.utils._python_dispatch import _get_current_dispatch_mode as mode; assert mode() is None"
    job = profile_script([script(tmp_path, LOOP.format(body=f"{refuse}; {STEP}"))], timeout_s=100)
    assert job.step_s is not None
    assert job.flops_per_step is None
    assert "could not be counted" in job.notes[0]
    assert job.origins["memory_bytes"] == "guessed"


JOB = Job(name="j", parameters=3, trainable_parameters=3, components={"model": Component(bytes=12)}, gradient_bytes=12)


def test_a_job_is_read_as_it_was_written(tmp_path: Path) -> None:
    JOB.write(tmp_path / "job.json")
    assert read_job(tmp_path / "job.json") == JOB
    assert os.listdir(tmp_path) == ["job.json"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"format": "deepvm-job/2"}, f"its format is 'deepvm-job/2', this deepvm reads '{FORMAT}'"),
        ({"format": None}, "it has no format"),
        ({"parameters": -1}, "parameters is -1"),
        ({"parameters": True}, "parameters is True"),
        ({"components": {"model": {"bytes": 2**61}}}, "bytes of model"),
        ({"components": []}, "components is []"),
        ({"memory_parts": {"weights": "many"}}, "memory of weights is 'many'"),
        ({"origins": {"step_s": "felt"}}, "the origin of 'step_s' is 'felt'"),
        ({"parallel": "magic"}, "parallel is 'magic'"),
        ({"name": "\x1b[31m"}, "name is"),
        ({"notes": ["x"] * 1000}, "notes is"),
        ({"step_s": {"samples_s": []}}, "step_s has no samples"),
    ],
)
def test_a_job_file_of_another_version_or_a_damaged_one_is_refused(
    change: dict[str, object], expected: str, tmp_path: Path
) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps({**JOB.to_json(), **change}))
    with pytest.raises(MalformedFile) as refused:
        read_job(path)
    assert expected in str(refused.value)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b"\xff\xfe", b'{"format": NaN}', b"null"])
def test_a_file_that_is_no_json_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_bytes(content)
    with pytest.raises(MalformedFile):
        read_job(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_job(tmp_path / "nothing.json")


def test_job_of_keeps_every_field() -> None:
    assert job_of(json.loads(json.dumps(JOB.to_json()))) == JOB
