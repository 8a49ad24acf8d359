"""Reproduce the paper: a folder in, its tables, figures and comparison with the published ones out."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deepvm import catalog as catalogues
from deepvm.drawing import canvas
from deepvm.errors import UsageError
from deepvm.json_fields import json_fields
from deepvm.paper import clusters, figures, scaling, sweeps, transmission
from deepvm.paper.clusters import Row
from deepvm.paper.comparison import Comparison, to_markdown
from deepvm.paper.scaling import Scaling
from deepvm.paper.sweeps import Optimum
from deepvm.plan import Point

_PARTS = ("Table IV", "Figure 3", "Figure 4", "Scaling", "Transmission")
Progress = Callable[[str, int, int], None]  # what is made now, steps done, all steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Reproduction:
    """The written files and the comparisons."""

    out: Path
    files: tuple[Path, ...]
    comparisons: tuple[Comparison, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "out": str(self.out),
            "files": [path.name for path in self.files],
            "comparisons": [c.to_json() for c in self.comparisons],
        }


def reproduce(out: Path, progress: Progress | None = None) -> Reproduction:
    """Write the paper's tables and figures under ``out``."""
    canvas.require_matplotlib()  # before anything is computed
    folder = _Folder(out, progress)
    folder.report("planning")
    real = catalogues.load("paper-aws-2023")
    made = sweeps.make_sweeps(catalogues.load("paper-virtual"))
    rows, scalings, sent = clusters.make_rows(real), scaling.make_scalings(real), transmission.make_transmission()
    found = [
        *sweeps.compare(made),
        *clusters.compare(real, rows),
        *scaling.compare(scalings),
        *transmission.compare(sent),
    ]
    comparisons = tuple(sorted(found, key=lambda c: _PARTS.index(c.part)))

    _write_table_iv(folder, rows)
    for name, points, title, subtitle in (
        ("figure-3-published", made.flopp_as_evaluated, "Figure 3 as it was evaluated",
         "Choices of the published method; performance eFLOPS × n × ScalingFactor × n."),
        ("figure-3-text", made.flopp, "Figure 3 by the paper's text",
         "Choices of the published method; performance eFLOPS × n × ScalingFactor."),
        ("figure-3-throughput", made.throughput, "Figure 3 when performance itself is maximised",
         "Choices for the objective throughput; performance eFLOPS × n × ScalingFactor."),
    ):  # fmt: skip
        figures.draw_policies(points, folder.pictures(name), title=title, subtitle=subtitle)
        folder.table(name, _point_rows(points))
    figures.draw_optima(made.optima, folder.pictures("optimum"))
    folder.table("optimum", [_optimum_row(optimum) for optimum in made.optima])
    figures.draw_clusters(rows, folder.pictures("figure-4"))
    folder.table("figure-4", [_figure_4_row(row) for row in rows])
    figures.draw_scalings(scalings, folder.pictures("scaling"))
    folder.table("scaling", [r for s in scalings for r in _scaling_rows(s)])
    folder.table("scaling-fits", [r for s in scalings for r in _fit_rows(s)])
    figures.draw_transmission(sent, folder.pictures("transmission"))
    folder.table("transmission", sent.rows())
    folder.report("comparison")
    folder.table("comparison", [c.to_json() for c in comparisons])
    folder.text("comparison.md", to_markdown("Published, ours, difference", comparisons))
    return Reproduction(out=out, files=tuple(folder.files), comparisons=comparisons)


class _Folder:
    """Writes the files, lists them, and reports progress."""

    STEPS = 10

    def __init__(self, out: Path, progress: Progress | None) -> None:
        self.out, self.files = out, list[Path]()
        self._progress, self._done = progress, 0
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"{out} cannot be used as a folder ({error.strerror or error}): choose another --out"
            ) from None

    def report(self, what: str) -> None:
        if self._progress is not None:
            self._progress(what, self._done, self.STEPS)
        self._done += 1

    def pictures(self, name: str) -> list[Path]:
        self.report(name)
        paths = [self.out / f"{name}.svg", self.out / f"{name}.png"]
        self.files += paths
        return paths

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        content = io.StringIO()
        writer = csv.DictWriter(content, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        self.text(f"{name}.csv", content.getvalue())

    def text(self, name: str, content: str) -> None:
        path = self.out / name
        try:
            path.write_text(content, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{path} cannot be written ({error.strerror or error}): choose another --out") from None
        self.files.append(path)


def _write_table_iv(folder: _Folder, rows: Sequence[Row]) -> None:
    folder.table("table-iv", [_table_row(row) for row in rows])
    header = ("configuration", "cluster, published", "cluster, ours", "$/h, published", "$/h, ours",
              "cost $, published", "cost $, predicted", "difference")  # fmt: skip
    texts = [
        (
            row.published.name,
            row.published_text,
            row.our_text,
            f"{row.published.hourly_usd:.4f}",
            f"{row.hourly_usd:.4f}",
            f"{row.published.total_usd:.4f}",
            f"{row.by_points_usd:.4f}",
            f"{row.by_points_usd / row.published.total_usd - 1:+.1%}".replace("-0.0%", "0.0%").replace("+0.0%", "0.0%"),
        )
        for row in rows
    ]
    figures.draw_table("Table IV", header, texts, folder.pictures("table-iv"))


def _table_row(row: Row) -> dict[str, Any]:
    was = row.published
    return {
        "configuration": was.name,
        "cluster_published": row.published_text,
        "cluster_ours": row.our_text,
        "same_cluster": row.published_text == row.our_text,
        "hourly_usd_published": was.hourly_usd,
        "hourly_usd_ours": row.hourly_usd,
        "hourly_usd_difference": row.hourly_usd - was.hourly_usd,
        "total_usd_published": was.total_usd,
        "total_usd_predicted": row.by_points_usd,
        "total_usd_difference": row.by_points_usd - was.total_usd,
    }


def _figure_4_row(row: Row) -> dict[str, Any]:
    was = row.published
    return {
        "configuration": was.name,
        "cluster": row.our_text,
        "makespan_s_measured": was.makespan_s,
        "makespan_s_by_points": row.by_points_s,
        "makespan_s_by_paper": row.by_paper_s,
        "total_usd_measured": was.total_usd,
        "total_usd_by_points": row.by_points_usd,
        "total_usd_by_paper": row.by_paper_usd,
        "hourly_usd_measured": was.hourly_usd,
        "hourly_usd_planned": row.hourly_usd,
    }


def _point_rows(points: Sequence[Point]) -> list[dict[str, Any]]:
    highest = max(p.performance or 0.0 for p in points if p.policy == "deepvm")
    return [{**p.to_json(), "normalised": None if p.performance is None else p.performance / highest} for p in points]


def _optimum_row(optimum: Optimum) -> dict[str, Any]:
    objectives = "flopp_performance flopp_ratio throughput_performance throughput_ratio"
    return {"budget": optimum.budget_usd, **json_fields(optimum, f"instance count performance {objectives}")}


def _scaling_rows(s: Scaling) -> list[dict[str, Any]]:
    nodes = np.array(s.nodes, dtype=np.float64)
    predicted = {f"{model}_s": s.predicted_s(model, nodes) for model in scaling.MODELS if model != "measured"}
    predicted["claimed_s"] = s.claimed_s(nodes)
    return [
        {"instance": s.instance, "nodes": n, "measured_s": t, **{k: float(v[i]) for k, v in predicted.items()}}
        for i, (n, t) in enumerate(zip(s.nodes, s.seconds, strict=True))
    ]


def _fit_rows(s: Scaling) -> list[dict[str, Any]]:
    rows = [
        (model, s.mean_error(model), found.worst_relative_error, found.curve.to_spec())
        for model, found in s.fits.items()
    ]
    rows.append(("n × ScalingFactor (paper)", s.mean_claim_error, s.claim_error, s.published.to_spec()))
    return [
        {
            "instance": s.instance,
            "model": model,
            "mean_relative_error": mean,
            "worst_relative_error": error,
            "parameters": "; ".join(f"{k}={v:.6g}" for k, v in spec.items() if isinstance(v, float)),
        }
        for model, mean, error, spec in rows
    ]
