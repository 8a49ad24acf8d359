"""The figures: points, rows and curves in, image files by ``drawing`` out. For ``reproduce`` and ``sweep``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from deepvm.drawing.canvas import (
    BLUE,
    GREEN,
    GRID,
    INK,
    ORANGE,
    PURPLE,
    QUIET,
    SKY,
    VERMILION,
    figure,
    headline,
    label_ends,
)
from deepvm.plan import Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from deepvm.paper.clusters import Row
    from deepvm.paper.scaling import Scaling
    from deepvm.paper.sweeps import Optimum
    from deepvm.paper.transmission import TransmissionTimes

_NAMES = {
    "deepvm": "DeepVM",
    "noscale": "NoScale",
    "cost-first": "Cost-First",
    "performance-first": "Performance-First",
}
_COLOURS = {"deepvm": BLUE, "noscale": ORANGE, "cost-first": GREEN, "performance-first": VERMILION}
_DASHES = {"noscale": (0, (5, 1.6)), "cost-first": (0, (1.2, 1.2))}
_FEW_POINTS = 25  # below this, every budget gets a dot


def draw_sweep(points: Sequence[Point], path: Path, *, title: str) -> None:
    """Draw performance over budget by policy, relative to DeepVM's highest, in the format of the path's suffix."""
    draw_policies(points, [path], title=title, subtitle="")


def draw_policies(points: Sequence[Point], paths: Sequence[Path], *, title: str, subtitle: str) -> None:
    by_policy: dict[str, list[Point]] = {}
    for point in points:
        by_policy.setdefault(point.policy, []).append(point)
    best = max((p.performance or 0.0 for p in by_policy.get("deepvm", points)), default=0.0)
    highest = best or max((p.performance or 0.0 for p in points), default=0.0)
    of = "DeepVM's highest" if best and "deepvm" in by_policy else "the highest"
    with figure(paths, width_in=8.4, height_in=4.6) as drawn:
        axes = drawn.subplots()
        headline(drawn, title, subtitle)
        axes.set_xlabel("budget ($/h)")
        axes.set_ylabel(f"performance (relative to {of})")
        if not highest:
            axes.text(0.5, 0.5, "nothing is feasible at these budgets", ha="center", transform=axes.transAxes)
            axes.set_axis_off()
            return
        ends = []
        for policy, line in by_policy.items():
            x = [p.budget_usd for p in line]
            y = [np.nan if p.performance is None else p.performance / highest for p in line]
            colour = _COLOURS.get(policy, PURPLE)
            axes.plot(
                x, y, drawstyle="steps-post", color=colour, linestyle=_DASHES.get(policy, "-"),
                linewidth=2.6 if policy == "deepvm" else 1.9, zorder=3 if policy == "deepvm" else 4,
                solid_joinstyle="miter", marker="o" if len(x) < _FEW_POINTS else None, markersize=4,
            )  # fmt: skip
            known = [(a, b) for a, b in zip(x, y, strict=True) if not np.isnan(b)]
            if known:
                ends.append((*known[-1], _NAMES.get(policy, policy), colour))
        axes.set_ylim(bottom=0)
        first, last = min(p.budget_usd for p in points), max(p.budget_usd for p in points)
        if first < last:
            axes.set_xlim(first, last)
        label_ends(axes, ends)


def draw_optima(optima: Sequence[Optimum], paths: Sequence[Path]) -> None:
    """Draw the fraction of the optimum that each objective reaches."""
    x = np.array([o.budget_usd for o in optima])
    flopp = np.array([1 / o.flopp_ratio for o in optima])
    ours = np.array([1 / o.throughput_ratio for o in optima])
    behind = int((flopp < 1 - 1e-9).sum())
    with figure(paths, width_in=8.4, height_in=4.2) as drawn:
        axes = drawn.subplots()
        headline(
            drawn,
            "The published objective counts the price twice",
            f"Share of the best performance that each objective reaches; it falls short at {behind} of {len(x)}.",
        )
        axes.fill_between(x, flopp, 1, step="post", color=VERMILION, alpha=0.13, linewidth=0)
        axes.plot(x, flopp, drawstyle="steps-post", color=VERMILION, linewidth=1.9)
        axes.plot(x, ours, drawstyle="steps-post", color=BLUE, linewidth=2.6)
        axes.set_xlabel("budget ($/h)")
        axes.set_ylabel("performance (share of the optimum)")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.set_ylim(0, 1.06)
        axes.set_xlim(0, x.max())
        worst = int(flopp.argmin())
        axes.annotate(
            f"${x[worst]:.1f}/h: the optimum is {1 / flopp[worst]:.2f} times as fast",
            xy=(x[worst], flopp[worst]), xytext=(x[worst] + 0.6, flopp[worst] - 0.14), color=INK, va="center",
            arrowprops={"arrowstyle": "-", "color": QUIET, "linewidth": 0.8, "relpos": (0, 0.5)},
        )  # fmt: skip
        label_ends(
            axes,
            [(x[-1], ours[-1], "throughput\n(ours)", BLUE), (x[-1], flopp[-1], "flopp\n(published)", VERMILION)],
            gap=0.14,
        )


def draw_clusters(rows: Sequence[Row], paths: Sequence[Path]) -> None:
    """Draw Figure 4: makespan, total cost and hourly price, measured and predicted."""
    names = [f"{row.published.name}\n{row.our_text}" for row in rows]
    y = np.arange(len(rows))[::-1]
    with figure(paths, width_in=10.4, height_in=4.8) as drawn:
        panels = drawn.subplots(1, 3, sharey=True)
        headline(
            drawn,
            "Measured, and predicted from scaling measurements",
            "30 epochs of ResNet-50 at $3/h; predictions start from the measured makespan of DeepVM 1st.",
        )
        measured = (
            [r.published.makespan_s for r in rows],
            [r.published.total_usd for r in rows],
            [r.published.hourly_usd for r in rows],
        )
        by_points = ([r.by_points_s for r in rows], [r.by_points_usd for r in rows], [r.hourly_usd for r in rows])
        by_paper = ([r.by_paper_s for r in rows], [r.by_paper_usd for r in rows], None)
        titles = (("Makespan (s)", "{:.0f}"), ("Total cost ($)", "{:.3f}"), ("Hourly price ($/h)", "{:.4f}"))
        for i, (axes, (title, form)) in enumerate(zip(panels, titles, strict=True)):
            axes.set_title(title)
            axes.grid(visible=False, axis="y")
            axes.barh(y, measured[i], height=0.62, color="#d5dbe1", label="measured" if i < 2 else "paid")
            axes.scatter(
                by_points[i], y, s=62, color=BLUE, zorder=4, label="by measured points" if i < 2 else "planned"
            )
            if by_paper[i] is not None:
                axes.scatter(
                    by_paper[i], y, s=58, marker="D", facecolor="white", edgecolor=VERMILION, linewidth=1.8, zorder=3,
                    label="by the paper's model",
                )  # fmt: skip
            for value, at in zip(measured[i], y, strict=True):
                axes.text(0.0, at, "  " + form.format(value), va="center", ha="left", color=INK, fontsize=9)
            axes.set_xlim(0, max(*measured[i], *by_points[i]) * 1.08)
            axes.spines["left"].set_visible(False)
            axes.tick_params(axis="y", length=0, labelcolor=INK)
            if i != 1:  # the first legend is the second panel's too
                handles, labels = axes.get_legend_handles_labels()
                axes.legend(
                    handles[-1:] + handles[:-1], labels[-1:] + labels[:-1], loc="upper left",
                    bbox_to_anchor=(-0.02, -0.08), fontsize=9, handletextpad=0.5, borderpad=0,
                )  # fmt: skip
        panels[0].set_yticks(y, names)


def draw_scalings(scalings: Sequence[Scaling], paths: Sequence[Path]) -> None:
    """Draw times over machines: measured, by fitted curves, and by the paper's model."""
    styles = {
        "measured": ("measured points (PCHIP)", INK, (0, (1, 1.5)), 1.3),
        "logistic": ("logistic S(n)", ORANGE, "-", 1.9),
        "all-reduce": ("all-reduce", BLUE, "-", 1.9),
        "universal-scalability": ("universal scalability", PURPLE, (0, (5, 1.6)), 1.9),
    }
    with figure(paths, width_in=11.2, height_in=4.7) as drawn:
        panels = drawn.subplots(1, len(scalings))
        headline(
            drawn,
            "Figure 5: curves fitted to measured times",
            "An epoch of ResNet-18 by number of machines, logarithmic; in brackets the speedup's mean and worst error.",
        )
        for axes, scaling in zip(panels, scalings, strict=True):
            counts = np.arange(1.0, max(scaling.nodes) + 1)  # curves are defined at whole numbers
            axes.plot(
                counts, scaling.claimed_s(counts), color=VERMILION, linewidth=1.3, linestyle=(0, (2, 1.6)),
                label=f"n × ScalingFactor, the paper's ({scaling.mean_claim_error:.0%}, {scaling.claim_error:.0%})",
            )  # fmt: skip
            for model, (name, colour, dashes, width) in styles.items():
                error = scaling.fits[model].worst_relative_error
                axes.plot(
                    counts, scaling.predicted_s(model, counts), color=colour, linestyle=dashes, linewidth=width,
                    label=name if model == "measured" else f"{name} ({scaling.mean_error(model):.0%}, {error:.0%})",
                )  # fmt: skip
            axes.scatter(scaling.nodes, scaling.seconds, s=34, color=INK, zorder=5)
            _log_axes(axes, scaling)
            axes.set_title(scaling.instance)
            axes.set_xlabel("machines")
            axes.legend(loc="upper left", bbox_to_anchor=(-0.02, -0.2), fontsize=8.5, borderpad=0, handlelength=2.4)
        panels[0].set_ylabel("seconds an epoch")


def _log_axes(axes: Axes, scaling: Scaling) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
    steps = [s for s in (1, 2, 5, 10, 20, 50, 100, 200, 400) if s <= max(scaling.seconds) * 1.7]
    axes.set_yticks(steps, [str(s) for s in steps])
    axes.minorticks_off()
    axes.set_ylim(min(scaling.seconds) * 0.55, max(scaling.seconds) * 1.5)


def draw_transmission(times: TransmissionTimes, paths: Sequence[Path]) -> None:
    """Draw Figure 6: published times, our curve, and what sharing alone would give."""
    nodes, seconds, curve = np.array(times.nodes), times.seconds, times.fit.curve
    fine = np.linspace(1.0, float(nodes[-1]), 200)
    flat_from = curve.flat_from()
    with figure(paths, width_in=7.8, height_in=4.4) as drawn:
        axes = drawn.subplots()
        headline(
            drawn,
            f"Figure 6: a second memory node makes a checkpoint {seconds[0] / seconds[1]:.1f} times as fast",
            "Seconds to send one checkpoint, by number of memory nodes; in brackets mean and worst error.",
        )
        axes.grid(visible=False, axis="x")
        axes.bar(nodes, seconds, width=0.62, color=SKY, label="published")
        for n, s in zip(nodes, seconds, strict=True):
            axes.text(float(n), s + 0.35, f"{s:.2f}", ha="center", va="bottom", fontsize=9.5)
        axes.plot(
            fine, curve.seconds(fine), color=BLUE, linewidth=2.0,
            label=f"ours: latency + one node × m^-{1 + curve.penalty:.2f} "
                  f"({times.fit.mean_relative_error:.1%}, {times.fit.worst_relative_error:.1%})",
        )  # fmt: skip
        axes.plot(nodes, times.fitted_s, "o", color=BLUE, markersize=4)
        axes.plot(
            nodes, times.shared_s, color=VERMILION, linewidth=1.5, linestyle=(0, (5, 1.6)),
            label=f"1/m of one node's time ({times.shared_error:.0%}, "
                  f"{float(np.abs(times.shared_s / np.array(seconds) - 1).max()):.0%})",
        )  # fmt: skip
        axes.axvline(flat_from, ymin=0.12, ymax=0.62, color=QUIET, linewidth=0.9, linestyle=(0, (2, 2)))
        axes.text(
            flat_from + 0.08, seconds[0] * 0.62, f"flat from {flat_from} nodes on:\nanother saves less than 10 %",
            color=QUIET, fontsize=9, va="top",
        )  # fmt: skip
        axes.set_xticks(nodes)
        axes.set_xlabel("memory nodes")
        axes.set_ylabel("seconds")
        axes.set_ylim(0, seconds[0] * 1.1)
        axes.legend(loc="upper right", fontsize=9)


def draw_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], paths: Sequence[Path]) -> None:
    """Draw a table: numbers right-aligned, all else left-aligned."""
    widths = [max(len(str(row[i])) for row in (header, *rows)) + 2.5 for i in range(len(header))]
    edges = np.concatenate(([0.0], np.cumsum(widths)))
    numbers = [
        all(row[i].lstrip("+-").replace(".", "").replace("%", "").isdigit() for row in rows) for i in range(len(header))
    ]
    with figure(paths, width_in=float(edges[-1]) * 0.079 + 0.3, height_in=0.34 * (len(rows) + 1) + 0.8) as drawn:
        axes = drawn.subplots()
        headline(drawn, title, "")
        axes.set_axis_off()
        axes.set_xlim(0, float(edges[-1]))
        axes.set_ylim(len(rows) + 0.6, -0.6)
        for r, row in enumerate((header, *rows)):
            for i, text in enumerate(row):
                x = edges[i + 1] - 2.5 if numbers[i] else edges[i]
                axes.text(
                    x, r, text, ha="right" if numbers[i] else "left", va="center", fontsize=9.5,
                    fontweight="bold" if r == 0 else "normal", color=QUIET if r == 0 else INK,
                )  # fmt: skip
            axes.axhline(r + 0.5, color="#9a9a9a" if r == 0 else GRID, linewidth=0.9)
