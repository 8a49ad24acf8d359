"""The launcher: torchrun's behaviour, with workers from a template."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

import pytest

from deepvm.errors import TemplateError, UsageError
from deepvm.runtime.launch import _pairs, launch, main
from tests.support.processes import gone
from tests.support.waiting import wait_until

QUICK = ("torch", "torch.distributed")  # what the scripts here need

PROLOGUE = """
import sys, time
imported = "torch" in sys.modules
import json, os
from pathlib import Path
rank, restart = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
def tell(name="told", **what):
    what |= {"imported": imported, "template": os.getppid(), "pid": os.getpid()}
    partial = Path(sys.argv[1]) / f".{name}-{restart}-{rank}"
    partial.write_text(json.dumps(what))
    partial.rename(Path(sys.argv[1]) / f"{name}-{restart}-{rank}")
"""


def script(tmp_path: Path, body: str, prologue: str = PROLOGUE) -> str:
    path = tmp_path / "train.py"
    path.write_text(prologue + textwrap.dedent(body))
    return str(path)


def read_json(tmp_path: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / name).read_text(encoding="utf-8"))
    return found


def command(tmp_path: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "deepvm.runtime.launch", *words]


@pytest.fixture
def own_temporary_files(tmp_path: Path) -> dict[str, str]:
    """An environment whose temporary directory shows what was left behind."""
    (tmp_path / "tmp").mkdir()
    return {**os.environ, "TMPDIR": str(tmp_path / "tmp")}


def test_two_workers_add_up_over_gloo_with_one_thread_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    body = """
        import pickle
        import torch
        import torch.distributed as dist
        class Mine: pass
        assert type(pickle.loads(pickle.dumps(Mine()))) is Mine
        dist.init_process_group("gloo")
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
        tell(total=total.item(), argv=sys.argv, file=__file__, main=__name__, first=sys.path[0],
             threads=torch.get_num_threads(), world=os.environ["WORLD_SIZE"], local=os.environ["LOCAL_RANK"])
        print("rank", rank, "is done")
        dist.destroy_process_group()
    """
    path = script(tmp_path, body)
    handlers = signal.getsignal(signal.SIGTERM)
    launch(
        path,
        [str(tmp_path), "--lr", "0.1"],
        nproc_per_node=2,
        preload=QUICK,
        log_dir=str(tmp_path / "logs"),
        redirects="3",
    )
    for rank in (0, 1):
        seen = read_json(tmp_path, f"told-0-{rank}")
        assert (seen["total"], seen["world"], seen["local"]) == (3.0, "2", str(rank))
        assert (seen["argv"], seen["file"], seen["main"]) == ([path, str(tmp_path), "--lr", "0.1"], path, "__main__")
        assert (seen["first"], seen["imported"]) == (str(tmp_path), True)
        assert seen["threads"] == 1
    assert "OMP_NUM_THREADS is not set" in capsys.readouterr().err
    logs = sorted((tmp_path / "logs").rglob("stdout.log"))
    assert [log.read_text() for log in logs] == ["rank 0 is done\n", "rank 1 is done\n"]
    assert signal.getsignal(signal.SIGTERM) is handlers


def test_a_killed_worker_comes_back_from_the_same_template_without_the_import(tmp_path: Path) -> None:
    body = """
        import signal
        import torch
        import torch.distributed as dist
        tell()
        if restart == 1 and rank == 1:
            time.sleep(0.5)  # late: rank 0 must not meet the address that rank 1 had before
        dist.init_process_group("gloo")
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
        if restart == 0 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(total)
        tell("done", total=total.item())
        dist.destroy_process_group()
    """
    launch(script(tmp_path, body), [str(tmp_path)], nproc_per_node=2, max_restarts=1, preload=QUICK)
    for rank in (0, 1):
        first, again = read_json(tmp_path, f"told-0-{rank}"), read_json(tmp_path, f"told-1-{rank}")
        assert again["template"] == first["template"]
        assert again["pid"] != first["pid"]
        assert again["imported"]
        assert read_json(tmp_path, f"done-1-{rank}")["total"] == 6.0
        assert not (tmp_path / f"done-0-{rank}").exists()
        assert gone(first["template"])


@pytest.mark.parametrize("end", ["sys.exit(0)", "sys.exit()", "os._exit(0)", ""])
def test_every_way_to_exit_with_zero_is_success(tmp_path: Path, end: str) -> None:
    launch(script(tmp_path, f"\ntell()\n{end}\n"), [str(tmp_path)], nproc_per_node=2, preload=())
    assert (tmp_path / "told-0-1").exists()


def test_an_error_of_the_script_is_shown_as_its_own(tmp_path: Path, own_temporary_files: dict[str, str]) -> None:
    path = script(tmp_path, "def bake():\n    raise ValueError('the oven is cold')\nbake()\n", prologue="")
    done = subprocess.run(
        command(tmp_path, "--preload", "json", path),
        capture_output=True,
        text=True,
        timeout=60,
        env=own_temporary_files,
    )
    assert done.returncode == 1
    expected = f'Traceback (most recent call last):\n  File "{path}", line 3, in <module>\n    bake()\n'
    assert expected in done.stderr
    assert "ValueError: the oven is cold" in done.stderr
    assert "FAILED" in done.stderr  # the agent's own summary
    assert "deepvm/runtime" not in done.stderr
    assert os.listdir(own_temporary_files["TMPDIR"]) == []


def test_sigterm_to_the_launcher_ends_all_and_leaves_nothing(
    tmp_path: Path, own_temporary_files: dict[str, str]
) -> None:
    path = script(tmp_path, "tell()\ntime.sleep(60)\n")
    words = command(tmp_path, "--nproc-per-node", "2", "--preload", "json", path, str(tmp_path))
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=own_temporary_files) as launcher:
        wait_until(lambda: (tmp_path / "told-0-0").exists() and (tmp_path / "told-0-1").exists(), timeout_s=60)
        workers = [read_json(tmp_path, f"told-0-{rank}") for rank in (0, 1)]
        labels = Path(f"/proc/{workers[0]['template']}/cmdline").read_text(encoding="utf-8").split("\0")
        assert path in labels
        launcher.send_signal(signal.SIGTERM)
        _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + signal.SIGTERM
    assert "ended by SIGTERM" in err
    assert all(gone(worker["pid"]) and gone(worker["template"]) for worker in workers)
    assert os.listdir(own_temporary_files["TMPDIR"]) == []


def test_workers_end_when_the_launcher_is_killed(tmp_path: Path, own_temporary_files: dict[str, str]) -> None:
    path = script(tmp_path, "tell()\ntime.sleep(60)\n")
    with subprocess.Popen(
        command(tmp_path, "--preload", "json", path, str(tmp_path)),
        stderr=subprocess.DEVNULL,
        env=own_temporary_files,
    ) as launcher:
        wait_until((tmp_path / "told-0-0").exists, timeout_s=60)
        worker = read_json(tmp_path, "told-0-0")
        launcher.kill()
    wait_until(lambda: gone(worker["pid"]) and gone(worker["template"]))


def test_without_a_template_workers_are_fresh_interpreters(tmp_path: Path) -> None:
    path = script(tmp_path, "tell()\n")
    launch(path, [str(tmp_path)], template=False)
    seen = read_json(tmp_path, "told-0-0")
    assert not seen["imported"]
    assert seen["template"] == os.getpid()


def test_a_module_runs_as_main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bakery").mkdir()
    (tmp_path / "bakery" / "__init__.py").write_text("")
    (tmp_path / "bakery" / "oven.py").write_text(
        PROLOGUE + "tell(name_=__name__, package=__package__, argv=sys.argv)\n"
    )
    monkeypatch.chdir(tmp_path)
    launch("bakery.oven", [str(tmp_path)], module=True, preload=())
    seen = read_json(tmp_path, "told-0-0")
    assert (seen["name_"], seen["package"]) == ("__main__", "bakery")
    assert seen["argv"] == [str(tmp_path / "bakery" / "oven.py"), str(tmp_path)]


def test_a_preload_with_threads_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    )
    with pytest.raises(TemplateError, match=r"preloading threaded left 1 more thread running .*--no-template"):
        launch(script(tmp_path, "tell()\n"), [str(tmp_path)], preload=("threaded",))
    assert not (tmp_path / "told-0-0").exists()


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"nnodes": "2"}, "need a rendezvous"),
        ({"nnodes": "3:2"}, "not a valid number of nodes"),
        ({"nnodes": "many"}, "not a valid number of nodes"),
        ({"nproc_per_node": 0}, "one or more"),
        ({"nproc_per_node": "some"}, "some"),
        ({"max_restarts": -1}, "zero or more"),
        ({"redirects": "3"}, "--log-dir"),
        ({"rdzv_backend": "static"}, "c10d"),
        ({"monitor_interval_s": 0.0}, "above zero"),
    ],
)
def test_what_cannot_be_launched_is_refused(tmp_path: Path, wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        launch(script(tmp_path, ""), **wrong)


def test_a_script_that_is_not_there_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        assert main(["no-such-script.py"]) == 2
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert "script 'no-such-script.py' not found" in capsys.readouterr().err


def test_settings_of_the_rendezvous_are_pairs_whose_values_may_have_an_equals_sign() -> None:
    assert _pairs("timeout = 30, url=x?a=b,") == {"timeout": "30", "url": "x?a=b"}
    with pytest.raises(ArgumentTypeError, match="'alone': write KEY=VALUE,KEY=VALUE"):
        _pairs("alone")
