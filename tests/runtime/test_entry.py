"""What is run, and where: scripts, modules and Python commands after ``--``, and a run that is resumed elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deepvm.cli.app import run as deepvm
from deepvm.errors import UsageError
from deepvm.runtime.entry import Entry, parse_entry
from tests.support.runtime.whole_runs import running, write_plan

pytestmark = pytest.mark.timeout(300)

TRAIN = """
import os, sys, time
from pathlib import Path
import torch
import deepvm
from pack.other import NAME
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = float(Path("data.txt").read_text())
with deepvm.Checkpointer({"model": model, "optimizer": optimizer}) as ckpt:
    step = ckpt.restore() or 0
    while step < int(sys.argv[1]):
        model(torch.full((1, 4), data)).sum().backward()
        optimizer.step()
        step += 1
        ckpt.step(step)
        if not Path("resumed").exists():
            time.sleep(0.05)
print(NAME, sys.argv, Path.cwd(), os.environ["GLOO_SOCKET_IFNAME"])
"""


@pytest.mark.parametrize(
    ("words", "entry"),
    [
        (["train.py", "--lr", "3"], Entry(script="train.py", args=("--lr", "3"))),
        (["./train.py"], Entry(script="./train.py")),
        (["python", "train.py", "-m", "x"], Entry(script="train.py", args=("-m", "x"))),
        (["/usr/bin/python3.11", "-u", "train.py"], Entry(script="train.py")),
        (["-m", "package.train", "-x"], Entry(script="package.train", args=("-x",), module=True)),
        (["python", "-m", "package.train"], Entry(script="package.train", module=True)),
    ],
)
def test_scripts_modules_and_python_commands_are_understood(words: list[str], entry: Entry) -> None:
    assert parse_entry(words) == entry


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["python"], "nothing to run"),
        (["-m"], "nothing to run"),
        (["python", "-c", "print()"], "python -c: workers are forked"),
        (["torchrun", "train.py"], "torchrun: deepvm run starts the workers itself"),
        (["train.sh"], "is not a Python script"),
        (["nothing.py"], "script 'nothing.py' not found"),
        (["-m", "nothing.train"], "module 'nothing' not found"),
        (["-m", "pack.nothing"], "module 'pack.nothing' not found"),
        (["-m", "pack"], "a package without __main__.py"),
    ],
)
def test_what_is_not_python_is_refused_with_the_reason(words: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text("#!/bin/bash\necho\n", encoding="utf-8")
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").touch()
    with pytest.raises(UsageError, match=said.replace("(", r"\(")):
        parse_entry(words).check(str(tmp_path))


def test_a_module_is_run_and_resumed_from_elsewhere_in_the_folder_where_it_was_started(tmp_path: Path) -> None:
    plan, there, elsewhere = write_plan(tmp_path), tmp_path / "there", tmp_path / "elsewhere"
    (there / "pack").mkdir(parents=True)
    elsewhere.mkdir()
    (there / "pack" / "train.py").write_text(TRAIN, encoding="utf-8")
    (there / "pack" / "other.py").write_text("NAME = 'packed'\n", encoding="utf-8")
    (there / "data.txt").write_text("0.5", encoding="utf-8")
    words = [str(plan), "--name", "run", "--workers", "1", "--memory", "64MB", "--save", "every 1000 steps", "--json"]
    more = ["--", "python", "-m", "pack.train", "60"]
    with running(tmp_path, [*words, *more], name="run", cwd=there) as run:
        run.until_step(3)
        folder = run.ledger.parent
        kept = [path for path in folder.glob("machines/*/*") if path.is_file()]
        assert [path.stat().st_mode & 0o077 for path in kept] == [0] * len(kept) != []
        run.interrupt()
        code, _, err = run.end()
    assert code == 130, err
    (there / "resumed").touch()
    readable = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_mode & 0o077]
    assert not readable, "what a run writes is for its owner only"
    with running(
        tmp_path, ["--resume", "run", "--json", "--max-restarts", "0", "--save", "every 7 steps"], name="run",
        cwd=elsewhere,
    ) as run:  # fmt: skip
        code, out, err = run.end()
    assert code == 0, err
    assert json.loads(out)["steps"]["done"] == 60
    log = (run.ledger.parent / "machines" / "worker-0" / "log.txt").read_text(encoding="utf-8")
    assert f"packed ['{there}/pack/train.py', '60'] {there} lo" in log
    assert any(e.data["step"] % 7 == 0 for e in run.events("save")), "the new policy holds"
    kept = json.loads((run.ledger.parent / "settings.json").read_text(encoding="utf-8"))["settings"]
    assert (kept["max_restarts"], kept["policy"], kept["cwd"]) == (0, "every 7 steps", str(there))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--resume", "kept", "--", "train.py"], "leave out PLAN"),
        (["--resume", "kept", "plan.json", "--", "train.py", "--lr", "1"], "leave out PLAN, -- SCRIPT ARGS"),
        (["--resume", "kept", "--name", "new", "--rank", "2"], "leave out --rank, --name"),
        (["--resume", "kept", "--on", "ec2"], "leave out --on"),
        (["--resume", "kept", "--save", "often"], "'often'"),
        (["--report", "kept", "--save", "every 5 steps"], "leave out --save"),
        (["--down", "kept", "--workers", "2"], "leave out --workers"),
    ],
)
def test_arguments_that_a_kept_run_cannot_take_are_refused_by_name(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("DEEPVM_RUNS", str(tmp_path / "runs"))
    (tmp_path / "runs" / "kept").mkdir(parents=True)
    (tmp_path / "train.py").touch()
    plan = json.loads(write_plan(tmp_path).read_text(encoding="utf-8"))
    settings = {"script": str(tmp_path / "train.py"), "args": [], "cwd": str(tmp_path)}
    kept = {"format": "deepvm-run/1", "plan": plan, "settings": settings, "on": "local"}
    (tmp_path / "runs" / "kept" / "settings.json").write_text(json.dumps(kept), encoding="utf-8")
    assert deepvm(["run", "--json", *words]) == 2
    assert said in json.loads(capsys.readouterr().out)["error"]["message"]
