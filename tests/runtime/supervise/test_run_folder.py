"""The folder that a run leaves."""

from __future__ import annotations

import os
import shutil
import stat
from dataclasses import fields
from pathlib import Path

import pytest

from deepvm.errors import AccessDenied, MalformedFile, UnknownName, UsageError
from deepvm.runtime.run_spec import RunSpec
from deepvm.runtime.supervise.local_run import resume
from deepvm.runtime.supervise.run_folder import RunFolder, all_runs, runs_folder


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DEEPVM_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


def test_runs_are_kept_where_the_variable_says_or_with_the_users_data(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert runs_folder() == runs
    monkeypatch.delenv("DEEPVM_RUNS")
    assert runs_folder().parts[-2:] == ("deepvm", "runs")


@pytest.mark.parametrize("name", ["", "-a", "a/b", "a" * 65, "a b", "ä"])
def test_a_name_that_is_no_name_is_refused(runs: Path, name: str) -> None:
    with pytest.raises(UsageError, match="name"):
        RunFolder.create(name, {})
    with pytest.raises(UnknownName):
        RunFolder.find(name or "none")


def test_what_is_kept_is_found_by_name_and_by_path_and_private(runs: Path) -> None:
    assert all_runs() == []
    folder = RunFolder.create("a" * 64, {"script": "x.py"})

    assert RunFolder.find(folder.name).settings()["script"] == "x.py"
    assert RunFolder.find(str(folder.path)).path == folder.path.resolve()
    assert [found.name for found in all_runs()] == [folder.name]
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.token_file.stat().st_mode) == 0o600
    assert len(folder.token_file.read_text()) == 64

    folder.keep({"script": "y.py"})
    assert folder.settings()["script"] == "y.py"
    folder.remove()
    assert all_runs() == []


def test_a_name_means_a_run_and_never_a_folder_of_the_present_directory(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = RunFolder.create("one", {"script": "own.py"})
    shutil.copytree(own.path, tmp_path / "shared" / "one")
    shutil.copytree(own.path, tmp_path / "shared" / "other")
    monkeypatch.chdir(tmp_path / "shared")
    assert RunFolder.find("one").path == own.path
    assert RunFolder.find("./one").path == tmp_path / "shared" / "one"
    with pytest.raises(UnknownName):
        RunFolder.find("other")


@pytest.mark.parametrize("part", ["", "settings.json"])
@pytest.mark.parametrize("change", ["mode", "owner"])
def test_a_folder_that_others_could_have_written_is_refused(
    runs: Path, monkeypatch: pytest.MonkeyPatch, part: str, change: str
) -> None:
    folder = RunFolder.create("one", {"script": "x.py"})
    if change == "mode":
        (folder.path / part).chmod(0o777)
    else:
        monkeypatch.setattr(os, "getuid", lambda: folder.path.stat().st_uid + 1)
    for name in ("one", str(folder.path)):
        with pytest.raises(AccessDenied, match="not this user's alone"):
            RunFolder.find(name)


def test_a_second_run_of_a_name_is_refused(runs: Path) -> None:
    RunFolder.create("a", {})
    with pytest.raises(UsageError, match="already"):
        RunFolder.create("a", {})


def test_a_folder_that_cannot_be_made_or_written_says_why(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.write_text("a file")
    monkeypatch.setenv("DEEPVM_RUNS", str(runs / "below"))
    with pytest.raises(UsageError, match="cannot be created"):
        RunFolder.create("a", {})
    with pytest.raises(UsageError, match="cannot be written"):
        RunFolder(runs / "a").keep({})


@pytest.mark.parametrize("text", ["[]", "{}", '{"format": "of another deepvm"}'])
def test_settings_of_another_format_are_refused(runs: Path, text: str) -> None:
    folder = RunFolder.create("a", {})
    (folder.path / "settings.json").write_text(text)
    with pytest.raises(MalformedFile, match="format"):
        folder.settings()


SETTINGS = {"script": "x.py", "args": ["--epochs", "3"], "rank": 1, "origins": {"policy": "plan"}}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"settings": None}, "settings is None, not an object"),
        ({"settings": 1e308}, "settings is 1e.308, not an object"),
        ({"on": 5}, "on is 5, not printable text"),
        *(
            ({"settings": {**SETTINGS, name: value}}, f"^[^ ]*settings.json: not the settings of a run: .*{name}.* is ")
            for name in (*(row.name for row in fields(RunSpec) if row.name in RunSpec(script="x").to_settings()),)
            for value in ({}, [{}], 5e-324, "\0")
            if not (name == "replan_threshold" and value == 5e-324) and not (name == "origins" and value == {})
        ),
    ],
)
def test_settings_of_a_wrong_kind_are_one_sentence(runs: Path, change: dict[str, object], problem: str) -> None:
    folder = RunFolder.create("one", {"on": "local", "plan": {}, "settings": SETTINGS})
    assert folder.checked_settings()["on"] == "local"
    folder.keep({"on": "local", "plan": {}, "settings": SETTINGS, **change})
    with pytest.raises(MalformedFile, match=problem):
        resume("one")


@pytest.mark.parametrize("name", ["on", "plan", "settings"])
def test_settings_without_a_part_are_one_sentence(runs: Path, name: str) -> None:
    whole = {"on": "local", "plan": {}, "settings": SETTINGS}
    RunFolder.create("one", {key: value for key, value in whole.items() if key != name})
    with pytest.raises(MalformedFile, match=f"'{name}' is missing"):
        resume("one")
    RunFolder.create("two", {**whole, "settings": {}})
    with pytest.raises(MalformedFile, match="'script' is missing"):
        resume("two")
