"""What a script prints is shown while it runs: a bounded number of lines, and how many were left out."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from deepvm.cli.run.display import MOST_LINES, Output


def test_lines_beyond_the_most_are_counted(tmp_path: Path) -> None:
    log, shown = tmp_path / "log", io.StringIO()
    log.touch()
    output = Output(Console(file=shown, width=200), log).start()
    log.write_text("".join(f"line {number}\n" for number in range(MOST_LINES + 7)))
    assert output.has_shown(f"line {MOST_LINES - 1}")
    assert not output.has_shown(f"line {MOST_LINES}")
    output.close()
    assert f"7 lines are not shown; all are in {log}" in shown.getvalue()
