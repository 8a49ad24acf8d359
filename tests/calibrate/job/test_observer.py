"""What the process of a profiled script sees and reports, part by part; and the process itself, once."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepvm.calibrate.job import observer as observer_module
from deepvm.calibrate.job.observer import MOST_NEW_FILES, Observer


@pytest.fixture
def observer(tmp_path: Path) -> Iterator[Observer]:
    (tmp_path / "scratch").mkdir()
    made = Observer({"script": "train.py", "args": [], "module": False, "scratch": str(tmp_path / "scratch"),
                     "steps": 3, "warmup": 1, "timeout_s": 600.0})  # fmt: skip
    yield made
    os.close(made._progress)


def reported(tmp_path: Path) -> Any:
    return json.loads((tmp_path / "scratch" / "report.json").read_text())


def test_a_better_report_stays_and_gets_what_came_then(observer: Observer, tmp_path: Path) -> None:
    nothing = {"torch": True, "steps": 0, "text": "torch was not imported"}
    observer.new_files = [f"/file{number}" for number in range(30)]
    observer.report({"outcome": "exited", "code": 3})
    common = {"seen": nothing, "new_files": observer.new_files[:20]}
    assert reported(tmp_path) == {**common, "outcome": "exited", "code": 3}
    observer.report({"outcome": "crashed"})
    assert reported(tmp_path)["outcome"] == "crashed"
    observer.new_files = []
    observer.report({"outcome": "timed", "batch": 5})
    observer.report({"outcome": "timed", "batch": 6})
    observer.report({"outcome": "crashed", "error": "late"})
    found = reported(tmp_path)
    assert (found["outcome"], found["batch"], found["then"]) == ("timed", 6, {"outcome": "crashed", "error": "late"})
    observer.report({"outcome": "done", "batch": 7})
    observer.report({"outcome": "timed", "batch": 8})
    found = reported(tmp_path)
    assert (found["outcome"], found["batch"], found["then"]) == ("done", 7, {"outcome": "timed", "batch": 8})
    assert sorted(os.listdir(tmp_path / "scratch")) == ["progress", "report.json"]


def test_a_fork_of_the_script_reports_and_counts_nothing(observer: Observer, tmp_path: Path) -> None:
    called: list[Any] = []
    hook = observer._in_this_process(lambda *words: called.append(words))
    hook(1, 2)
    observer._pid += 1
    hook(3, 4)
    observer.report({"outcome": "done"})
    observer._audit("open", (str(tmp_path / "new"), None, os.O_CREAT))
    assert called == [(1, 2)]
    assert not (tmp_path / "scratch" / "report.json").exists()
    assert observer.new_files == []


def test_progress_is_a_number_of_fixed_width(observer: Observer, tmp_path: Path) -> None:
    for steps in (12, 3):
        observer._show(steps)
        assert (tmp_path / "scratch" / "progress").read_bytes() == f"{steps:<20}".encode()


def test_files_that_the_script_creates_are_listed(observer: Observer, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_text("")
    writing = os.O_WRONLY | os.O_CREAT
    for event, path, flags in (
        ("open", str(tmp_path / "a"), writing),
        ("open", str(tmp_path / "a"), writing),
        ("open", os.fsencode(tmp_path / "b"), os.O_RDWR),
        ("open", tmp_path / "made", os.O_CREAT),
        ("open", str(tmp_path / "read"), os.O_RDONLY),
        ("open", str(tmp_path / "unknown"), None),
        ("open", str(old), writing),
        ("open", str(tmp_path / "scratch" / "ours"), writing),
        ("open", "/dev/shm/theirs", writing),
        ("open", "/proc/self/nothing", writing),
        ("open", 7, writing),
        ("os.remove", str(tmp_path / "c"), None),
        ("os.mkdir", str(tmp_path / "folder"), 0o777),
        ("open", str(tmp_path / "folder" / "inside"), writing),
        ("open", str(tmp_path / "folder2"), writing),
    ):
        observer._audit(event, (path, None if event == "open" else 0o777, flags))
    assert [os.path.basename(name) for name in observer.new_files] == ["a", "b", "made", "folder", "folder2"]
    for number in range(2 * MOST_NEW_FILES):
        observer._audit("os.mkdir", (str(tmp_path / f"many{number}"), 0o777, -1))
    assert len(observer.new_files) == MOST_NEW_FILES == 20


def test_a_module_is_watched_once_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "watched_module.py").write_text("value = 7\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[int] = []
    finder = observer_module._AfterImport("watched_module", lambda module: seen.append(module.value))
    sys.meta_path.insert(0, finder)
    try:
        importlib.import_module("colorsys")
        assert finder in sys.meta_path
        module = importlib.import_module("watched_module")
    finally:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
    assert seen == [7]
    assert module.__spec__ is not None
    assert type(module.__spec__.loader).__name__ == type(module.__loader__).__name__ == "SourceFileLoader"
    assert module.__spec__.loader.get_source("watched_module") == "value = 7\n"  # type: ignore[union-attr]
    monkeypatch.delitem(sys.modules, "watched_module")
    assert finder.find_spec("watched_module", None, None) is None  # once


def test_a_loader_that_watches_is_like_the_one_below() -> None:
    spec = importlib.util.find_spec("colorsys")
    assert spec is not None
    loader = observer_module._Then(spec.loader, lambda module: None)
    assert loader.create_module(spec) is None
    assert loader.get_filename("colorsys") == spec.origin
    bare = types.ModuleType("colorsys")
    loader.exec_module(bare)
    assert bare.__loader__ is spec.loader
    assert bare.rgb_to_hsv(0, 0, 0) == (0.0, 0.0, 0)


def test_a_module_that_does_not_exist_is_not_found_as_ever() -> None:
    finder = observer_module._AfterImport("nothing_like_this", lambda module: None)
    sys.meta_path.insert(0, finder)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("nothing_like_this")
    assert finder not in sys.meta_path


def test_waits_for_batches_are_timed() -> None:
    class Batches:
        def __init__(self) -> None:
            self.left = [1, 2]

        def __next__(self) -> int:
            if not self.left:
                raise StopIteration
            return self.left.pop(0)

        def __iter__(self) -> Batches:
            return self

    waits: list[float] = []
    observer_module._time_batches(Batches, waits.append)
    assert list(Batches()) == [1, 2]
    assert len(waits) == 2
    assert all(0 <= seconds < 60 for seconds in waits)


def test_what_torch_saves_goes_to_the_folder_and_is_loaded_from_there(tmp_path: Path) -> None:
    fake = types.SimpleNamespace(save=torch.save, load=torch.load)
    observer_module._redirect_files(fake, tmp_path / "files")
    (tmp_path / "there").mkdir()
    torch.save({"a": 1}, tmp_path / "there" / "old.pt")
    assert fake.load(str(tmp_path / "there" / "old.pt")) == {"a": 1}
    for path in (str(tmp_path / "there" / "new.pt"), tmp_path / "there" / "old.pt", tmp_path / "x" / ("long" * 50)):
        fake.save({"b": 2}, path)
        assert fake.load(path) == {"b": 2}
    assert os.listdir(tmp_path / "there") == ["old.pt"]
    assert torch.load(tmp_path / "there" / "old.pt") == {"a": 1}
    assert len(os.listdir(tmp_path / "files")) == 3
    assert str(tmp_path / "there" / "new.pt").replace("/", "|") in os.listdir(tmp_path / "files")
    with (tmp_path / "open.pt").open("wb") as file:
        fake.save({"c": 3}, file)
    with (tmp_path / "open.pt").open("rb") as file:
        assert fake.load(file) == {"c": 3}


def failing(code: str, path: Path) -> BaseException:
    path.write_text(code)
    try:
        exec(compile(code, str(path), "exec"), {"__name__": "__main__"})  # noqa: S102
    except BaseException as error:
        return error
    raise AssertionError


@pytest.mark.parametrize(
    ("code", "error", "where"),
    [
        ("def f():\n    raise ValueError('no')\nf()", "ValueError: no", "train.py, line 2"),
        ("\nimport json\njson.loads('{')", "json.decoder.JSONDecodeError: Expecting property name", "train.py, line 3"),
        ("x = (", "SyntaxError: '(' was never closed", "train.py, line 1"),
        ("raise OSError('first:\\n\\n  second\\nthird')", "OSError: first: second", "train.py, line 1"),
        ("raise OSError('first\\nsecond')", "OSError: first", "train.py, line 1"),
        ("raise OSError('first:')", "OSError: first:", "train.py, line 1"),
        ("raise OSError('x' * 900)", "OSError: " + "x" * 491, "train.py, line 1"),
    ],
)
def test_an_error_is_its_first_sentence_and_its_line(code: str, error: str, where: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    found = observer_module._about(failing(code, path), str(path))
    assert found["error"].startswith(error)
    assert len(found["error"]) <= 500
    assert found["where"] == where
    if "JSON" not in error:
        assert found["error"] == error


def test_an_error_outside_of_the_script_has_the_last_place() -> None:
    assert observer_module._about(ValueError("x"), "train.py") == {"error": "ValueError: x", "where": ""}
    with pytest.raises(ValueError, match="property name") as caught:
        json.loads("{")
    assert observer_module._about(caught.value, "train.py")["where"].startswith("decoder.py, line ")


def test_texts_of_exit_codes() -> None:
    assert [observer_module._text(value) for value in (None, 3, "no data", 2.5, "x" * 600)] == [
        "", "", "no data", "2.5", "x" * 500,
    ]  # fmt: skip


def test_what_is_seen_names_the_optimizers(observer: Observer) -> None:
    class Watch:
        done = 4

        def describe(self) -> str:
            return "4 batches"

    model = nn.Linear(1, 1)
    held = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.AdamW(model.parameters())]
    observer._watch = Watch()
    seen = observer._seen()
    assert {"SGD", "AdamW"} <= {*seen["optimizers"]}
    assert seen["optimizers"] == sorted(seen["optimizers"])
    assert {name: seen[name] for name in ("torch", "steps", "text")} == {"torch": True, "steps": 4, "text": "4 batches"}
    assert len(held) == 2


def test_shared_memory_is_removed_by_multiprocessings_tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tracker ends once its pipe is closed."""
    ours, theirs = os.pipe()
    os.set_inheritable(ours, True)
    tracker = subprocess.Popen([sys.executable, "-c", f"import os; os.read({ours}, 1)"], pass_fds=[ours])
    os.close(ours)
    fake = types.SimpleNamespace(_resource_tracker=types.SimpleNamespace(_fd=theirs, _pid=tracker.pid))
    monkeypatch.setitem(sys.modules, "multiprocessing.resource_tracker", fake)
    observer_module.remove_shared_memory()
    assert not Path(f"/proc/{tracker.pid}").exists()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(theirs)
    tracker.returncode = 0  # it was waited for
    for fd, pid in ((None, None), (None, 1), (1, None)):
        fake._resource_tracker = types.SimpleNamespace(_fd=fd, _pid=pid)
        observer_module.remove_shared_memory()
    os.fstat(1)


SCRIPT = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = DataLoader(TensorDataset(torch.ones(64, 4)), batch_size=8)
while True:
    for (batch,) in data:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.save(model.state_dict(), "model.pt")
"""


def test_the_process_ends_with_zero_once_all_is_measured(tmp_path: Path) -> None:
    scratch, script = tmp_path / "scratch", tmp_path / "train.py"
    scratch.mkdir()
    script.write_text(SCRIPT)
    settings = {"script": str(script), "args": [], "module": False, "scratch": str(scratch), "steps": 3, "warmup": 2,
                "timeout_s": 600.0}  # fmt: skip
    (scratch / "settings.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "deepvm.calibrate.job.observer", str(scratch / "settings.json")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    found = reported(tmp_path)
    assert found["outcome"] == "done"
    assert "then" not in found
    steps = found["seen"]["steps"]
    assert steps in (7, 8)  # one more if torch has loaded its compiler
    assert found["seen"] == {
        "torch": True, "steps": steps, "text": f"{steps} optimizer steps, {steps} batches, 2 forward passes",
        "optimizers": ["SGD"],
    }  # fmt: skip
    assert (found["batch"], found["new_files"], len(found["step_s"])) == (8, [], 3)
    assert int((scratch / "progress").read_bytes()) == steps - 1
    assert sorted(os.listdir(tmp_path)) == ["scratch", "train.py"]
