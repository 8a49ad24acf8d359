"""Backtests on traces of a folder: what each strategy knew, paid and lost, and what was assumed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deepvm.cli.app import run
from deepvm.errors import Infeasible, UnknownName, UsageError
from deepvm.simulate import backtest, backtests, simulate
from deepvm.simulate.backtesting.one_market import window_h
from deepvm.simulate.job import GangJob
from deepvm.simulate.risk import patience_h
from deepvm.simulate.strategies import NAMES
from tests.support.simulate.markets import bulk_market, write_traces

JOB = GangJob(work_h=12.0, machines=8, checkpoint_bytes=6 * 10**9, deadline_h=18.0)


def test_every_strategy_has_the_documented_figures(tmp_path: Path) -> None:
    result = backtests(write_traces(tmp_path), JOB, meaning="up", starts=20, seed=1)
    document = result.to_json()
    assert [row["name"] for row in document["strategies"]] == list(NAMES)
    for row in document["strategies"]:
        assert list(row) == ["name", "cost_usd", "hours", "missed", "lost_hours", "moves", "regret"]
        assert set(row["cost_usd"]) == {"mean", "p5", "p50", "p95"}
    by_name = {row["name"]: row for row in document["strategies"]}
    assert by_name["planned"]["missed"] == 0
    assert by_name["on-demand"]["cost_usd"]["mean"] == pytest.approx(3.06 * 8 * 12.3, rel=0.05)
    assert 0 <= by_name["planned"]["regret"] < by_name["on-demand"]["regret"]
    assert by_name["oracle"]["regret"] == 0
    assert document["starts"] == 20


def test_a_price_of_waiting_is_in_no_cost_and_in_no_bound() -> None:
    market = bulk_market(1, zones=3)
    plain, priced = (
        backtest(market, job, starts=10, strategies=("tiering", "oracle")).to_json()["strategies"]
        for job in (JOB, replace(JOB, usd_per_hour_of_waiting=30.0))
    )
    assert plain == priced
    assert plain[0]["regret"] >= 0


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_that_cannot_seed_a_draw_is_refused(seed: int, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the seed is"):
        simulate(JOB, accelerator="V100", seed=seed)
    with pytest.raises(UsageError, match="the seed is"):
        backtest(bulk_market(1), JOB, seed=seed)
    words = ["backtest", "--traces", str(write_traces(tmp_path)), "--meaning", "up", "--work", "4h"]
    assert run([*words, "--seed", str(seed)]) == 2


def test_a_seed_repeats_exactly_and_another_one_does_not(tmp_path: Path) -> None:
    folder = write_traces(tmp_path)
    first, again, other = (
        backtests(folder, JOB, meaning="up", starts=15, seed=seed, strategies=("planned",)).to_json()
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_traces_that_count_preempted_machines_are_the_same_market_turned_round(tmp_path: Path) -> None:
    up = backtests(write_traces(tmp_path / "up"), JOB, meaning="up", starts=10, strategies=("tiering+move",))
    down = backtests(
        write_traces(tmp_path / "down", preempted=True), JOB, meaning="preempted", starts=10,
        strategies=("tiering+move",),
    )  # fmt: skip
    assert up.to_json()["strategies"] == down.to_json()["strategies"]


def test_the_meaning_is_never_guessed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["backtest", "--traces", str(write_traces(tmp_path))]) == 2
    assert "write --meaning up if they count machines that are up" in " ".join(capsys.readouterr().err.split())


def test_what_was_assumed_is_said(tmp_path: Path) -> None:
    result = backtests(write_traces(tmp_path, machines=1), JOB, meaning="up", starts=5, strategies=("planned",))
    notes = " ".join(result.notes)
    assert "a gang of 8 counts as up when it is" in notes
    assert "on-demand at the list price" in notes


def test_without_enough_history_nothing_is_promised(tmp_path: Path) -> None:
    document = backtests(write_traces(tmp_path, zones=2), JOB, meaning="up", starts=5).to_json()
    assert document["coverage"] is None
    assert document["history"]["note"] == "not enough history: 7 days and 3 zones are needed"


def test_a_cheaper_market_never_makes_a_plan_dearer() -> None:
    market = bulk_market(5, zones=3)
    cheaper = type(market)(**{**market.__dict__, "price": market.price * 0.8})
    costs = [backtest(m, JOB, starts=30, strategies=("tiering+move", "planned")).rows for m in (market, cheaper)]
    for dear, cheap in zip(*costs, strict=True):
        assert cheap.cost_usd.mean() <= dear.cost_usd.mean()


def test_a_market_can_be_drawn_without_any_file() -> None:
    document = simulate(JOB, accelerator="V100", starts=20, days=20, strategies=("on-demand", "planned")).to_json()
    on_demand, planned = document["strategies"]
    assert planned["cost_usd"]["mean"] < on_demand["cost_usd"]["mean"]
    assert any("market drawn from figures of" in note for note in document["notes"])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"machines": 17}, "its folder is of 16 machines|it never has 17 machines at once"),
        ({"work_h": 500.0, "deadline_h": None}, "more than 1500 h are needed"),
    ],
)
def test_traces_that_cannot_show_the_job_are_refused(tmp_path: Path, change: dict[str, float], sentence: str) -> None:
    fields = {"work_h": 12.0, "machines": 8, "deadline_h": 18.0, **change}
    with pytest.raises(Infeasible, match=sentence):
        backtests(write_traces(tmp_path), GangJob(**fields), meaning="up")  # type: ignore[arg-type]


def test_unknown_strategies_and_impossible_deadlines_are_one_sentence() -> None:
    with pytest.raises(UnknownName, match="tiering"):
        backtest(bulk_market(0), JOB, strategies=("teiring",))
    with pytest.raises(Infeasible, match="the work alone takes 12 h on 8 machines, and the nearest deadline"):
        GangJob(work_h=12.0, machines=8, deadline_h=6.0)
    with pytest.raises(Infeasible, match=r"the work of 12 h takes 12\.\d+ h, which is the nearest that can be kept"):
        backtest(bulk_market(0), GangJob(work_h=12.0, machines=8, deadline_h=12.01))


def test_the_commands_print_one_document_and_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--work", "12h", "--deadline", "18h", "--workers", "8"]
    folder = str(write_traces(tmp_path))
    assert run(["backtest", "--traces", folder, "--meaning", "up", *words, "--starts", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["starts"] == 5
    assert run(["simulate", *words, "--gpu", "V100", "--runs", "5", "--days", "10"]) == 0
    shown = capsys.readouterr().out
    assert "planned" in shown
    assert "regret" in shown


def test_a_plan_file_gives_machines_and_prices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    assert run(["plan", "--budget", "3", "-o", str(plan), "--json"]) == 0
    workers = json.loads(capsys.readouterr().out)["recommendations"][0]["roles"][0]["count"]
    assert run(["simulate", str(plan), "--work", "6h", "--runs", "5", "--days", "10"]) == 0
    machines = "1 machine" if workers == 1 else f"{workers} machines"
    assert f"{machines}, 6 h of work" in capsys.readouterr().out
    plan.write_text("{}")
    assert run(["simulate", str(plan)]) == 2
    assert "not a valid plan" in capsys.readouterr().err
    plan.write_text('{"recommendations": []}')
    for words in (["simulate", str(plan)], ["backtest", str(plan), "--traces", str(tmp_path)]):
        assert run(words) == 2
        assert "not a valid plan: it has no recommendations" in " ".join(capsys.readouterr().err.split())


def test_prices_of_a_market_are_what_its_strategies_pay() -> None:
    market = bulk_market(2, zones=2)
    rows = backtest(market, JOB, starts=10, strategies=("tiering+move",)).rows
    outcomes = rows[0].outcomes
    assert outcomes is not None
    assert np.all(outcomes.spot_usd >= 8 * market.price.min() * JOB.work_h * 0.999)


def test_runs_that_never_end_have_no_regret_and_keep_no_promise() -> None:
    market = bulk_market(1, zones=3, days=14)
    dear = replace(market, price=np.full_like(market.price, 100.0))
    job = replace(JOB, deadline_h=None)
    document = backtest(dear, job, starts=10, after_h=200.0, strategies=("on-demand", "planned", "oracle")).to_json()
    on_demand, planned, _ = document["strategies"]
    assert on_demand["regret"] > 0
    assert (planned["missed"], planned["regret"], document["coverage"]) == (1.0, None, 0.0)


def test_on_demand_machines_that_the_budget_does_not_pay_are_left_out() -> None:
    market = bulk_market(1, zones=3)
    cheap = replace(market, price=np.full_like(market.price, 0.2))
    found = backtest(cheap, JOB, starts=5, strategies=("on-demand", "durable"), budget_usd=2.0)
    assert [row.name for row in found.rows] == ["durable"]
    assert found.unpaid == "the budget pays no on-demand machine at $3.00/h: raise the budget"


@pytest.mark.parametrize("starts", [0, -5])
def test_no_starts_are_refused(starts: int, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"starts is {starts}: at least one is needed"):
        backtests(write_traces(tmp_path), JOB, meaning="up", starts=starts)


def test_a_far_deadline_costs_no_longer_windows_than_one_that_the_work_can_use() -> None:
    assert window_h(JOB) == 18
    assert window_h(replace(JOB, deadline_h=None)) == 36
    assert window_h(replace(JOB, deadline_h=50_000.0)) == patience_h(JOB) < 2000
