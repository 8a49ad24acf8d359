"""Every figure of what is fitted to a few measured points, and of what the fits predict."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepvm.catalog.accelerators import find
from deepvm.performance import (
    AllReduce,
    ClusterAllReduce,
    LimitedBatch,
    Logistic,
    MeasuredPoints,
    SpeedupCurve,
    UniversalScalability,
    allreduce_s,
    compute_share,
    curve_from_spec,
    estimate_eflops,
    estimate_sustained_gbps,
    fit,
    table_workers,
)
from deepvm.performance.crossvalidate import choose_curve
from deepvm.performance.measured import Samples
from deepvm.performance.network.transmission import (
    PAPER_TRANSMISSION_S,
    fit_transmission,
    fit_transmission_curve,
    saturation_points,
)
from deepvm.performance.profile import NetworkPoint
from deepvm.performance.roofline import (
    Load,
    Peaks,
    RooflinePoint,
    accelerator_peaks,
    fit_roofline,
    predict_step_s,
    reference_roofline,
)
from deepvm.performance.roofline.reference import RESNET50
from tests.performance.test_roofline import A10G, JOB, T4, measured_on
from tests.support.documents import assert_document

DOCUMENTS = Path(__file__).with_name("documents")
FITTED = 1e-3  # where a solver stops
NODES, SECONDS = (1, 2, 3, 4, 6, 8), (60.0, 31.1, 21.9, 17.2, 13.3, 11.9)
KNOWN = {"gradient_bytes": 1e8, "sustained_gbps": 10.0}


def figures(curve: SpeedupCurve) -> dict[str, Any]:
    n = np.array([1, 2, 5, 8, 40])
    return {"spec": curve.to_spec(), "speedup": curve.speedup(n).tolist(), "scaling": curve.scaling(n).tolist()}


def test_each_model_is_fitted_to_these_parameters() -> None:
    document = {}
    for model in ("measured", "logistic", "universal-scalability", "all-reduce"):
        known = {**KNOWN, "steps": 40.0} if model == "all-reduce" else {}
        found = fit(model, NODES[::-1], SECONDS[::-1], **known)
        document[model] = {**figures(found.curve), "worst": found.worst_relative_error}
    assert_document(document, DOCUMENTS / "fits.json", within=FITTED)


def test_the_choice_among_curves_is_this() -> None:
    cases = {
        "all": choose_curve(NODES, SECONDS, gradient_bytes=1e8, sustained_gbps=10.0),
        "noisy": choose_curve(NODES, SECONDS, noise=0.05, most_nodes=30),
        "three": choose_curve(NODES[:3], SECONDS[:3], gradient_bytes=1e8),
        "two": choose_curve(NODES[:2], SECONDS[:2], most_nodes=2),
    }
    document = {name: {**found.to_json(), "worst": found.best.worst_error} for name, found in cases.items()}
    assert_document(document, DOCUMENTS / "choices.json", within=FITTED)


def test_curves_of_known_parameters_are_these() -> None:
    ring = AllReduce(compute_s=0.5, **KNOWN, overlap=0.25, latency_s=1e-4, efficiency=0.6)
    curves = [
        ring,
        Logistic(a=0.13, b=12.9, c=6.2),
        UniversalScalability(sigma=0.05, kappa=0.004),
        MeasuredPoints(nodes=NODES, seconds=SECONDS),
        ClusterAllReduce(compute_s=0.5, gpus=4, inside_gbytes_per_s=7.0, **KNOWN),
        LimitedBatch(curve=ring.to_spec(), gpus=4, batch=32, global_batch=200, compute_share=0.8),
    ]
    document = [
        {**figures(curve), "again": figures(curve_from_spec(curve.to_spec())) == figures(curve)} for curve in curves[:5]
    ]
    document.append({"limited": [None if math.isnan(s) else s for s in curves[5].scaling([1, 2, 4, 40, 60]).tolist()]})
    times = allreduce_s([1, 2, 9], gradient_bytes=1e9, sustained_gbps=10.0, gpus=4, inside_gbytes_per_s=7.0)
    shares = [float(compute_share(compute_s=s, gpus=4, inside_gbytes_per_s=7.0, **KNOWN)) for s in (0.01, 0.5)]
    assert_document(
        {"curves": document, "all_reduce_s": times.tolist(), "compute_share": shares}, DOCUMENTS / "curves.json"
    )


def point(workers: int, nodes: int, link: float | None, seconds: float) -> NetworkPoint:
    return NetworkPoint(
        workers=workers, memory_nodes=nodes, link_gbps=link, checkpoint_bytes=64_000_000,
        remote_s=Samples((seconds * 0.9, seconds, seconds * 1.2)),
    )  # fmt: skip


MEASURED = [
    (1, 1, 1.0, 0.61), (2, 1, 1.0, 1.21), (4, 1, 1.0, 2.53), (4, 2, 1.0, 1.22), (4, 4, 1.0, 0.66), (8, 2, 1.0, 2.6),
    (1, 1, 10.0, 0.09), (2, 1, 10.0, 0.17), (4, 1, 10.0, 0.33), (8, 2, 10.0, 0.41), (1, 1, None, 0.06),
    (4, 2, None, 0.18), (8, 4, None, 0.37),
]  # fmt: skip


def test_transmission_models_and_saturation_are_these() -> None:
    points = [point(*row) for row in MEASURED]
    found = fit_transmission(points)
    bound = [[found.model.bound_by(one), found.model.predicted_s(one)] for one in points]
    curves = [
        fit_transmission_curve(list(range(1, 8)), PAPER_TRANSMISSION_S),
        fit_transmission_curve([1, 2, 4], [4.0, 2.2, 1.2]),
        fit_transmission_curve([1, 2, 3, 4, 5, 6], [3.0, 1.53, 1.04, 1.02, 1.0, 1.01]),
    ]  # fmt: skip
    document = {
        "model": found.to_json(),
        "bound": bound,
        "few": fit_transmission(points[:5]).to_json(),
        "saturation": [{**one.to_json(), "text": str(one)} for one in saturation_points(points, found.model)],
        "curves": [
            [one.curve.to_json(), one.mean_relative_error, one.worst_relative_error, one.curve.flat_from()]
            for one in curves
        ],
    }
    assert_document(document, DOCUMENTS / "transmission.json", within=FITTED)


def roofline_points() -> list[RooflinePoint]:
    fast, slow = (
        Peaks(device="fast", flops_per_s=5e13, bytes_per_s=9e11),
        Peaks(device="slow", flops_per_s=8e12, bytes_per_s=2e11),
    )
    rows = [
        (fast, 6e12, 1e11, 900, 0.0, 0.33), (fast, 3e10, 1e9, 300, 0.0, 0.0051), (fast, 2e11, 6e10, 5000, 4e8, 0.19),
        (slow, 6e12, 1e11, 900, 0.0, 1.9), (slow, 3e10, 1e9, 300, 0.0, 0.016), (slow, 2e11, 6e10, 5000, 4e8, 0.61),
    ]  # fmt: skip
    return [
        RooflinePoint(
            peaks=peaks, step_s=seconds, label=f"{peaks.device} {i}",
            load=Load(flops=flops, traffic_bytes=traffic, operations=count, exchanged_bytes=exchanged),
        )
        for i, (peaks, flops, traffic, count, exchanged, seconds) in enumerate(rows)
    ]  # fmt: skip


def test_rooflines_and_their_predictions_are_these() -> None:
    points = roofline_points()
    assert T4 is not None
    assert A10G is not None
    reference = reference_roofline()
    fits = {
        "all": fit_roofline(points),
        "one device": fit_roofline(points[:3], near=reference),
        "near": fit_roofline([replace(points[0], peaks=accelerator_peaks(T4, "fp16"))], near=reference),
        "relative": fit_roofline([*points[:3], *(replace(one, relative_to="x") for one in points[3:])]),
        "reference": reference,
    }
    gpus = [gpu for gpu in map(find, ("K80", "V100", "L4", "H100")) if gpu is not None]
    document = {
        "fits": {
            name: {**found.to_json(), "factors": dict(found.factors), "uncertainty": found.uncertainty}
            for name, found in fits.items()
        },
        "counted": [predict_step_s(JOB, gpu).to_json() for gpu in gpus],
        "scaled": [predict_step_s(measured_on("T4", 0.8), gpu, measured_on=T4).to_json() for gpu in (T4, *gpus)],
        "own": predict_step_s(JOB, A10G, roofline=fits["all"]).to_json(),
        "precisions": [accelerator_peaks(A10G, kind).flops_per_s for kind in ("fp16", "bf16", "tf32", "fp32")],
        "load": RESNET50.to_json(),
    }
    assert_document(document, DOCUMENTS / "rooflines.json", within=FITTED)


def test_estimates_from_data_sheets_are_these() -> None:
    assert estimate_sustained_gbps([2, 4, 96]).tolist() == [0.5, 1.0, 24.0]
    workers = [2 / 3, 7.0, 12 + 0.3 * 4 / 3.3, 29.6]
    assert table_workers([0.1, 1.0, 2.0, 27.0]).tolist() == pytest.approx(workers)
    rates = [
        estimate_eflops(tflops_16bit=t, memory_gbytes_per_s=m, count=c) for t, m, c in ((65, 320, 1), (130, 80, 2))
    ]
    assert rates == pytest.approx([377.0, 377.0 * math.sqrt(2) * 0.5 * 2])


def test_what_cannot_be_left_out_is_passed_over() -> None:
    points = roofline_points()
    several, one = points[:2], points[3]
    truth = reference_roofline()
    made = [replace(each, step_s=truth.seconds(each.load, each.peaks)) for each in (*several, several[0], one)]
    made[2] = replace(made[2], load=Load(flops=1e12, traffic_bytes=5e9, operations=50))
    found = fit_roofline([replace(each, load=replace(each.load, operations=0.0)) for each in made])
    assert list(found.leave_one_out) == ["slow"]


def test_a_device_whose_common_factor_nothing_else_knows_is_passed_over() -> None:
    points = roofline_points()
    alone = replace(points[0], peaks=Peaks(device="alone", flops_per_s=2e13, bytes_per_s=5e11), relative_to="q")
    between = Peaks(device="between", flops_per_s=3e13, bytes_per_s=4e11)
    more = [replace(one, peaks=between, step_s=one.step_s * 1.8) for one in points[:3]]
    found = fit_roofline([alone, *points, *more])
    assert list(found.leave_one_out) == ["fast", "slow", "between"]
    assert list(found.factors) == ["q"]
