"""What users give to simulate and backtest: price files, budgets, plans, jobs, profiles, folders of any kind."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepvm.cli.app import run
from deepvm.errors import Infeasible
from deepvm.market import PriceHistory, Trace, TraceKind
from deepvm.market.reference_prices import machine_types, zone_id_region
from deepvm.performance.measured import Samples
from deepvm.performance.profile import OverheadPoint
from deepvm.simulate import GangJob, Rates, backtest, backtests
from deepvm.simulate.inputs.dated_prices import zone_prices
from deepvm.simulate.inputs.measured_rates import measured_rates
from deepvm.simulate.strategies import NAMES
from tests.support.simulate.markets import bulk_market, write_traces

JOB = GangJob(work_h=6.0, machines=8, checkpoint_bytes=6 * 10**9, deadline_h=9.0)
HEAD = "cloud,type,place,market,date,usd_per_h\n"
ROWS = (
    "aws,p3.2xlarge,use1-az1,spot,2025-10-01,0.9\naws,p3.2xlarge,use1-az2,spot,2025-10-01,1.1\n"
    "aws,p3.2xlarge,use1-az2,spot,2025-10-05,1.3\naws,p3.2xlarge,us-east-1,ondemand,2025-10-01,3.0\n"
)


def price_file(folder: Path, rows: str = ROWS) -> Path:
    path = folder / "prices.csv"
    path.write_text(HEAD + rows)
    return path


def without(folder: Path, *names: str) -> Path:
    """Remove members of every trace."""
    for path in folder.rglob("*.json"):
        document = json.loads(path.read_text())
        for name in names:
            document.pop(name, None)
            document["metadata"].pop(name, None)
        path.write_text(json.dumps(document))
    return folder


def trace(days: int = 8, **fields: Any) -> Trace:
    given = {
        "zone": "us-east-1c", "machines": 16, "gap_s": 3600.0, "kind": TraceKind.LAUNCH, "accelerator": "V100",
        "start": datetime(2025, 10, 2, tzinfo=timezone.utc), **fields,
    }  # fmt: skip
    return Trace(up=np.full(days * 24, 8, np.int32), **given)


def test_prices_of_a_file_are_those_of_the_day_and_the_median_of_the_region(tmp_path: Path) -> None:
    history = PriceHistory.read(price_file(tmp_path))
    found = zone_prices(history, trace(), "set")
    assert found is not None
    assert found.spot[0] == pytest.approx(1.0)
    assert found.spot[-1] == pytest.approx(1.1)  # 0.9 and, from 5 October, 1.3
    assert (found.on_demand_usd, found.age_days) == (3.0, 4)
    assert found.note == "prices of p3.2xlarge in us-east-1, the median of its 2 zones, at most 4 days old"
    later = zone_prices(history, trace(start=datetime(2026, 1, 1, tzinfo=timezone.utc)), "set")
    assert later is not None
    assert later.age_days > 80
    earlier = zone_prices(history, trace(start=None), "aws-09-27-2025")
    assert earlier is not None
    assert "from 4 days after the trace began" in earlier.note
    assert zone_prices(history, trace(start=None), "set") is None
    assert zone_prices(history, trace(accelerator="H100"), "set") is None


def test_hosts_and_accelerators_of_google_add_up(tmp_path: Path) -> None:
    rows = "gcp,a3-highgpu-1g,us-central1-a,spot,2025-10-01,0.5\ngcp,acc:H100:1,us-central1,spot,2025-10-01,2.0\n"
    found = zone_prices(
        PriceHistory.read(price_file(tmp_path, rows)), trace(zone="us-central1-a", accelerator="H100"), "set"
    )
    assert found is not None
    assert found.spot.tolist() == [2.5] * len(found.spot)
    assert machine_types("V100", 8, "us-west-2a") == ("p3.16xlarge",)
    assert zone_id_region("ap-southeast-1") == "apse1"


def test_a_price_file_replaces_what_would_be_assumed_and_says_how_old_it_was(tmp_path: Path) -> None:
    folder, history = without(write_traces(tmp_path), "prices"), PriceHistory.read(price_file(tmp_path))
    assumed, dated = (
        backtests(folder, JOB, meaning="up", starts=4, strategies=("on-demand", "planned"), prices=prices)
        for prices in (None, history)
    )
    assert any("70% of on-demand is assumed, the median of AWS's GPU types" in note for note in assumed.notes)
    assert any("spot prices of p3.2xlarge" in note and "days old" in note for note in dated.notes)
    assert any("on-demand prices of the price file" in note for note in dated.notes)
    assert dated.joined()[1].cost_usd.mean() < assumed.joined()[1].cost_usd.mean()


def test_a_budget_sets_the_machines_and_bounds_what_they_cost(tmp_path: Path) -> None:
    folder = write_traces(tmp_path)
    result = backtests(folder, JOB, meaning="up", starts=6, budget_usd=9.0, fill_budget=True)
    (market,) = result.to_json()["markets"]
    assert market["machines"] == 8  # at $1 and 2 memory nodes
    for row in result.markets[0].rows:
        if row.outcomes is not None:
            busy = row.outcomes.hours - row.outcomes.waiting_h
            assert (row.outcomes.spot_usd + row.outcomes.on_demand_usd <= 9.0 * busy * (1 + 1e-9)).all()
    with pytest.raises(Infeasible, match=r"one machine costs \$1\.\d\d/h, the budget leaves \$0\.0"):
        backtests(folder, JOB, meaning="up", budget_usd=0.5, fill_budget=True)


def test_too_few_on_demand_machines_are_not_rented_to_miss_a_deadline() -> None:
    market = bulk_market(4, zones=3, days=5)
    planned = backtest(market, JOB, starts=20, strategies=("planned",), budget_usd=14.0).rows[0].outcomes
    assert planned is not None
    assert planned.on_demand_h.max() == 0  # 4 of 8 machines would take 12 h
    with pytest.raises(Infeasible, match=r"the budget pays no on-demand machine at \$3\.00/h: raise the budget"):
        backtest(market, JOB, starts=2, strategies=("on-demand",), budget_usd=2.0)


def test_an_anchor_and_its_gang_fit_the_budget_together() -> None:
    market = bulk_market(4, zones=3, days=12)
    market = replace(market, price=np.full_like(market.price, 1.0))
    job, budget_usd = replace(JOB, deadline_h=None), 8.5  # eight on spot, but not seven beside an anchor at $3
    found = backtest(market, job, starts=10, strategies=("single-anchor",), budget_usd=budget_usd)
    anchored = found.rows[0].outcomes
    assert anchored is not None
    assert anchored.finished.all()
    speed = anchored.trained_h.mean() / (anchored.hours - anchored.waiting_h).mean()
    assert speed == pytest.approx(6 / 8, rel=0.1)  # five and the anchor
    paid = anchored.spot_usd + anchored.keeper_usd
    assert (paid <= budget_usd * anchored.hours * (1 + 1e-9)).all()


def test_sets_that_a_budget_cannot_show_are_left_out_and_the_others_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_traces(tmp_path, machines=1)
    dear = tmp_path / "availability" / "1-node" / "eight"
    dear.mkdir(parents=True)
    for path in (tmp_path / "availability" / "1-node" / "some-set").glob("*.json"):
        (dear / path.name.replace("_1.json", "_8.json")).write_text(path.read_text())
    words = ["backtest", "--traces", str(tmp_path), "--meaning", "up", "--work", "6h", "--starts", "4", "--json"]
    assert run([*words, "--budget", "20"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [market["market"] for market in document["markets"]] == ["availability/1-node/some-set"]
    unpaid = "the budget pays no on-demand machine at $24.48/h: raise the budget"
    assert list(document["left_out"].values()) == [unpaid], "on 19 machines, no strategy ends there"
    assert run([*words, "--budget", "3.4"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in document["strategies"]] == list(NAMES)
    assert [[row["name"] for row in market["strategies"]] for market in document["markets"]] == [
        list(NAMES[1:]), list(NAMES)
    ]  # fmt: skip
    assert f"availability/1-node/eight: on-demand is left out: {unpaid}" in document["notes"]
    assert run([*words, "--budget", "0.3"]) == 3


def test_the_heading_has_the_machines_that_were_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(write_traces(tmp_path))
    words = ["backtest", "--traces", folder, "--meaning", "up", "--work", "6h", "--starts", "2", "--budget", "2"]
    assert run([*words, "--strategy", "durable"]) == 0
    assert capsys.readouterr().out.startswith("1 machine, 6 h of work")


def test_on_demand_prices_of_two_sources_name_their_zones(tmp_path: Path) -> None:
    folder = without(write_traces(tmp_path, zones=2), "prices")
    one = next(folder.rglob("us-east-1b*.json"))
    one.rename(one.with_name("us-west-2b_v100_1.json"))
    history = PriceHistory.read(price_file(tmp_path))
    found = backtests(folder, JOB, meaning="up", starts=3, strategies=("durable",), prices=history)
    title = "availability/16-node/some-set"
    assert f"{title}: on-demand prices of the price file in us-east-1a" in found.notes
    assert f"{title}: on-demand at the list price (--on-demand-price replaces it) in us-west-2b" in found.notes


def test_a_deadline_that_no_strategy_keeps_names_the_nearest(tmp_path: Path) -> None:
    folder = write_traces(tmp_path)
    job = replace(JOB, deadline_h=6.2)
    result = backtests(folder, job, meaning="up", starts=20, strategies=("durable", "no-checkpoint"))
    (note,) = (note for note in result.to_json()["notes"] if "the nearest that can be kept is" in note)
    nearest_h = float(note.rpartition(" is ")[2].removesuffix(" h"))
    assert result.markets[0].nearest_h is not None
    assert 6.2 < result.markets[0].nearest_h <= nearest_h
    with pytest.raises(Infeasible, match="nearest that can be kept"):
        backtests(folder, replace(JOB, deadline_h=6.001), meaning="up")


def test_profiles_replace_the_overheads_that_they_measured() -> None:
    class One:
        overheads = tuple(
            OverheadPoint(name=name, state_bytes=10**9, seconds=Samples(seconds=(seconds,)))
            for name, seconds in (("save_stall", 0.02), ("save_remote", 2.0), ("detection", 1.0), ("regroup", 3.0))
        )

    rates = measured_rates([One()], 10**9)  # type: ignore[list-item]
    assert (rates.stall_s, rates.memory_bytes_per_s, rates.regroup_s) == (0.02, 5e8, 4.0)
    assert (rates.start_s, rates.restore_bytes_per_s) == (Rates().start_s, Rates().restore_bytes_per_s)
    assert measured_rates([], 10**9) == Rates()


def test_any_tree_of_traces_is_read_or_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = without(write_traces(tmp_path, zones=1, machines=1), "prices", "start_time")
    words = ["--meaning", "up", "--work", "6h", "--deadline", "9h", "--starts", "3", "--json", "--workers", "1"]
    one_set = next(folder.rglob("*.json")).parent
    for where in (folder, one_set):
        assert run(["backtest", "--traces", str(where), *words]) == 0
        assert json.loads(capsys.readouterr().out)["history"]["zones"] == 1
    path = one_set / "us-east-1b_v100_1.json"
    for document in ({"metadata": {"gap_seconds": 600}, "data": [-1]}, {"metadata": {}, "data": [1]}):
        path.write_text(json.dumps(document))
        assert run(["backtest", "--traces", str(folder), *words]) == 2
        error = capsys.readouterr().err
        assert "not a valid trace" in error
        assert "Traceback" not in error
    path.write_text(json.dumps({"metadata": {"gap_seconds": 600}, "data": [1] * 2000, "prices": [0] * 2000}))
    free = path.rename(path.with_name("us-east-1a_v100_1.json"))
    assert run(["backtest", "--traces", str(folder), *words, "--strategy", "tiering+move"]) == 0
    assert json.loads(capsys.readouterr().out)["strategies"][0]["regret"] is None
    free.write_text(json.dumps({"metadata": {"gap_seconds": 600}, "data": [1] * 2000, "prices": [None] * 2000}))
    assert run(["backtest", "--traces", str(folder), *words, "--strategy", "planned"]) == 0
    assert "of on-demand is assumed" in capsys.readouterr().out
    nothing = next(folder.rglob("*.json"))
    nothing.write_text(json.dumps({"metadata": {"gap_seconds": 600}, "data": [0] * 500}))
    assert run(["backtest", "--traces", str(folder), *words]) == 3
    assert "it never has a machine" in " ".join(capsys.readouterr().err.split())


def test_a_plan_whose_machines_no_budget_pays_is_not_feasible(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    assert run(["plan", "--budget", "3", "-o", str(plan)]) == 0
    assert run(["simulate", str(plan), "--budget", "0.1", "--runs", "3", "--days", "10"]) == 3


def test_costs_of_a_row_are_rounded_alike_and_history_counts_without_a_promise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["backtest", "--traces", str(write_traces(tmp_path)), "--meaning", "up", "--work", "6h", "--workers", "1"]
    assert run([*words, "--starts", "20", "--strategy", "durable"]) == 0
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if line.lstrip().startswith("durable"))
    assert {len(cell.partition(".")[2]) for cell in row.replace(" to ", " ").split()[1:4]} == {2}
    assert "not enough history" not in out
    assert run([*words, "--starts", "3", "--strategy", "durable", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["history"]["enough"] is True


def test_a_plan_gives_its_work_and_deadline_and_both_spellings_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, folder = tmp_path / "plan.json", str(write_traces(tmp_path / "traces"))
    document = {
        "request": {"checkpoint_bytes": 10**9, "work_eflops_h": 600.0, "deadline_s": 9 * 3600},
        "recommendations": [
            {
                "performance": 100.0,
                "roles": [{"role": "worker", "instance": "p3.2xlarge", "count": 4, "usd_per_hour": 0.9}],
            }
        ],
        "instances": [{"instance": "p3.2xlarge", "accelerator": "V100", "spot_usd": 0.9, "on_demand_usd": 3.0}],
    }
    plan.write_text(json.dumps(document))
    for words in (
        ["backtest", str(plan), "--traces", folder, "--meaning", "up", "--starts", "2", "--strategy", "planned"],
        ["simulate", str(plan), "--trace", folder, "--meaning", "up", "--runs", "2"],
        ["simulate", str(plan), "--days", "9", "--starts", "3"],
    ):
        assert run(words) == 0
        assert "4 machines, 6 h of work, 1 GB of checkpoint, deadline 9 h" in capsys.readouterr().out
    without(tmp_path / "traces", "prices")
    words = ["backtest", str(plan), "--traces", folder, "--meaning", "up", "--starts", "2", "--strategy", "durable"]
    assert run(words) == 0
    assert "spot at $0.9/h, the plan's price" in (shown := capsys.readouterr().out)
    assert "on-demand at $3/h, the plan's price" in shown
    assert run([*words, "--spot-price", "0.8"]) == 0
    assert "spot at $0.8/h, as given" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "value"), [("usd_per_hour", 5e-324), ("usd_per_hour", 0), ("performance", 5e-324)])
def test_a_plan_with_a_price_that_nobody_can_pay_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, value: float
) -> None:
    role = {"role": "worker", "instance": "p3.2xlarge", "count": 4, "usd_per_hour": 0.9}
    best: dict[str, Any] = {"performance": 100.0, "roles": [role]}
    (role if name in role else best)[name] = value
    document = {
        "request": {"checkpoint_bytes": 10**9, "work_eflops_h": 600.0},
        "recommendations": [best],
        "instances": [],
    }
    (tmp_path / "plan.json").write_text(json.dumps(document))
    assert run(["simulate", str(tmp_path / "plan.json"), "--json"]) == 2
    assert f"{name} is {value}, not a number from" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_a_backtest_is_drawn_the_same_every_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder, files = str(write_traces(tmp_path)), [tmp_path / "one.svg", tmp_path / "two.svg"]
    words = [
        "--meaning",
        "up",
        "--work",
        "6h",
        "--deadline",
        "9h",
        "--starts",
        "5",
        "--workers",
        "8",
        "--strategy",
        "planned",
    ]
    for file in files:
        assert run(["backtest", "--traces", folder, *words, "--figure", str(file)]) == 0
    assert files[0].read_bytes() == files[1].read_bytes()
    assert run(["backtest", "--traces", folder, *words, "--figure", str(tmp_path / "x.txt")]) == 2
