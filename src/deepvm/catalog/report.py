"""An account of what an import made of a file's rows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Tally:
    """How many rows share a reason, and the line of the first."""

    reason: str
    rows: int
    first_line: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportReport:
    """What became of a file's rows. A kept row may carry several flags; a row left out has one reason."""

    rows: int
    kept: int
    types: int
    offers: int
    completed_types: int  # that got bandwidth and interruption figures from the built-in catalogue
    flagged: tuple[Tally, ...]
    left_out: tuple[Tally, ...]

    def __post_init__(self) -> None:
        if self.kept + sum(t.rows for t in self.left_out) != self.rows:
            raise ValueError(f"a report of {self.rows} rows does not account for every one: {self}")


class Reasons:
    """Counts by reason, in the order in which they were first met."""

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}

    def add(self, reason: str, line: int) -> None:
        entry = self._counts.get(reason)
        if entry is None:
            self._counts[reason] = [1, line]
        else:
            entry[0] += 1

    def tallies(self) -> tuple[Tally, ...]:
        most_first = sorted(self._counts.items(), key=lambda item: -item[1][0])
        return tuple(Tally(reason=r, rows=rows, first_line=line) for r, (rows, line) in most_first)
