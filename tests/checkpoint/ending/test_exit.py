"""A process that ends without close() keeps what it saved, and its last step."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import prune
from torch.utils.data import DataLoader, TensorDataset

from deepvm import resumable
from deepvm.checkpoint import Checkpointer
from deepvm.policy import EverySteps
from deepvm.store.urls import open_stores

BEGIN = """
import os, signal, sys, threading, torch, deepvm
torch.manual_seed(0)
model = torch.nn.Linear(1000, 1000)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def train(ckpt, steps, first=1):
    for n in range(first, first + steps):
        model(torch.randn(2, 1000)).sum().backward(); optimizer.step(); optimizer.zero_grad(); ckpt.step(n)
def checkpointer(every, **more):
    return deepvm.Checkpointer({"model": model, "optimizer": optimizer}, URL, policy=f"every {every} steps", **more)
"""
# Imports once, and forks for each script that is asked for: a fork ends as every interpreter does.
FORKING = """
import gc, json, os, sys, torch, torch._dynamo, deepvm, deepvm.checkpoint
torch.set_num_threads(1)
gc.freeze()  # the end of each fork would walk all that was imported, for a second
for line in sys.stdin:
    code, errors = json.loads(line)
    child = os.fork()
    if not child:
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
        exec(compile(code, "script", "exec"), {"__name__": "__main__"})
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def interpreter() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", FORKING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        process.wait(30)


@pytest.fixture
def run(interpreter: subprocess.Popen[str], tmp_path: Path) -> Callable[[str], tuple[int, str, list[int]]]:
    """Run a script to its end: its exit code, its stderr, and the steps in the store."""

    def run_script(script: str) -> tuple[int, str, list[int]]:
        url, errors = f"file://{tmp_path}/store", tmp_path / "errors"
        code = f"URL = {url!r}\n{BEGIN}\n{textwrap.dedent(script)}"
        assert interpreter.stdin is not None
        assert interpreter.stdout is not None
        print(json.dumps([code, str(errors)]), file=interpreter.stdin, flush=True)
        ended = int(interpreter.stdout.readline())
        return ended, errors.read_text(), steps_in(url, "default")

    return run_script


Run = Callable[[str], tuple[int, str, list[int]]]


def steps_in(url: str, run: str) -> list[int]:
    (store,) = open_stores(url)
    return sorted(store.steps(run))


def test_a_save_that_is_under_way_is_finished_when_the_script_ends(run: Run) -> None:
    code, told, steps = run("ckpt = checkpointer(1000)\ntrain(ckpt, 2)\nckpt.save(3)")
    assert (code, steps) == (0, [3]), told


def test_a_short_run_ends_with_a_save_of_its_last_step(run: Run, tmp_path: Path) -> None:
    script = f"ckpt = checkpointer(3)\ntrain(ckpt, 5)\ntorch.save(model.state_dict(), '{tmp_path}/truth')"
    code, told, steps = run(script)
    assert (code, steps[-1]) == (0, 5), told
    model = torch.nn.Linear(1000, 1000)
    with Checkpointer({"model": model}, f"file://{tmp_path}/store", policy=EverySteps(1000)) as ckpt:
        assert ckpt.restore() == 5
    truth = torch.load(tmp_path / "truth")
    assert all(torch.equal(tensor, truth[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("end", "code", "newest"),
    [
        ("sys.exit(3)", 3, 5),
        ("def main():\n    train(checkpointer(3), 5)\nmain()", 0, 5),
        ("raise ValueError('a bug')", 1, 5),  # the state still is that of the step
        ("model(torch.randn(2, 3))", 1, 5),
        ("raise KeyboardInterrupt", -2, 5),
        ("optimizer.step(); raise ValueError('a bug')", 1, 3),
        ("model.weight.data.add_(0); model.bias.detach().zero_(); raise ValueError('a bug')", 1, 3),
        ("model(torch.randn(2, 1000)).sum().backward(); optimizer.step()", 0, 3),  # nobody told that step's number
        ("os._exit(0)", 0, None),
        ("os.kill(os.getpid(), signal.SIGTERM)", -15, None),
    ],
)
def test_the_last_save_follows_from_how_the_process_ends(run: Run, end: str, code: int, newest: int | None) -> None:
    begin = "" if "main" in end else "ckpt = checkpointer(3, on_busy='wait')\ntrain(ckpt, 5)\n"
    found, told, steps = run(begin + end)
    assert found == code, told
    assert newest is None or steps[-1:] == [newest], told


def test_several_checkpointers_and_forked_children_end_well(run: Run, tmp_path: Path) -> None:
    script = """
    from torch.utils.data import DataLoader
    one, two = checkpointer(1000, run="one"), checkpointer(1000)
    train(one, 2); two.step(8)
    for _ in DataLoader(torch.arange(8), num_workers=2): pass
    child = os.fork()
    if not child: sys.exit(0)  # a fork that ends in front of its parent: it saves nothing of it
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not os.path.exists(URL.removeprefix("file://") + "/default/8.json")
    """
    code, told, steps = run(script)
    assert (code, steps) == (0, [8]), told
    assert steps_in(f"file://{tmp_path}/store", "one") == [2]


def test_training_in_a_daemon_thread_keeps_what_it_saved(run: Run) -> None:
    script = """
    ready = threading.Event()
    def work():
        ckpt = checkpointer(2); train(ckpt, 3); ready.set()
        threading.Event().wait()
    threading.Thread(target=work, daemon=True).start()
    ready.wait()
    """
    code, told, steps = run(script)
    assert (code, steps) == (0, [2]), told


def test_a_deadline_that_is_missed_at_the_end_is_reported_in_one_sentence(run: Run) -> None:
    script = """
    import time
    from deepvm.checkpoint.save.store_transfer import StoreTransfer
    StoreTransfer._put = lambda *_: time.sleep(60)
    ckpt = checkpointer(1000, deadline_s=1.0)
    train(ckpt, 1); ckpt.save(1)
    """
    code, told, steps = run(script)
    assert (code, steps) == (0, []), told
    assert told.count("was not saved") == 1
    assert "step 1 was not saved: it was not finished within the 1 s" in told


@pytest.mark.parametrize("configured", ["", "import logging.config; logging.config.dictConfig({'version': 1})\n"])
def test_saves_that_fail_are_a_loud_line_at_the_first_and_at_the_end(run: Run, configured: str) -> None:
    script = """
    class Odd:
        def state_dict(self): return {"odd": object()}
    ckpt = deepvm.Checkpointer({"model": model, "odd": Odd()}, URL, policy="every 1 steps")
    """
    code, told, steps = run(textwrap.dedent(script) + configured + "train(ckpt, 6)")
    assert (code, steps) == (0, []), told
    first, last = (line for line in told.splitlines() if "state 'odd.odd' is a builtins.object" in line)
    assert "step 1 was not saved" in first
    assert "7 of 7 saves failed, nothing was saved" in last


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "ValueError"])
def test_a_step_that_an_exception_leaves_unsaved_is_reported_with_the_reason(run: Run, error: str) -> None:
    _, told, steps = run(f"ckpt = checkpointer(100)\ntrain(ckpt, 5)\noptimizer.step()\nraise {error}")
    assert steps == []
    assert told.count("was not saved") == 1
    assert f"step 5 was not saved: an optimizer has stepped since ({error})" in told


def test_a_with_block_left_by_an_exception_saves_a_state_that_is_whole_and_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(4, 4)
    for name, harm in (("whole", lambda: None), ("written", model.bias.detach().zero_)):
        url = f"file://{tmp_path}/{name}"
        with suppress(ZeroDivisionError), Checkpointer({"model": model}, url, policy=EverySteps(100)) as ckpt:
            ckpt.step(1)
            harm()
            raise ZeroDivisionError
        assert steps_in(url, "default") == ([1] if name == "whole" else [])
    assert "model.bias was written to since; call ckpt.save(1) before the state is changed (ZeroDiv" in caplog.text


def _zeroed(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()


def _replaced(model: torch.nn.Module) -> None:
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight = torch.nn.Parameter(torch.zeros(4, 4))


def _pruned(model: torch.nn.Module) -> None:
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            prune.l1_unstructured(layer, "weight", amount=0.5)


def _averaged(model: torch.nn.Module) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})


def _run_in_training(model: torch.nn.Module) -> None:
    model.train()(torch.randn(3, 4))  # batch norm's running mean


@pytest.mark.parametrize("change", [_zeroed, _replaced, _pruned, _averaged, _run_in_training])
def test_a_state_that_was_changed_after_its_step_is_not_saved_as_that_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Callable[[torch.nn.Module], None]
) -> None:
    layers = (each for _ in range(100) for each in (torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
    model = torch.nn.Sequential(*layers)
    ckpt = Checkpointer({"model": model}, f"file://{tmp_path}", policy=EverySteps(100))
    for step in (4, 5):
        ckpt.step(step)
    model.eval()(torch.randn(3, 4))  # reads only
    change(model)
    ckpt.close()
    assert steps_in(f"file://{tmp_path}", "default") == []
    assert caplog.text.count("step 5 was not saved: model.") == 1


def test_the_last_save_has_loader_and_generator_as_they_were_at_the_step(tmp_path: Path) -> None:
    def parts() -> dict[str, Any]:
        return {"loader": resumable(DataLoader(TensorDataset(torch.arange(20)), 2, shuffle=True), seed=0)}

    state = parts()
    batches = iter(state["loader"])
    with suppress(ZeroDivisionError), Checkpointer(state, f"file://{tmp_path}", policy=EverySteps(100)) as ckpt:
        next(batches)
        ckpt.step(1)
        (lost,), number = next(batches), torch.rand(1)
        raise ZeroDivisionError
    state = parts()
    with Checkpointer(state, f"file://{tmp_path}", policy=EverySteps(100)) as ckpt:
        assert ckpt.restore() == 1
        drawn, (again,) = torch.rand(1), next(iter(state["loader"]))
    assert torch.equal(again, lost)
    assert torch.equal(drawn, number)
