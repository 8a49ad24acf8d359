"""Workloads are the built-in models, varied in width and depth, and what their steps ask for is counted right."""

from __future__ import annotations

import pytest

from deepvm.calibrate.models.dry_run import on_meta
from deepvm.calibrate.workloads import NAMES, build
from deepvm.errors import UnknownName, UsageError
from deepvm.performance.roofline.reference import RESNET18, RESNET50
from tests.calibrate.test_models import PUBLISHED


def test_workloads_train_the_published_models() -> None:
    for name in NAMES:
        if name != "tiny":
            assert sum(p.numel() for p in on_meta(build(name).spec.make).parameters()) == PUBLISHED[name]


def test_flops_grow_with_the_batch_and_traffic_less() -> None:
    one, eight = build("tiny").count_step(1), build("tiny").count_step(8)
    assert eight.flops == pytest.approx(8 * one.flops)
    assert one.traffic_bytes < eight.traffic_bytes < 8 * one.traffic_bytes  # weights are read once
    assert eight.operations == one.operations


def test_sixteen_bits_move_about_half_of_the_bytes() -> None:
    wide, half = (build("resnet18").count_step(128, p).traffic_bytes for p in ("fp32", "bf16"))
    assert 0.4 * wide < half < 0.9 * wide


def test_the_reference_steps_are_counted_as_their_constants_say() -> None:
    fifty = build("resnet50").count_step(256, "fp16")
    eighteen = build("resnet18").count_step(128)
    assert (fifty.flops, fifty.traffic_bytes) == (RESNET50.flops, RESNET50.traffic_bytes)
    assert (eighteen.flops, eighteen.traffic_bytes) == (RESNET18.flops, RESNET18.traffic_bytes)


def test_width_and_depth_change_the_work() -> None:
    plain = build("tiny").count_step(4)
    assert build("tiny", width=32).count_step(4).flops > 3 * plain.flops
    assert build("tiny", depth=2).count_step(4).operations > plain.operations


def test_a_model_of_one_size_is_not_varied() -> None:
    with pytest.raises(UsageError, match="resnet50 has one width and one depth"):
        build("resnet50", width=32)


def test_an_unknown_workload_gets_the_nearest_name() -> None:
    with pytest.raises(UnknownName, match="did you mean resnet"):
        build("resnet51")
    assert all(build(name).name == name for name in NAMES)
