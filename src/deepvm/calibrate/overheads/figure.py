"""Draw overheads by the size of the state: medians, spread, and the line that the planner interpolates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from deepvm.calibrate.overheads.measure import OverheadCalibration
from deepvm.drawing.canvas import BLUE, GREEN, INK, ORANGE, PURPLE, QUIET, SKY, VERMILION, figure, headline
from deepvm.performance.overheads import overhead

_SAVES = ("save_stall", "save_remote", "save_durable")
_COLOURS = {
    "save_stall": SKY, "save_remote": BLUE, "save_durable": PURPLE, "detection": QUIET, "regroup": ORANGE,
    "start": GREEN, "restore": BLUE, "first_step": VERMILION,
}  # fmt: skip


def draw_overheads(found: OverheadCalibration, paths: Sequence[Path]) -> None:
    sizes = sorted({point.state_bytes for point in found.points})
    names = list(dict.fromkeys(point.name for point in found.points))
    with figure(paths, width_in=9.6, height_in=4.4) as drawn:
        panels = drawn.subplots(1, 2)
        headline(
            drawn,
            "What saves and recoveries cost, by size of the state",
            "Medians with bars from the 5th to the 95th percentile; lines are what the planner reads between them.",
        )
        grid = np.geomspace(sizes[0], sizes[-1], 60) if len(sizes) > 1 else np.array(sizes, dtype=float)
        for axes, title, shown in (
            (panels[0], "Saves", [name for name in names if name in _SAVES]),
            (panels[1], "Recovery from a lost worker", [name for name in names if name not in _SAVES]),
        ):
            axes.set_title(title)
            for name in shown:
                line = sorted((p for p in found.points if p.name == name), key=lambda p: p.state_bytes)
                x = np.array([p.state_bytes for p in line]) / 1e6
                medians = np.array([p.seconds.median_s for p in line])
                spread = [
                    medians - [p.seconds.quantile_s(0.05) for p in line],
                    np.array([p.seconds.quantile_s(0.95) for p in line]) - medians,
                ]
                colour = _COLOURS.get(name, INK)
                axes.errorbar(x, medians, yerr=spread, fmt="o", markersize=5, color=colour, linewidth=1.2,
                              label=name.replace("_", " "))  # fmt: skip
                axes.plot(grid / 1e6, [overhead([found.profile], name, size).seconds for size in grid],
                          color=colour, linewidth=1.4)  # fmt: skip
            if len(sizes) > 1:
                axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_xticks([size / 1e6 for size in sizes], [f"{size / 1e6:g}" for size in sizes])
            axes.minorticks_off()
            axes.set_xlabel("state (MB)")
            axes.legend(loc="upper left", fontsize=8.5)
        panels[0].set_ylabel("seconds")
