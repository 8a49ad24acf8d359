"""One line of the comparison: what was published, what came out here, and the difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

COLUMNS = ("part", "kind", "subject", "quantity", "unit", "published", "ours", "difference", "relative", "note")


Kind = Literal["reproduced", "predicted", "refitted", "claimed", "improved"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Numbers are compared by difference, words by being the same.

    What was ``reproduced`` has to be the same. ``predicted`` holds a measurement against a model of ours or the
    paper's, ``refitted`` a parameter against our fit, ``claimed`` the paper's words against its method and data, and
    ``improved`` the published method against ours."""

    part: str  # of the paper: Table IV, Figure 3 ...
    kind: Kind
    subject: str
    quantity: str
    published: float | str
    ours: float | str
    unit: str = ""
    decimals: int = 4
    note: str = ""

    @property
    def difference(self) -> float | None:
        if isinstance(self.published, str) or isinstance(self.ours, str):
            return None
        return self.ours - self.published

    @property
    def relative(self) -> float | None:
        """The difference as a share of what was published."""
        if self.difference is None or isinstance(self.published, str) or self.published == 0:
            return None
        return self.difference / self.published

    @property
    def agrees(self) -> bool:
        """Whether it is the same as far as it was printed."""
        if self.difference is None:
            return self.published == self.ours
        return abs(self.difference) <= 0.5 * 0.1**self.decimals * (1 + 1e-6)

    def cells(self) -> tuple[str, str, str]:
        """Published, ours and difference, as people read them."""
        return self._text(self.published), self._text(self.ours), self._difference_text()

    def to_json(self) -> dict[str, Any]:
        return {
            "part": self.part,
            "kind": self.kind,
            "subject": self.subject,
            "quantity": self.quantity,
            "unit": self.unit,
            "published": self.published,
            "ours": self.ours,
            "difference": self.difference,
            "relative": self.relative,
            "note": self.note,
        }

    def _text(self, value: float | str) -> str:
        return value if isinstance(value, str) else f"{value:,.{self.decimals}f}"

    def _difference_text(self) -> str:
        if self.difference is None:
            return "same" if self.agrees else "differs"
        if self.agrees:
            return "0"
        percent = "" if self.relative is None else f" ({self.relative:+.1%})"
        return f"{self.difference:+,.{self.decimals}f}{percent}"


def to_markdown(title: str, comparisons: Sequence[Comparison]) -> str:
    lines = [f"# {title}", ""]
    for part in dict.fromkeys(c.part for c in comparisons):
        lines += [f"## {part}", "", "| what | published | ours | difference | note |", "|---|--:|--:|--:|---|"]
        for c in comparisons:
            if c.part == part:
                what = f"{c.subject}: {c.quantity}" + (f" ({c.unit})" if c.unit else "")
                lines.append(f"| {what} | {' | '.join(c.cells())} | {c.note} |")
        lines.append("")
    return "\n".join(lines)
