"""Draw a backtest: for each strategy, the median and the range of cost and time over all starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from deepvm.drawing.canvas import BLUE, ORANGE, QUIET, VERMILION, figure, headline
from deepvm.simulate.backtesting.result import Backtests, Row
from deepvm.units import format_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_backtests(found: Backtests, paths: Sequence[Path]) -> None:
    """Draw cost and time side by side; bars from the 5th to the 95th percentile, the deadline as a line."""
    job, rows = found.job, found.joined()[::-1]  # the first at the top
    starts = sum(len(market.starts_h) for market in found.markets)
    on = found.markets[0].market if len(found.markets) == 1 else f"{len(found.markets)} markets"
    with figure(paths, width_in=9.6, height_in=1.9 + 0.34 * len(rows)) as drawn:
        cost, hours = drawn.subplots(1, 2, sharey=True)
        headline(
            drawn,
            f"{job.work_h:g} h of work on {on}",
            f"{format_count(starts, 'start')}. "
            "Points: medians; bars from the 5th to the 95th percentile. Late: missed deadlines.",
        )
        for at, row in enumerate(rows):
            colour = BLUE if row.name == "planned" else ORANGE if row.outcomes is None else QUIET
            _bar(cost, at, row.cost_usd, colour)
            if row.outcomes is not None:
                _bar(hours, at, row.outcomes.hours, colour)
                _label_missed(hours, at, row, job.deadline_h)
        if job.deadline_h is not None:
            hours.axvline(job.deadline_h, color=VERMILION, linewidth=1.2, linestyle="--")
        cost.set_yticks(range(len(rows)), [row.name for row in rows])
        cost.set_title("Cost in USD")
        hours.set_title("Hours until the end" if job.deadline_h is None else "Hours until the end; dashed: deadline")
        for axes in (cost, hours):
            axes.set_xlim(left=0)
            axes.grid(visible=False, axis="y")


def _bar(axes: Axes, at: int, values: np.typing.NDArray[np.float64], colour: str) -> None:
    low, middle, high = np.percentile(values, (5, 50, 95))
    axes.plot([low, high], [at, at], color=colour, linewidth=2.4, solid_capstyle="round")
    axes.plot([middle], [at], "o", color=colour, markersize=6)


def _label_missed(axes: Axes, at: int, row: Row, deadline_h: float | None) -> None:
    missed = 0.0 if row.outcomes is None else float(row.outcomes.missed(deadline_h).mean())
    if missed:
        axes.annotate(
            f"{missed:.0%} late", xy=(1.01, at), xycoords=("axes fraction", "data"), va="center", color=VERMILION,
            annotation_clip=False,
        )  # fmt: skip
