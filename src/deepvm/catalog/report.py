"""What an import did with a file's rows: reasons and line numbers in, counts out. Commands show it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deepvm.json_fields import json_fields

Progress = Callable[[str], None]  # receives a line for the user while an import or a download runs


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCount:
    """The number of rows that share a reason, and the line of the first."""

    reason: str
    rows: int
    first_line: int

    def to_json(self) -> dict[str, Any]:
        return json_fields(self, "reason rows first_line")


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportReport:
    """A file's rows, counted. A kept row may have several flags; a row left out has one reason."""

    rows: int
    kept: int
    types: int
    offers: int
    completed_types: int  # that got bandwidth and interruption figures from the built-in catalogue
    flagged: tuple[RowCount, ...]
    left_out: tuple[RowCount, ...]

    def __post_init__(self) -> None:
        if self.kept + sum(t.rows for t in self.left_out) != self.rows:
            raise ValueError(f"a report of {self.rows} rows does not account for every one: {self}")

    def to_json(self) -> dict[str, Any]:
        return json_fields(self, "rows kept types offers completed_types flagged left_out")


class Reasons:
    """Line numbers by reason, in the order of their first lines."""

    def __init__(self) -> None:
        self._lines: dict[str, list[int]] = {}

    def add(self, reason: str, line: int) -> None:
        self._lines.setdefault(reason, []).append(line)

    def counts(self) -> tuple[RowCount, ...]:
        most_first = sorted(self._lines.items(), key=lambda item: -len(item[1]))
        return tuple(RowCount(reason=r, rows=len(lines), first_line=lines[0]) for r, lines in most_first)
