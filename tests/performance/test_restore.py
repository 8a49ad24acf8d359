"""Laws of the estimate of a restore's time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepvm.errors import UsageError
from deepvm.performance import RestorePath, restore_s, restore_time

rates = st.floats(1e3, 1e12)
seconds = st.floats(0, 1e4)


@st.composite
def paths(draw: st.DrawFn) -> RestorePath:
    import_s = draw(seconds)
    return RestorePath(
        state_bytes=draw(st.floats(0, 1e14)),
        worker_link_bytes_per_s=draw(rates),
        node_link_bytes_per_s=draw(rates),
        memory_nodes=draw(st.integers(1, 100)),
        workers=draw(st.integers(1, 1000)),
        connections=draw(st.integers(1, 64)),
        flow_bytes_per_s=draw(rates | st.just(math.inf)),
        checksum_bytes_per_s=draw(rates | st.just(math.inf)),
        on_demand=draw(st.booleans()),
        first_loss_share=draw(st.floats(0, 1)),
        overlapped=draw(st.booleans()),
        template=draw(st.booleans()),
        detection_s=draw(seconds),
        rendezvous_s=draw(seconds),
        import_s=import_s,
        template_s=draw(st.floats(0, 1)) * import_s,
        model_s=draw(seconds),
        first_step_s=draw(seconds),
    )


more = st.floats(1, 1e3)


@given(path=paths(), factor=more)
def test_more_bytes_never_come_sooner(path: RestorePath, factor: float) -> None:
    assert restore_s(replace(path, state_bytes=path.state_bytes * factor)) >= restore_s(path)


@given(
    path=paths(),
    factor=more,
    what=st.sampled_from(
        ["worker_link_bytes_per_s", "node_link_bytes_per_s", "flow_bytes_per_s", "checksum_bytes_per_s"]
    ),
)
def test_a_faster_part_never_makes_the_whole_slower(path: RestorePath, factor: float, what: str) -> None:
    assert restore_s(replace(path, **{what: getattr(path, what) * factor})) <= restore_s(path)


@given(path=paths(), extra=st.integers(1, 100), what=st.sampled_from(["memory_nodes", "connections"]))
def test_more_nodes_or_connections_are_never_slower(path: RestorePath, extra: int, what: str) -> None:
    assert restore_s(replace(path, **{what: getattr(path, what) + extra})) <= restore_s(path)


@given(path=paths(), extra=st.integers(1, 100))
def test_more_workers_at_once_are_never_faster(path: RestorePath, extra: int) -> None:
    assert restore_s(replace(path, workers=path.workers + extra)) >= restore_s(path)


@given(path=paths(), what=st.sampled_from(["overlapped", "template", "on_demand"]))
def test_no_way_to_restore_sooner_takes_longer(path: RestorePath, what: str) -> None:
    assert restore_s(replace(path, **{what: True})) <= restore_s(replace(path, **{what: False}))


@given(path=paths())
def test_the_parts_make_the_total(path: RestorePath) -> None:
    time = restore_time(path)
    start_s = time.entry_s + time.rendezvous_s + time.model_s
    together = max(start_s, time.fetch_s) if path.overlapped else start_s + time.fetch_s
    assert time.total_s == pytest.approx(time.detection_s + together + time.first_step_s)
    whole = restore_time(replace(path, on_demand=False))
    assert time.fetch_s + time.rest_s == pytest.approx(whole.fetch_s)
    assert whole.rest_s == 0


def test_the_slowest_part_is_named_and_bounds_the_fetch() -> None:
    path = RestorePath(
        state_bytes=1e9,
        worker_link_bytes_per_s=1e9,
        node_link_bytes_per_s=2e9,
        memory_nodes=2,
        workers=8,
        connections=4,
        flow_bytes_per_s=1e8,
    )
    assert restore_time(path).fetch_s == pytest.approx(2.0)  # two nodes of 2 GB/s for eight workers
    assert restore_time(path).bound_by == "the memory nodes' links"
    alone = replace(path, workers=1)
    assert (restore_time(alone).fetch_s, restore_time(alone).bound_by) == (pytest.approx(1.25), "its connections")
    wide = replace(alone, flow_bytes_per_s=math.inf)
    assert (restore_time(wide).fetch_s, restore_time(wide).bound_by) == (pytest.approx(1.0), "the worker's link")


def test_optimizer_state_that_comes_later_is_not_waited_for() -> None:
    path = RestorePath(
        state_bytes=3e9, worker_link_bytes_per_s=1e9, node_link_bytes_per_s=1e9, first_loss_share=1 / 3, on_demand=True,
        flow_bytes_per_s=math.inf,
    )  # fmt: skip
    assert restore_time(path).fetch_s == pytest.approx(1.0)
    assert restore_time(path).rest_s == pytest.approx(2.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"state_bytes": -1},
        {"state_bytes": math.nan},
        {"worker_link_bytes_per_s": 0},
        {"memory_nodes": 0},
        {"workers": 0},
        {"first_loss_share": 1.5},
        {"import_s": 0.5, "template_s": 1.0},
        {"first_step_s": -0.1},
    ],
)
def test_figures_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    figures = {"state_bytes": 1e9, "worker_link_bytes_per_s": 1e9, "node_link_bytes_per_s": 1e9, **wrong}
    with pytest.raises(UsageError):
        RestorePath(**figures)


def test_a_restore_with_usual_figures_takes_these_seconds() -> None:
    path = RestorePath(state_bytes=1e9, worker_link_bytes_per_s=1e10, node_link_bytes_per_s=1e10)
    assert restore_time(path).to_json() == {
        "detection_s": 0.1,
        "entry_s": 1.2,
        "rendezvous_s": 1.0,
        "model_s": 0.3,
        "fetch_s": pytest.approx(0.8),  # over two connections of 5 Gbit/s
        "first_step_s": 0.0,
        "total_s": pytest.approx(3.4),
        "rest_s": 0.0,
        "bound_by": "its connections",
    }
    fast = replace(
        path, template=True, overlapped=True, on_demand=True, first_loss_share=0.25, flow_bytes_per_s=math.inf
    )
    assert restore_time(fast).to_json() == {
        "detection_s": 0.1,
        "entry_s": 0.02,
        "rendezvous_s": 1.0,
        "model_s": 0.3,
        "fetch_s": pytest.approx(0.03125),
        "first_step_s": 0.0,
        "total_s": pytest.approx(1.42),
        "rest_s": pytest.approx(0.09375),
        "bound_by": "checksums",
    }


def test_figures_at_their_limits_are_possible() -> None:
    least = {"state_bytes": 0, "worker_link_bytes_per_s": 1e9, "node_link_bytes_per_s": 1e9, "first_loss_share": 0}
    path = RestorePath(**least, import_s=0.5, template_s=0.5)
    nothing = replace(path, detection_s=0, rendezvous_s=0, import_s=0, template_s=0, model_s=0)
    assert (restore_s(nothing), restore_time(path).entry_s) == (0.0, 0.5)
    with pytest.raises(UsageError, match=r"template_s is 0\.6 and import_s 0\.5"):
        replace(path, template_s=0.6)
