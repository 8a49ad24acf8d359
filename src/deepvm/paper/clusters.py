"""Table IV and Figure 4: a catalogue in; clusters for $3 an hour, their makespans and costs beside the published out.

Makespans are predicted relative to the measured makespan of DeepVM's first cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from deepvm.catalog import Catalog
from deepvm.paper import reference
from deepvm.paper.comparison import Comparison
from deepvm.paper.scaling import fit_all_reduce
from deepvm.performance import AllReduce, MeasuredPoints, curve_from_spec
from deepvm.plan import Recommendation, Request, plan
from deepvm.plan.request import POLICIES

_ASSUMED = "assumes ResNet-18's batch, and hops that grow with the gradients"
_FIRST_S = reference.TABLE_IV[0].makespan_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A row of Table IV: as published and measured, and as planned and predicted here."""

    published: reference.PublishedCluster
    gpu: str
    gpu_count: int
    cpu: str | None
    cpu_count: int
    hourly_usd: float
    by_points_s: float  # makespan by the curve through the measured points
    by_model_s: float  # makespan by the all-reduce model of this job
    by_paper_s: float  # makespan by the paper's eFLOPS × n × ScalingFactor

    @property
    def by_points_usd(self) -> float:
        return self.by_points_s / 3600 * self.hourly_usd

    @property
    def by_model_usd(self) -> float:
        return self.by_model_s / 3600 * self.hourly_usd

    @property
    def by_paper_usd(self) -> float:
        return self.by_paper_s / 3600 * self.hourly_usd

    @property
    def published_text(self) -> str:
        return _cluster_text(self.published)

    @property
    def our_text(self) -> str:
        return _cluster_text(self)


def _cluster_text(row: Row | reference.PublishedCluster) -> str:
    return f"{row.gpu_count} × {row.gpu}" + ("" if row.cpu is None else f" + {row.cpu_count} × {row.cpu}")


def make_rows(catalog: Catalog) -> tuple[Row, ...]:
    """Plan Table IV under the published objective, each row beside the published one."""
    found = {policy: _plan(catalog, policy) for policy in POLICIES}
    first = found["deepvm"][0]
    rows = []
    for was in reference.TABLE_IV:
        best = found[was.policy][was.rank - 1]
        gpu, gpu_count, cpu, cpu_count = _machines(best)
        rows.append(
            Row(
                published=was,
                gpu=gpu,
                gpu_count=gpu_count,
                cpu=cpu,
                cpu_count=cpu_count,
                hourly_usd=best.hourly_usd,
                by_points_s=_FIRST_S * epoch_s(gpu, gpu_count) / epoch_s(*_machines(first)[:2]),
                by_model_s=_FIRST_S * model_s(gpu, gpu_count) / model_s(*_machines(first)[:2]),
                by_paper_s=_FIRST_S * first.performance / best.performance,
            )
        )
    return tuple(rows)


def _plan(catalog: Catalog, policy: str) -> tuple[Recommendation, ...]:
    request = Request(
        budget_usd=reference.TABLE_IV_BUDGET_USD,
        objective="flopp",
        policy=policy,
        checkpoint_bytes=reference.TABLE_IV_CHECKPOINT_BYTES,
        buffers=reference.BUFFERS,
    )
    return plan(catalog, request).recommendations


def _machines(best: Recommendation) -> tuple[str, int, str | None, int]:
    memory = next((role for role in best.roles if role.role == "memory"), None)
    if memory is None:
        return best.worker.instance, best.nodes, None, 0
    return best.worker.instance, best.nodes, memory.instance, memory.count


def epoch_s(gpu: str, nodes: int) -> float:
    """Return the seconds of an epoch of the scaling figure, by the curve through its measured points."""
    curve = MeasuredPoints(nodes=reference.SCALING_NODES, seconds=reference.SCALING_S[gpu])
    return curve.seconds[0] / float(curve.speedup(nodes))


def model_s(gpu: str, nodes: int) -> float:
    """Return the seconds that a cluster needs for one batch of ResNet-50, by the all-reduce fitted to ResNet-18.

    Compute grows by the multiply-adds, the exchange by the bytes of the gradients. So do the costs of its hops, since
    PyTorch sends gradients in buckets of 25 MB, each in a ring of its own. The batch is taken to be ResNet-18's."""
    fitted = fit_all_reduce(gpu).curve
    assert isinstance(fitted, AllReduce)  # noqa: S101
    larger = reference.TABLE_IV_GRADIENT_BYTES / reference.SCALING_GRADIENT_BYTES
    curve = replace(
        fitted,
        compute_s=fitted.compute_s * reference.TABLE_IV_COMPUTE_RATIO,
        gradient_bytes=reference.TABLE_IV_GRADIENT_BYTES,
        latency_s=fitted.latency_s * larger,
    )
    return curve.compute_s / float(curve.speedup(nodes))


def compare(catalog: Catalog, rows: Sequence[Row]) -> list[Comparison]:
    table = [c for row in rows for c in _compare_row(row)]
    figure = [c for row in rows for c in _compare_prediction(row, "Figure 4", "makespan")]
    return [*table, *figure, *_compare_ratios(catalog, rows)]


def _compare_row(row: Row) -> list[Comparison]:
    was = row.published
    same: list[tuple[str, str, float | str, float | str]] = [
        ("cluster", "", row.published_text, row.our_text),
        ("hourly price", "USD/h", was.hourly_usd, row.hourly_usd),
    ]
    reproduced = [
        Comparison(
            part="Table IV", kind="reproduced", subject=was.name, quantity=what, unit=unit, published=then, ours=now
        )
        for what, unit, then, now in same
    ]
    return [*reproduced, *_compare_prediction(row, "Table IV", "total cost")]


def _compare_prediction(row: Row, part: str, what: str) -> list[Comparison]:
    was, starts = row.published, "the measured makespan of DeepVM 1st, the base of predictions"
    first = reference.TABLE_IV[0]
    anchored = (row.gpu, row.gpu_count) == (first.gpu, first.gpu_count)
    lines = []
    for model, seconds, usd in (
        ("measured points", row.by_points_s, row.by_points_usd),
        ("our model", row.by_model_s, row.by_model_usd),
        ("the paper's model", row.by_paper_s, row.by_paper_usd),
    ):
        makespan = what == "makespan"
        lines.append(
            Comparison(
                part=part,
                kind="predicted",
                subject=was.name,
                quantity=f"{what} by {model}",
                unit="s" if makespan else "USD",
                published=was.makespan_s if makespan else was.total_usd,
                ours=seconds if makespan else usd,
                decimals=2 if makespan else 4,
                note=starts if anchored else _ASSUMED if model == "our model" else "",
            )
        )
    return lines


def _compare_ratios(catalog: Catalog, rows: Sequence[Row]) -> list[Comparison]:
    last = rows[-1]
    claimed = float(curve_from_spec(catalog.instance(last.gpu).speedup or {}).speedup(last.gpu_count))
    speedup = epoch_s(last.gpu, 1) / epoch_s(last.gpu, last.gpu_count)
    measured = f"measured: {reference.PERFORMANCE_FIRST_RATIO_MEASURED:.2f}"
    over = "makespan over DeepVM 1st"
    return [
        Comparison(
            part="Figure 4", kind="reproduced", subject=last.published.name, quantity=quantity,
            published=published, ours=ours, decimals=2, note=note,
        )
        for quantity, published, ours, note in (
            (f"{over}, by measured points",
             reference.PERFORMANCE_FIRST_RATIO_BY_POINTS, last.by_points_s / _FIRST_S, measured),
            (f"{over}, by the paper's model",
             reference.PERFORMANCE_FIRST_RATIO_BY_PAPER, last.by_paper_s / _FIRST_S, measured),
            (f"speedup of {last.gpu_count} × {last.gpu}, by measured points",
             reference.SEVEN_G5_SPEEDUP, speedup, f"the paper's model claims {claimed:.2f}"),
        )
    ]  # fmt: skip
