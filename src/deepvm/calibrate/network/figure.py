"""Draw a network calibration: points, fitted lines, and the paper's transmission curve beside them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from deepvm.calibrate.network.measure import NetworkCalibration
from deepvm.drawing.canvas import BLUE, GREEN, INK, ORANGE, PURPLE, QUIET, SKY, VERMILION, figure, headline
from deepvm.performance.network.transmission import PAPER_TRANSMISSION_S, fit_transmission_curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, INK)


def draw_network(found: NetworkCalibration, paths: Sequence[Path]) -> None:
    """Draw seconds by memory nodes for each link rate, a line for each number of workers, and the shape of the most
    loaded line beside the paper's."""
    links = sorted({p.link_gbps for p in found.points}, key=lambda link: math.inf if link is None else link)
    workers = sorted({p.workers for p in found.points})
    colours = {count: _COLOURS[i % len(_COLOURS)] for i, count in enumerate(workers)}
    size = max((p.checkpoint_bytes for p in found.points), default=0)
    with figure(paths, width_in=max(9.4, 3.1 * (len(links) + 1) + 0.8), height_in=4.4) as drawn:
        panels = np.atleast_1d(drawn.subplots(1, len(links) + 1))
        error = "" if found.fit is None else f" Lines: fitted model, mean error {found.fit.mean_relative_error:.0%}."
        headline(
            drawn,
            "Time until all checkpoints are remote",
            f"Points: medians of checkpoints of {size / 1e6:.0f} MB; bars from the 5th to the 95th percentile.{error}",
        )
        for axes, link in zip(panels, links, strict=False):
            axes.set_title("loopback" if link is None else f"{link:g} Gbit/s")
            for count in workers:
                line = sorted(
                    (p for p in found.points if p.link_gbps == link and p.workers == count),
                    key=lambda p: p.memory_nodes,
                )
                if not line:
                    continue
                nodes = [p.memory_nodes for p in line]
                medians = np.array([p.remote_s.median_s for p in line])
                spread = [
                    medians - [p.remote_s.quantile_s(0.05) for p in line],
                    np.array([p.remote_s.quantile_s(0.95) for p in line]) - medians,
                ]
                axes.errorbar(
                    nodes, medians, yerr=spread, fmt="o", markersize=5, linewidth=1.2, color=colours[count],
                    label=f"{count} worker{'s' * (count > 1)}",
                )  # fmt: skip
                if found.fit is not None:
                    axes.plot(
                        nodes, [found.fit.model.predicted_s(p) for p in line], color=colours[count], linewidth=1.6
                    )
            axes.set_ylim(bottom=0)
            axes.set_xticks(sorted({p.memory_nodes for p in found.points}))
            axes.set_xlabel("memory nodes")
        panels[0].set_ylabel("seconds")
        panels[0].legend(loc="upper right", fontsize=8.5)
        _draw_shape(panels[-1], found)


def _draw_shape(drawn: Axes, found: NetworkCalibration) -> None:
    """Draw times over the time of one memory node: ours at the slowest link and most workers, and the paper's."""
    paper = np.array(PAPER_TRANSMISSION_S)
    nodes = np.arange(1, len(paper) + 1)
    fitted = fit_transmission_curve(list(nodes), list(paper))
    drawn.set_title("Shape")
    drawn.plot(nodes, paper / paper[0], "s", color=QUIET, markersize=5, label="the paper's")
    drawn.plot(nodes, fitted.curve.seconds(nodes) / paper[0], color=QUIET, linewidth=1.3,
               label=f"its fit ({fitted.worst_relative_error:.0%} at worst)")  # fmt: skip
    link = min((p.link_gbps for p in found.points if p.link_gbps is not None), default=None)
    most = max((p.workers for p in found.points), default=1)
    line = sorted((p for p in found.points if p.link_gbps == link and p.workers == most), key=lambda p: p.memory_nodes)
    if len(line) > 1:
        counts = [p.memory_nodes for p in line]
        times = np.array([p.remote_s.median_s for p in line])
        own = fit_transmission_curve(counts, list(times))
        speed = "loopback" if link is None else f"{link:g} Gbit/s"
        drawn.plot(
            counts, times / times[0], "o", color=BLUE, markersize=5, label=f"{most} worker{'s' * (most > 1)}, {speed}"
        )
        drawn.plot(counts, own.curve.seconds(counts) / times[0], color=BLUE, linewidth=1.6,
                   label=f"its fit ({own.worst_relative_error:.0%} at worst)")  # fmt: skip
    drawn.set_ylim(bottom=0)
    drawn.set_xticks(nodes)
    drawn.set_xlabel("memory nodes")
    drawn.set_ylabel("over the time of one node")
    drawn.legend(loc="upper right", fontsize=8)
