"""``deepvm simulate`` and ``backtest``: what words become, and what a result looks like."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepvm.cli.app import run
from deepvm.cli.simulate.shown import show
from deepvm.performance.job import Component, Job
from deepvm.simulate import GangJob
from deepvm.simulate.strategies import NAMES
from tests.cli.conftest import Screen


class Stopped(Exception): ...


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the simulator is asked; it does not run."""
    found: list[Any] = []

    def called(*words: Any, progress: Any, **options: Any) -> None:
        progress("a strategy", 1, 2)
        found.append((words, options))
        raise Stopped

    for name in ("simulate.simulate", "simulate.backtests", "backtest.backtests"):
        monkeypatch.setattr(f"deepvm.cli.simulate.{name}", called)
    return found


def ask(*words: str) -> None:
    with pytest.raises(Stopped):
        run(list(words))


USUAL: dict[str, Any] = {
    "strategies": ("on-demand", "planned", "oracle"), "spot_usd": None, "on_demand_usd": None, "accelerator": None,
    "zones": 5, "days": 30.0, "budget_usd": None, "rates": None, "confidence": 0.95, "starts": 300, "seed": 0,
}  # fmt: skip


def test_without_options_eight_machines_train_a_day(asked: list[Any]) -> None:
    ask("simulate")
    (words, options), *_ = asked
    assert words == (
        GangJob(work_h=24.0, machines=8, checkpoint_bytes=6 * 10**9, deadline_h=None, usd_per_hour_of_waiting=0.0),
    )
    assert {**options, "rates": None} == USUAL


def test_options_replace_them(asked: list[Any], tmp_path: Path) -> None:
    job = Job(
        name="j", parameters=1, trainable_parameters=1, components={"m": Component(bytes=70)}, gradient_bytes=4
    )  # fmt: skip
    job.write(tmp_path / "job.json")
    words = "--workers 3 --work 5h --deadline 9h --usd-per-hour-of-waiting 2 --confidence 0.9 --starts 7 --seed 4"
    words += " --spot-price 0.2 --on-demand-price 0.5 --gpu L4 --zones 2 --days 3 --compare --budget 4"
    ask("simulate", *words.split(), "--job", str(tmp_path / "job.json"))
    ask("simulate", *words.split(), "--job", str(tmp_path / "job.json"), "--checkpoint-size", "1GB")
    first, second = asked
    made = GangJob(work_h=5.0, machines=3, checkpoint_bytes=70, deadline_h=9.0, usd_per_hour_of_waiting=2.0)
    assert first[0] == (made,)
    assert second[0][0].checkpoint_bytes == 10**9
    wanted = {
        **USUAL, "strategies": NAMES, "spot_usd": 0.2, "on_demand_usd": 0.5, "accelerator": "L4", "zones": 2,
        "days": 3.0, "confidence": 0.9, "starts": 7, "seed": 4, "budget_usd": 4.0,
    }  # fmt: skip
    assert {**first[1], "rates": None} == wanted


def test_traces_and_a_budget_set_the_number_of_machines(asked: list[Any], tmp_path: Path) -> None:
    ask("simulate", "--traces", str(tmp_path), "--meaning", "up", "--budget", "4")
    ask("simulate", "--traces", str(tmp_path), "--budget", "4", "--workers", "2")
    ask("backtest", "--traces", str(tmp_path), "--strategy", "oracle", "--strategy", "planned")
    ask("backtest", "--traces", str(tmp_path), "--spot-price", "0.3")
    filled, counted, chosen, priced = asked
    assert (filled[0][0], filled[1]["meaning"], filled[1]["fill_budget"]) == (tmp_path, "up", True)
    assert (counted[1]["meaning"], counted[1]["fill_budget"]) == (None, False)
    assert (chosen[1]["strategies"], chosen[1]["prices"], chosen[1]["spot_usd"]) == (("oracle", "planned"), None, None)
    assert (priced[1]["strategies"], priced[1]["spot_usd"]) == (NAMES, 0.3)


def test_what_has_no_effect_without_traces_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "--meaning", "up"]) == 2
    assert "--meaning has no effect without --traces" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--seed -1", "the seed is negative: it must be an integer from 0 to 9223372036854775807"),
        ("--seed 9223372036854775808", "the seed is too large"),
        ("--days nan", "a market of nan days: it must be from one tick"),
        ("--days inf", "a market of inf days"),
        ("--days 0", "a market of 0 days"),
        ("--days 1e300", "a market of 1e+300 days"),
    ],
)
def test_a_market_that_cannot_be_drawn_is_one_sentence(
    words: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["simulate", "--workers", "8", "--gpu", "V100", *words.split()]) == 2
    assert told in " ".join(capsys.readouterr().err.split())


def row(name: str, cost: float, *, oracle: bool = False, regret: float | None = 0.25) -> dict[str, Any]:
    figures = {"mean": cost, "p5": cost / 2, "p50": cost, "p95": cost * 2}
    if oracle:
        return {"name": name, "cost_usd": figures, "hours": None, "missed": None, "lost_hours": None, "moves": None,
                "regret": regret}  # fmt: skip
    hours = {"mean": 5.0, "p5": 4.0, "p50": 5.25, "p95": 9.0}
    return {"name": name, "cost_usd": figures, "hours": hours, "missed": 0.125, "lost_hours": 0.375, "moves": 1.5,
            "regret": regret}  # fmt: skip


def result(markets: int, *, deadline_h: float | None, coverage: float | None, known: float | None) -> Any:
    rows = [row("planned", 999.96), row("durable", 1000.0, regret=None), row("oracle", 12.34, oracle=True, regret=0.0)]
    document = {
        "strategies": rows, "starts": 40, "coverage": coverage, "worse_than": ["planned is worse than durable"],
        "notes": ["a [note]"], "left_out": {"anchor": "no [anchor]"},
        "history": {"hours": 720.4, "known_hours": known, "note": "not enough history"},
        "markets": [{"market": f"market [{number}]", "strategies": rows[:1]} for number in range(markets)],
    }  # fmt: skip
    job = GangJob(work_h=24.0, machines=8, checkpoint_bytes=6 * 10**9, deadline_h=deadline_h)
    gangs = [SimpleNamespace(job=replace(job, machines=8 - 2 * number)) for number in range(markets)]
    return SimpleNamespace(job=job, markets=gangs, to_json=lambda: document)


@pytest.mark.usefixtures("terminal")
def test_results_are_tables_with_remarks(screen: Screen) -> None:
    show(result(1, deadline_h=None, coverage=None, known=None))
    show(result(2, deadline_h=36.5, coverage=0.955, known=100.4))
    screen("simulate")
