"""Whole plans under a spot market, and the figures that lead to them."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepvm import plan as planning
from deepvm.catalog import Catalog
from deepvm.errors import Infeasible, UsageError
from deepvm.market.builtin import classes_of
from deepvm.market.trace import Trace, TraceKind
from deepvm.plan import objectives
from deepvm.plan.risk import deadline, spot
from deepvm.plan.risk.screen import Screen, picks, trial_of
from deepvm.plan.risk.search import Found, estimate
from deepvm.plan.risk.spot import Spot
from deepvm.plan.risk.trial import Trial, with_replicas
from deepvm.plan.search.instances import analyse_instances
from deepvm.plan.search.space import Space
from tests.plan.risk.test_plans_under_a_market import DUE_S, request, small
from tests.support.documents import assert_document

DOCUMENTS = Path(__file__).with_name("documents")
PLACES = (("us-east-1", "us-east-1a"), ("us-east-1", "us-east-1b"), ("us-west-2", "us-west-2a"))
SHAPES = ("tiering", "single-anchor", "all-spot", "all-on-demand")


def recorded(*digits: str, accelerator: str = "V100") -> dict[str, tuple[Trace, ...]]:
    """Recorded zones of 9 machines; each digit is twenty minutes, and the pattern repeats for ten days."""
    ticks = 10 * 72
    found = []
    for zone, row in zip(("us-east-1a", "us-east-1b", "us-west-2a"), digits, strict=False):
        up = np.resize(np.array([*map(int, row)], np.int32), ticks)
        found.append(Trace(zone=zone, machines=9, gap_s=1200.0, up=up, kind=TraceKind.LAUNCH, accelerator=accelerator))
    return {"recorded": tuple(found)}


TRACES = recorded("9999922299999999900009999", "99999999999999993333399999999", "5555999990000099999999")
CASES: dict[str, dict[str, Any]] = {
    "cost": {},
    "deadline": {"deadline_s": DUE_S, "usd_per_hour_of_waiting": 2.0},
    "time": {"objective": "time", "budget_usd": 2.0, "checkpoint_bytes": 6_000_000_000},
    "throughput": {"objective": "throughput", "deadline_s": 2 * DUE_S, "confidence": 0.8, "architectures": SHAPES},
}


def catalog() -> Catalog:
    return small(places=PLACES)


@pytest.mark.parametrize("name", CASES)
def test_a_plan_under_a_recorded_market_and_its_reasons_are_these(name: str) -> None:
    asked = request(gpu="V100", **CASES[name])
    found = planning.plan(catalog(), asked, traces=TRACES)
    document = {key: value for key, value in found.to_json().items() if key not in ("format", "request", "instances")}
    reasons = planning.explain(catalog(), found, date(2026, 9, 1)).to_json()
    assert_document({"plan": document, "reasons": reasons}, DOCUMENTS / f"{name}.json")


def test_a_plan_under_the_built_in_market_is_this() -> None:
    found = planning.plan(catalog(), request(deadline_s=DUE_S, top=1, seed=3)).to_json()
    document = {"recommendations": found["recommendations"], "advice": found.get("advice")}
    assert_document(document, DOCUMENTS / "built-in.json")


def screen_of(**wanted: Any) -> Screen:
    space = objectives.build_space(analyse_instances(catalog(), request(gpu="V100", architectures=SHAPES, **wanted)))
    return Screen(space=space, spot=Spot.of(space.board, TRACES))


def test_the_screen_estimates_these_hours_and_dollars() -> None:
    screen = screen_of(deadline_s=DUE_S, checkpoint_bytes=3_000_000_000)
    groups = list(screen.groups())
    rows = [
        {
            "architecture": screen.space.architectures[one.architecture].name, "worker": one.worker, "tier": one.tier,
            "columns": list(one.columns), "shrink": one.shrink, "nodes": one.nodes.tolist(),
            "hours": finite(one.hours), "usd": finite(one.usd), "fallback": one.fallback.tolist(),
        }
        for one in groups
    ]  # fmt: skip
    best = [[p.value, p.usd, p.number, p.nodes, p.at] for p in picks(screen, groups)[:40]]
    assert_document({"groups": rows, "picks": best}, DOCUMENTS / "screen.json")


def finite(values: Any) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in np.ravel(values).tolist()]


def figures(trial: Trial) -> dict[str, Any]:
    over, strategy = trial.overheads, trial.strategy
    spells = trial.spells()
    return {
        "cluster": [[p.role, p.instance, p.place, p.market.value, p.count, p.usd_per_hour] for p in trial.cluster],
        "conduct": trial.conduct().to_json(),
        "machines": [trial.spot_machines, trial.anchors, trial.keeper_usd],
        "fallback_hourly_usd": trial.fallback_hourly_usd,
        "interval_s": trial.interval_s,
        "losses_per_h": trial.losses_per_h,
        "overheads": [over.start_s, over.stall_s, over.remote_s, over.restore_s, over.regroup_s, over.move_s],
        "save_usd": over.save_usd,
        "job": [trial.job.work_h, trial.job.machines, trial.job.checkpoint_bytes, trial.job.deadline_h],
        "strategy": [
            strategy.name, strategy.keeper_usd, strategy.spot_machines, strategy.least, strategy.start_h,
            strategy.restore_h, strategy.move_h, strategy.regroup_h, strategy.on_demand_only,
            list(strategy.speed or ()), repr(strategy.placement), repr(strategy.fallback),
        ],
        "spells": None if spells is None else str(spells),
        "double": trial.affordable(with_replicas(trial.candidate, 2)),
    }  # fmt: skip


def test_a_cluster_of_each_shape_is_run_like_this() -> None:
    screen = screen_of(deadline_s=DUE_S, checkpoint_bytes=3_000_000_000)
    document = {}
    for rows in screen.groups():
        name = screen.space.architectures[rows.architecture].name
        key = f"{name}, {rows.tier}, {len(rows.columns)} zones{', shrinks' if rows.shrink else ''}"
        for fallback in (False, True):
            trial = trial_of(screen, rows, int(rows.nodes[-1]), fallback=fallback)
            if trial is not None and len(rows.columns) != 2:
                document[f"{key}{', falls back' if fallback else ''}"] = figures(trial)
    assert_document(document, DOCUMENTS / "trials.json")


def test_the_first_estimate_is_the_best_of_the_screen() -> None:
    asked = request(gpu="V100", deadline_s=DUE_S, architectures=SHAPES[:2])
    space = objectives.build_space(analyse_instances(catalog(), asked))
    found = estimate(space, TRACES)
    assert found is not None
    assert_document({"value": found[1], **figures(found[0])}, DOCUMENTS / "estimate.json")


def refused(**wanted: Any) -> str:
    with pytest.raises(Infeasible) as caught:
        planning.plan(catalog(), request(gpu="V100", **wanted), traces=TRACES)
    return str(caught.value)


def test_what_no_market_keeps_is_said_with_what_helps() -> None:
    texts = {
        "deadline": refused(deadline_s=4 * 3600.0),
        "budget": refused(budget_usd=0.01),
        "both": refused(budget_usd=0.5, deadline_s=3600.0, architectures=("all-on-demand",)),
    }
    assert_document(texts, DOCUMENTS / "infeasible.json")


def test_cost_alone_is_called_slow_where_nothing_is_faster() -> None:
    found = planning.plan(catalog(), request(gpu="V100", max_nodes=1, top=1), traces=TRACES)
    assert found.recommendations[0].expected is not None
    hours = found.recommendations[0].expected.risk.mean_h
    assert found.advice[0] == (
        f"cost alone favours few machines for a long time (here {hours:.1f}h): "
        "give --deadline, or --usd-per-hour-of-waiting"
    )


def test_a_deadline_that_is_not_kept_after_all_is_tried_a_little_later(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def search(space: Space, traces: object) -> Found | None:
        asked.append((space.board.request.deadline_s or 0.0) / 3600)
        return None if len(asked) < 4 else found[0]

    usual = {"gpu": "V100", "max_nodes": 2, "architectures": SHAPES[:2]}
    board = analyse_instances(catalog(), request(deadline_s=3600.0 * 2, **usual))
    late = analyse_instances(catalog(), request(deadline_s=DUE_S, **usual))
    found = [deadline.search(objectives.build_space(late), TRACES)]
    monkeypatch.setattr(deadline, "search", search)
    error = deadline.nothing_keeps(board, TRACES)
    assert asked == [12.2, 12.4, 12.6, 12.9]
    assert str(error) == (
        "no plan for $4.0000/h keeps --deadline 2h with a confidence of 0.95: the nearest that can be kept is 12.9h; "
        "allow that, or raise --budget"
    )


def test_hazards_of_two_ticks_are_not_drawn_together() -> None:
    first = classes_of("V100")[0]
    other = replace(first, model=replace(first.model, tick_s=60.0))
    with pytest.raises(UsageError, match=r"have ticks of \[60\.0, \d+\.0\] s: fit them alike"):
        spot._draw((first, other), ("us-east-1",), 0, 1)


@pytest.mark.parametrize(
    ("places", "sets"),
    [
        (["a1"], [(0,)]),
        (["a1", "a2"], [(0,), (0, 1)]),
        (["a1", "b1", "a2"], [(0,), (1,), (0, 2), (0, 1, 2)]),
        (
            ["a1", "b1", "c1", "d1", "a2"],
            [
                (0,),
                (1,),
                (2,),
                (0, 4),
                (0, 1, 4),
                (0, 2, 4),
                (1, 2),
                (0, 1, 2, 4),
                (0, 1, 2),
                (0, 1, 2, 3, 4),
            ],
        ),
        (["a", "b"], [(0,), (1,), (0, 1)]),
    ],
)
def test_zones_are_tried_alone_by_region_and_together(places: list[str], sets: list[tuple[int, ...]]) -> None:
    columns = tuple(
        spot.Column(
            row=i,
            region=place[0],
            zone=place if len(place) > 1 else None,
            name=place,
            usd=1.0,
            on_demand_usd=3.0,
            drawn=i,
        )
        for i, place in enumerate(places)
    )
    market = spot.TypeMarket(
        instance=0, columns=columns, capacity=np.full((len(columns), 12), 4, np.int32), machines=4, tick_s=600.0,
        history=classes_of("V100")[0].history, draw=spot.Draw(accelerator="V100", regions=("a",), seed=0, worlds=1),
    )  # fmt: skip
    assert list(market.zone_sets) == sets
    assert (market.hours, market.gangs(4).max(), market.gangs(6).max()) == (2.0, 4, 6)
