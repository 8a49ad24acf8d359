"""A terminal that is the same everywhere, and screens that are compared with the files in ``screens/``."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path

import pytest

from deepvm.cli import catalog as catalog_command
from deepvm.cli import plan as plan_command
from tests.support.golden import rounded, same_as_file

SCREENS = Path(__file__).with_name("screens")
DAY = date(2026, 8, 22)

Screen = Callable[..., None]


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[None]:
    """Paths are relative, so that no line is longer on one machine than on another."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in (("DEEPVM_HOME", "home"), ("COLUMNS", "120"), ("NO_COLOR", "1"), ("TZ", "UTC")):
            patched.setenv(name, value)
        for command in (catalog_command, plan_command):
            patched.setattr(command, "_today", lambda: DAY)
        patched.chdir(tmp_path)
        time.tzset()
        yield
    time.tzset()


@pytest.fixture
def screen(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Screen:
    """Compare what was printed since the last call with a file."""

    def compare(name: str) -> None:
        shown = capsys.readouterr().out.replace(str(tmp_path), "FOLDER")
        shown = re.sub(r"[\d.]+ m?s, [\d.]+ [kMG]?B/s", "T s, R B/s", shown)
        same_as_file(rounded(shown), SCREENS / f"{name}.txt")

    return compare
