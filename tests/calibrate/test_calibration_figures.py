"""Figures of calibrations, as text: every point, line, band and label."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deepvm.calibrate.figures import draw_profiles, fit_here
from deepvm.calibrate.network import NetworkCalibration
from deepvm.calibrate.network.figure import draw_network
from deepvm.calibrate.overheads import OverheadCalibration
from deepvm.calibrate.overheads.figure import draw_overheads
from deepvm.errors import UsageError
from deepvm.performance.measured import Machine, Provenance, Samples
from deepvm.performance.network.transmission import fit_transmission, saturation_points
from deepvm.performance.profile import OVERHEADS, ComputePoint, NetworkPoint, OverheadPoint, Profile, ScalingPoint
from deepvm.plan.profiles import choose_scaling
from tests.support.drawings import recorded
from tests.support.golden import same_as_file
from tests.support.measured_scaling import MEASURED

DRAWINGS = Path(__file__).with_name("drawings")
T4 = Machine(cpu="Xeon", cores=4, accelerator="T4", accelerator_count=1)
EMPTY = Profile(workload="resnet18", provenance=Provenance(machine=T4, date="2026-11-18T12:00:00"))


def compute(batch: int, seconds: float, *, flops: float | None = 0.22e9, operations: int | None = 300) -> ComputePoint:
    return ComputePoint(
        batch=batch, step_s=Samples((seconds * 0.97, seconds, seconds * 1.1)),
        flops_per_step=None if flops is None else flops * batch, traffic_bytes_per_step=4e8,
        operations_per_step=operations,
    )  # fmt: skip


COMPUTE = (compute(256, 0.066), compute(64, 0.02), compute(128, 0.035), compute(32, 0.013))
POINTS = MEASURED["g4dn.xlarge"]
SCALING = tuple(
    ScalingPoint(workers=n, batch=128, step_s=Samples((s * n / POINTS.steps,)), gradient_bytes=46_758_048)
    for n, s in zip(POINTS.nodes, POINTS.seconds, strict=True)
)


def network(workers: int, nodes: int, link: float | None, seconds: float) -> NetworkPoint:
    return NetworkPoint(
        workers=workers, memory_nodes=nodes, link_gbps=link, checkpoint_bytes=10**8,
        remote_s=Samples((seconds, seconds * 0.9, seconds * 1.3)),
    )  # fmt: skip


def drawn(path: Path, draw: object, *words: object, **options: object) -> str:
    with recorded() as found:
        draw(*words, **options)  # type: ignore[operator]
    assert path.stat().st_size > 5000
    (text,) = found.values()
    return text


def test_compute_and_scaling_of_two_machines(tmp_path: Path) -> None:
    path = tmp_path / "f.svg"
    both = replace(EMPTY, compute=COMPUTE, scaling=SCALING)
    only = replace(EMPTY, workload="gpt2", compute=(compute(4, 0.5), compute(2, 0.3)))
    text = drawn(path, draw_profiles, [EMPTY, both, only], path)
    same_as_file(text, DRAWINGS / "profiles.txt")


def test_points_without_flops_have_no_line_and_a_given_choice_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "f.svg"
    fit = (compute(16, 0.5, flops=None), compute(8, 0.3, flops=None))
    alone = replace(EMPTY, compute=fit, scaling=(SCALING[0],))
    choice = choose_scaling(SCALING[:4], most_workers=6)
    text = drawn(path, draw_profiles, [alone], path) + drawn(path, draw_profiles, [alone], path, choice=choice)
    same_as_file(text, DRAWINGS / "few-points.txt")


def test_the_line_of_compute_is_fitted_to_this_machine_alone() -> None:
    assert fit_here(replace(EMPTY, compute=COMPUTE[:1])) is None
    assert fit_here(replace(EMPTY, compute=(*COMPUTE[:1], compute(8, 0.3, flops=None)))) is None
    fitted = fit_here(replace(EMPTY, compute=COMPUTE[:2]))
    assert fitted is not None
    assert fit_here(replace(EMPTY, compute=tuple(replace(p, operations_per_step=None) for p in COMPUTE))) is not None


def test_profiles_without_compute_and_scaling_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no points of compute or scaling"):
        draw_profiles([EMPTY], tmp_path / "f.svg")
    assert not list(tmp_path.iterdir())


def test_the_network_by_links_and_the_shape_of_the_slowest(tmp_path: Path) -> None:
    path = tmp_path / "f.svg"
    points = tuple(
        network(workers, nodes, link, 0.02 + 0.8 * workers / (nodes * (link or 20.0)) + 0.01 * nodes)
        for nodes in (3, 1, 2)
        for link in (5.0, None, 1.0)
        for workers in (2, 1)
        if (nodes, link, workers) != (3, 5.0, 2)
    )
    fit = fit_transmission(points)
    calibration = NetworkCalibration(
        profile=replace(EMPTY, network=points), points=points, fit=fit, unlimited_because=None, measured=3,
        saturation=saturation_points(points, fit.model),
    )  # fmt: skip
    text = drawn(path, draw_network, calibration, [path])
    one = replace(calibration, points=(network(1, 1, None, 0.5),), fit=None)
    other = replace(calibration, points=tuple(network(1, m, None, 0.5 / m) for m in (2, 1)), fit=None)
    line = replace(calibration, points=(network(2, 1, 5.0, 0.5), network(1, 1, 1.0, 0.5)), fit=None)
    texts = [text, *(drawn(path, draw_network, each, [path]) for each in (one, other, line))]
    same_as_file("\n".join(texts), DRAWINGS / "network.txt")


def test_overheads_by_size_and_of_one_size(tmp_path: Path) -> None:
    path = tmp_path / "f.svg"
    points = [
        OverheadPoint(name=name, state_bytes=size, seconds=Samples((t, t * 1.1, t * 1.4)))
        for size in (10**8, 10**7, 10**9)
        for t, name in enumerate(OVERHEADS, start=1)
    ]
    profile = replace(EMPTY, overheads=tuple(points))
    several = OverheadCalibration(profile=profile, points=profile.overheads, kept=0)
    one = tuple(point for point in points if point.state_bytes == 10**7)
    single = replace(several, profile=replace(EMPTY, overheads=one), points=one)
    texts = [drawn(path, draw_overheads, each, [path]) for each in (several, single)]
    same_as_file("\n".join(texts), DRAWINGS / "overheads.txt")
