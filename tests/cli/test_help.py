"""What ``--help`` shows is what the source says, and ``dir(deepvm)`` lists what users may call."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

import deepvm
from deepvm.catalog import files, library
from deepvm.cli.app import COMMANDS, make_app, run


def commands(command: Any = None, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with the words that call it, groups included."""
    command = typer.main.get_command(make_app(list(COMMANDS))) if command is None else command
    yield words, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*words, name))


def bare(text: str) -> str:
    """Without the frame, the colours and the line breaks of a terminal."""
    return re.sub(r"\x1b\[[0-9;]*m|[\s│╭╮╰╯─]+", "", text)


@pytest.mark.parametrize("words", [words for words, _ in commands()], ids=" ".join)
def test_every_help_text_is_shown_as_written(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "300")  # a cell that wraps would be mixed with the one beside it
    command = dict(commands())[words]
    assert run([*words, "--help"]) == 0
    shown = bare(capsys.readouterr().out)
    written = [command.help, *(p.help for p in command.params), *(c.short_help for c in _below(command))]
    missing = [text for text in written if text and bare(text.partition("\f")[0]) not in shown]
    assert missing == []


def _below(command: Any) -> list[Any]:
    return list(getattr(command, "commands", {}).values())


def test_help_texts_with_brackets_are_among_those_compared() -> None:
    texts = [p.help for _, command in commands() for p in command.params if p.help]
    assert sum("[" in text for text in texts) >= 8


def test_brackets_in_the_names_of_machines_and_files_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = files.dumps(library.load("paper-aws-2023")).replace("g4dn.xlarge", "g4[dn].xlarge")
    catalog = tmp_path / "[mine].json"
    catalog.write_text(text)
    out = tmp_path / "[plan].json"
    assert run(["plan", "--budget", "3", "--catalog", str(catalog), "--pareto", "--explain", "-o", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "g4[dn].xlarge" in shown
    assert "g4.xlarge" not in shown
    assert "[plan].json" in shown
    assert run(["sweep", "--from", "3", "--to", "3", "--catalog", str(catalog), "-o", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "g4[dn].xlarge" in shown.replace("\n", "")
    assert "[plan].json" in shown


def test_dir_lists_every_public_name_and_loads_none_of_them() -> None:
    assert set(deepvm.__all__) <= set(dir(deepvm))
    code = (
        "import sys, deepvm; names = dir(deepvm); assert 'Checkpointer' in names and 'make_plan' in names, names;"
        "assert not {'torch', 'numpy'} & set(sys.modules); print([n for n in names if not n.startswith('_')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for private in ("importlib", "annotations", "TYPE_CHECKING"):
        assert f"'{private}'" not in done.stdout


def test_the_overview_shows_each_command_s_own_help() -> None:
    real = typer.main.get_command(make_app(list(COMMANDS))).commands  # type: ignore[attr-defined]
    assert {name: summary for name, (_, summary) in COMMANDS.items()} == {n: c.help for n, c in real.items()}


def test_help_loads_no_command() -> None:
    code = "import sys; from deepvm.cli.app import run; run(['--help']); print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    loaded = set(shown.splitlines()[-1].split())
    assert not loaded & {"numpy", "deepvm.cli.plan", "deepvm.catalog"}


def test_a_shell_completes_the_options_of_a_command() -> None:
    words = {"_DEEPVM_COMPLETE": "complete_bash", "COMP_WORDS": "deepvm plan --budg", "COMP_CWORD": "2"}
    program = [str(Path(sys.executable).with_name("deepvm"))]
    done = subprocess.run(program, env={**os.environ, **words}, capture_output=True, text=True, timeout=60)
    assert "--budget" in done.stdout


@pytest.mark.parametrize("words", [[], ["catalog"], ["checkpoint"]])
def test_without_a_command_the_help_is_shown_and_no_empty_error(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words) == 2
    shown = capsys.readouterr()
    assert "Usage:" in shown.out
    assert shown.err == ""
