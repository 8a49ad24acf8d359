"""The stages of a start, as the checkpointer sees them and as programs tell them."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from deepvm.checkpoint import Checkpointer, timeline
from deepvm.checkpoint.timeline import COLUMNS, Stage, Timeline
from deepvm.fetch import clock
from tests.support.checkpoint.processes import Forked

A_START = Timeline(
    stages=(
        Stage(name="fetch", began_s=-0.2, ended_s=1.3, beside=True),
        Stage(name="import", began_s=0.0, ended_s=1.5),
        Stage(name="model <big>", began_s=1.5, ended_s=2.0),
        Stage(name="restore", began_s=2.0, ended_s=2.0001),
        Stage(name="first step", began_s=2.0001, ended_s=3.0, unfinished=True),
    )
)


def test_a_timeline_prints_as_bars_of_60_columns() -> None:
    title, *rows = str(A_START).splitlines()
    assert title == "3.00 s from the start of the process"
    assert [row.split()[0] for row in rows] == ["fetch", "import", "model", "restore", "first"]
    width = len("model <big>")
    bars = [row[width + 1 : width + 1 + COLUMNS] for row in rows]
    assert bars[0].startswith("░" * 28)
    assert bars[0].rstrip() == "░" * 28
    assert [len(bar.strip()) for bar in bars[1:]] == [28, 9, 1, 19]  # of 3.2 s; what is short is still seen
    assert bars[4].endswith("█")
    assert rows[4].endswith("1.00 s so far")
    assert rows[1].endswith("1.50 s")


def test_a_timeline_draws_as_svg_and_tells_as_json() -> None:
    root = ET.fromstring(A_START.svg())  # noqa: S314 - our own
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "model <big>" in texts
    assert len(list(root.iter("{http://www.w3.org/2000/svg}rect"))) == 5
    document = json.loads(json.dumps(A_START.to_json()))
    assert (root.get("width"), root.get("height"), root.get("viewBox")) == ("720", "164", "0 0 720 164")
    assert document["total_s"] == 3.0
    assert document["stages"][0] == {
        "name": "fetch", "began_s": -0.2, "ended_s": 1.3, "beside": True, "unfinished": False,
    }  # fmt: skip


def test_bars_of_the_drawing_lie_where_their_stages_do() -> None:
    """500 pixels for 3.2 s, from the earliest stage on; zero is marked."""
    root = ET.fromstring(A_START.svg())  # noqa: S314 - our own
    bars = [dict(element.attrib) for element in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert [(float(bar["x"]), float(bar["width"])) for bar in bars] == [
        (110.0, 234.4), (141.2, 234.4), (375.6, 78.1), (453.8, 1.0), (453.8, 156.2),
    ]  # fmt: skip
    assert [(int(bar["y"]), int(bar["height"])) for bar in bars] == [(26 + 24 * row, 18) for row in range(5)]
    assert len({bar["fill"] for bar in bars[1:]}) == 1 != len({bar["fill"] for bar in bars})
    (zero,) = (element.attrib for element in root.iter("{http://www.w3.org/2000/svg}line"))
    assert (zero["x1"], zero["x2"], zero["y1"], zero["y2"]) == ("141.2", "141.2", "22", "146")
    texts = {element.text: element.attrib for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert (texts["import"]["x"], texts["import"]["y"], texts["import"]["text-anchor"]) == ("102", "63", "end")
    assert (texts["0.50 s"]["x"], texts["0.50 s"]["y"]) == ("459.8", "87")
    assert (texts["0 s"]["x"], texts["0 s"]["y"]) == ("141.2", "160")


def test_an_empty_timeline_is_no_error() -> None:
    assert str(Timeline(stages=())) == "0.00 s from the start of the process"
    ET.fromstring(Timeline(stages=()).svg())  # noqa: S314


def test_a_process_starts_when_the_kernel_says() -> None:
    code = "import time; t = time.clock_gettime(time.CLOCK_BOOTTIME); from deepvm.fetch import clock; "
    code += (
        "print(t, clock.process_started_s(), clock.started_ticks() == clock.started_ticks(__import__('os').getpid()))"
    )
    before = clock.now_s()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    first, started, same = done.stdout.split()
    assert before - 0.02 <= float(started) <= float(first) + 0.02  # /proc counts hundredths
    assert same == "True"
    assert clock.started_ticks(2**30) == 0


def test_restore_and_first_step_are_seen_and_the_hook_goes(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer({"model": model, "optimizer": optimizer}, f"file://{tmp_path}", run="timeline") as ckpt:
        assert len(optimizer._optimizer_step_post_hooks) == 1
        ckpt.restore()
        between_s = clock.now_s() - clock.process_started_s()
        for _ in range(3):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        assert not optimizer._optimizer_step_post_hooks
        stages = {stage.name: stage for stage in ckpt.timeline().stages}
    assert stages["restore"].ended_s <= stages["first step"].began_s <= between_s < stages["first step"].ended_s
    assert ckpt.timeline().total_s == stages["first step"].ended_s


def test_without_an_optimizer_the_first_step_is_the_one_that_is_reported(tmp_path: Path) -> None:
    with Checkpointer({"n": 1}, f"file://{tmp_path}", run="timeline", policy="every 1000s") as ckpt:
        assert "first step" not in str(ckpt.timeline())
        ckpt.step(1)
        ended = ckpt.timeline().total_s
        ckpt.step(2)
        assert ckpt.timeline().total_s == ended
        assert "first step" in str(ckpt.timeline())


def test_a_closed_checkpointer_leaves_no_hook(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Checkpointer({"model": model, "optimizer": optimizer}, f"file://{tmp_path}").close()
    assert not optimizer._optimizer_step_post_hooks
    assert not optimizer._optimizer_step_pre_hooks


PROGRAM = """
import json, sys, time
{imports}
model = torch.nn.Linear(4, 4)
{told}
time.sleep(0.3)  # as long as a model takes at least
ckpt = deepvm.Checkpointer({{"model": model}}, "file://{place}", policy="every 1000s")
ckpt.restore()
ckpt.step(1)
print(json.dumps(ckpt.timeline().to_json()))
"""


@pytest.mark.parametrize(
    ("imports", "told", "names"),
    [
        ("import torch, deepvm", "", ["import", "model", "restore", "first step"]),
        ("import deepvm, torch", "", ["import, model", "restore", "first step"]),
        (
            "import deepvm, torch; from deepvm.checkpoint import timeline",
            "with timeline.stage('rendezvous'): time.sleep(0.1)\ntimeline.mark('data')",
            ["import", "rendezvous", "data", "model", "restore", "first step"],
        ),
    ],
)
def test_what_a_program_does_before_is_distinguished_as_far_as_possible(
    tmp_path: Path, imports: str, told: str, names: list[str]
) -> None:
    code = PROGRAM.format(imports=imports, told=told, place=tmp_path)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    stages = json.loads(done.stdout)["stages"]
    if names[0] == "import, model" and stages[0]["name"] == "import":  # on a busy machine the rest of deepvm's import,
        stages[:2] = [
            {"name": names[0], "began_s": 0, "ended_s": stages[1]["ended_s"]}
        ]  # too, takes as long as a model
    assert [stage["name"] for stage in stages] == names
    by_name = {stage["name"]: stage for stage in stages}
    assert stages[0]["began_s"] == 0
    assert all(a["ended_s"] <= b["began_s"] + 1e-3 for a, b in itertools.pairwise(stages))
    if "model" in by_name:
        assert by_name["model"]["ended_s"] - by_name["model"]["began_s"] >= 0.3


def tell_timeline(pipe: Connection, place: str) -> None:
    with Checkpointer({"n": 1}, f"file://{place}") as ckpt:
        pipe.send(ckpt.timeline().to_json())


def test_a_forked_process_counts_from_its_fork(tmp_path: Path) -> None:
    began = time.monotonic()
    child = Forked(tell_timeline, str(tmp_path))
    document = child.receive()
    child.kill()
    assert document["total_s"] < time.monotonic() - began + 0.02  # the template's import of torch is not counted
    assert "import" not in [stage["name"] for stage in document["stages"]]


def test_stages_before_a_fork_are_not_the_forked_process_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with timeline.stage("long ago"):
        pass
    with Checkpointer({"n": 1}, f"file://{tmp_path}") as ckpt:
        assert "long ago" in str(ckpt.timeline())
        now_s = clock.now_s()
        monkeypatch.setattr(clock, "process_started_s", lambda: now_s)
        assert "long ago" not in str(ckpt.timeline())
