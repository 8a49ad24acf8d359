"""The distribution of a plan's cost and time as a figure: an expectation in, a file out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deepvm.drawing import canvas
from deepvm.plan.result import Expected
from deepvm.units import format_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_risk(expected: Expected, path: Path, *, title: str, deadline_h: float | None) -> None:
    """Draw both histograms, with mean, p5 and p95, and with the deadline."""
    document, summary = expected.risk.distribution(), expected.to_json()
    with canvas.figure([path], width_in=9.0, height_in=3.8) as drawn:
        starts = len(expected.risk.outcomes.hours)
        canvas.headline(drawn, title, f"replayed from {format_count(starts, 'start')}; {expected.risk.history}")
        left, right = drawn.subplots(1, 2)
        _histogram(left, document["cost_usd"], summary["cost_usd"], "cost, USD")
        _histogram(right, document["hours"], summary["hours"], "time, hours")
        if deadline_h is not None:
            right.axvline(deadline_h, color=canvas.VERMILION, linewidth=1.5)
            right.set_title(f"deadline {deadline_h:g} h, {expected.missed:.1%} late", color=canvas.VERMILION)


def _histogram(axes: Axes, found: dict[str, Any], figures: dict[str, float], label: str) -> None:
    edges, shares = np.array(found["edges"]), np.array(found["share"])
    if edges[-1] > edges[0]:
        axes.bar(edges[:-1], shares, width=np.diff(edges), align="edge", color=canvas.BLUE, alpha=0.85)
    else:
        axes.bar([edges[0]], [1.0], width=0.5, color=canvas.BLUE, alpha=0.85)
    axes.axvspan(figures["p5"], figures["p95"], color=canvas.SKY, alpha=0.2, linewidth=0)
    axes.axvline(figures["mean"], color=canvas.INK, linewidth=1.2)
    axes.set_xlabel(f"{label}: mean {figures['mean']:,.1f}, p5 to p95 {figures['p5']:,.1f} to {figures['p95']:,.1f}")
    axes.set_ylabel("share of the starts")
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
