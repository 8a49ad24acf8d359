"""One line of the comparison: a published and a computed figure in; difference, text and JSON out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from deepvm.json_fields import json_fields

Kind = Literal["reproduced", "predicted", "refitted", "claimed", "improved"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Numbers compare by difference, texts by equality.

    ``reproduced`` figures must be equal. ``predicted`` compares a measurement with a model, ``refitted`` a parameter
    with our fit, ``claimed`` the paper's text with its method and data, ``improved`` the published method with ours."""

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
        """The difference as a fraction of the published figure."""
        if self.difference is None or isinstance(self.published, str) or self.published == 0:
            return None
        return self.difference / self.published

    @property
    def agrees(self) -> bool:
        """True if both are equal in the printed digits."""
        if self.difference is None:
            return self.published == self.ours
        return abs(self.difference) <= 0.5 * 0.1**self.decimals * (1 + 1e-6)

    def cells(self) -> tuple[str, str, str]:
        """Format published, ours and difference for people."""
        return self._text(self.published), self._text(self.ours), self._difference_text()

    def to_json(self) -> dict[str, Any]:
        return json_fields(self, "part kind subject quantity unit published ours difference relative note")

    @property
    def what(self) -> str:
        return f"{self.subject}: {self.quantity}" + (f" ({self.unit})" if self.unit else "")

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
                lines.append(f"| {c.what} | {' | '.join(c.cells())} | {c.note} |")
        lines.append("")
    return "\n".join(lines)
