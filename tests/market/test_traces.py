"""Traces and markets that are wrong: each gets one clear sentence."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepvm.errors import MalformedFile, UsageError
from deepvm.market.market import Market, market_of
from deepvm.market.trace import Trace, TraceKind, load_trace, load_traces, region_of


def written(tmp_path: Path, document: Any, *, name: str = "us-east-1a_v100_1.json", nodes: int = 4) -> Path:
    path = tmp_path / "availability" / f"{nodes}-node" / "set" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def trace_of(*up: int, zone: str = "us-east-1a", **fields: Any) -> Trace:
    given = {"machines": 4, "gap_s": 600.0, "kind": TraceKind.LAUNCH, **fields}
    return Trace(zone=zone, up=np.array(up, np.int32), **given)


def test_a_missing_folder_is_named_before_a_missing_meaning(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nope is not a folder of traces"):
        load_traces(tmp_path / "nope", meaning=None)
    with pytest.raises(UsageError, match="the meaning of the traces is not given: write --meaning up"):
        load_traces(tmp_path, meaning=None)


def test_the_meaning_turns_counts_around_and_is_never_guessed(tmp_path: Path) -> None:
    path = written(tmp_path, {"metadata": {"gap_seconds": 600}, "data": [4, 0, 1]})
    assert load_trace(path, meaning="up").up.tolist() == [4, 0, 1]
    assert load_trace(path, meaning="preempted").up.tolist() == [0, 4, 3]
    for meaning in (None, "", "down", "UP"):
        with pytest.raises(UsageError, match="write --meaning up if they count machines that are up"):
            load_trace(path, meaning=meaning)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ("", "is empty|not"),
        ("[1, 2]", "the document"),
        ("{}", "metadata"),
        ({"metadata": {}, "data": [1]}, "gap_seconds"),
        ({"metadata": {"gap_seconds": 0}, "data": [1]}, "gap_seconds"),
        ({"metadata": {"gap_seconds": -600}, "data": [1]}, "gap_seconds"),
        ({"metadata": {"gap_seconds": 600}}, "data"),
        ({"metadata": {"gap_seconds": 600}, "data": []}, "data is empty"),
        ({"metadata": {"gap_seconds": 600}, "data": [1, -1]}, "data has -1, not a number from 0"),
        ({"metadata": {"gap_seconds": 600}, "data": [1, 0.5]}, "not whole numbers from 0"),
        ({"metadata": {"gap_seconds": 600}, "data": [1, "2"]}, "not a number"),
        ({"metadata": {"gap_seconds": 600}, "data": [1, True]}, "not a number"),
        ({"metadata": {"gap_seconds": 600}, "data": [1, *[None] * 7, 1]}, r"a gap \(null\) of 1.2 h from entry 1: cut"),
        ({"metadata": {"gap_seconds": 600}, "data": [None]}, "not whole numbers from 0"),
        ({"metadata": {"gap_seconds": 600}, "data": [9]}, "its folder is of 4 machines"),
        ({"metadata": {"gap_seconds": 600}, "data": [10**400]}, "data has 10000"),
        ({"metadata": {"gap_seconds": 600}, "data": [1], "prices": [10**400]}, "prices has 10000"),
        ({"metadata": {"gap_seconds": 600}, "data": [1], "prices": [1e308]}, "prices has 1e"),
        ({"metadata": {"gap_seconds": 600}, "data": [1], "prices": [1, 2]}, "1 ticks and 2 prices"),
        ({"metadata": {"gap_seconds": 600}, "data": [1], "prices": [-1]}, "prices has -1, not a number from 0"),
        ({"metadata": {"gap_seconds": 600, "start_time": "yesterday"}, "data": [1]}, "not an ISO date"),
    ],
)
def test_a_malformed_trace_gets_one_sentence(tmp_path: Path, document: Any, problem: str) -> None:
    path = written(tmp_path, document)
    with pytest.raises(MalformedFile, match=problem) as caught:
        load_trace(path, meaning="up")
    assert "\n" not in str(caught.value)
    assert path.name in str(caught.value)


def test_folders_make_markets_and_an_empty_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no trace"):
        load_traces(tmp_path, meaning="up")
    with pytest.raises(UsageError, match="is not a folder"):
        load_traces(tmp_path / "absent", meaning="up")
    written(tmp_path, {"metadata": {"gap_seconds": 600}, "data": [4, 0]})
    (traces,) = load_traces(tmp_path, meaning="up").values()
    assert (traces[0].zone, traces[0].accelerator, traces[0].machines, traces[0].kind) == (
        "us-east-1a", "V100", 4, TraceKind.LAUNCH,
    )  # fmt: skip


START = datetime(2026, 8, 1, tzinfo=timezone.utc)
PRICED = {"spot_usd": 1.0, "on_demand_usd": 3.0}


@pytest.mark.parametrize(
    ("traces", "problem"),
    [
        ([], "at least one trace"),
        ([trace_of(1), trace_of(2)], "us-east-1a has two traces"),
        ([trace_of(1), trace_of(2, zone="b", kind=TraceKind.HELD)], "launches and of held machines"),
        ([trace_of(1, start=START), trace_of(2, zone="b")], "b has no start_time and others have"),
        ([trace_of(1, start=START), trace_of(2, zone="b", start=datetime(2020, 1, 1, tzinfo=timezone.utc))], "overlap"),
    ],
)
def test_traces_that_do_not_fit_together_are_refused_by_name(traces: list[Trace], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        market_of(traces, **PRICED)


def test_zones_of_mixed_ticks_share_the_finest_clock_and_the_common_time() -> None:
    later = datetime.fromtimestamp(START.timestamp() + 600, tz=timezone.utc)
    coarse, fine = trace_of(4, 2, 0, start=START), trace_of(1, 2, 3, 4, zone="b", gap_s=300.0, start=later)
    market = market_of([coarse, fine], **PRICED)
    assert (market.tick_s, market.capacity.tolist()) == (300.0, [[2, 2, 0, 0], [1, 2, 3, 4]])
    assert market.start_s == later.timestamp()


def test_ticks_that_do_not_divide_hold_what_was_last_seen() -> None:
    market = market_of([trace_of(4, 2), trace_of(1, 2, 3, 4, zone="b", gap_s=250.0)], **PRICED)
    assert (market.tick_s, market.capacity.tolist()) == (250.0, [[4, 4, 4, 2], [1, 2, 3, 4]])


def test_short_gaps_are_filled_with_the_fewer_machines_around_them(tmp_path: Path) -> None:
    data = [None, 3, None, 1, None, None, 4, None]
    path = written(tmp_path, {"metadata": {"gap_seconds": 600}, "data": data})
    assert load_trace(path, meaning="up").up.tolist() == [3, 3, 1, 1, 1, 1, 4, 4]


def test_a_later_part_of_a_recording_begins_at_its_offset(tmp_path: Path) -> None:
    metadata = {"gap_seconds": 600, "start_time": "2026-08-01T00:00:00+00:00", "tick_offset": 6}
    dated = load_trace(written(tmp_path, {"metadata": metadata, "data": [1, 2]}), meaning="up")
    assert dated.start == datetime(2026, 8, 1, 1, tzinfo=timezone.utc)
    undated = [trace_of(1, 2, 3, first_s=600.0), trace_of(3, 2, 1, zone="b")]
    assert market_of(undated, **PRICED).capacity.tolist() == [[1, 2], [2, 1]]


def test_a_folder_may_hold_other_files_and_be_one_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, {"metadata": {"gap_seconds": 600}, "data": [4, 0]})
    for name, text in (("package.json", "{}"), ("._us-east-1a_v100_1.json", "\0\5"), ("README.md", "about")):
        (path.parent / name).write_text(text)
    (path.parent / "list.json").write_text("[1, 2]")
    whole, one_set = load_traces(tmp_path, meaning="up"), load_traces(path.parent, meaning="up")
    monkeypatch.chdir(path.parent)
    here = load_traces(Path(), meaning="up")
    assert [len(traces) for traces in whole.values()] == [1]
    assert set(one_set) == set(here) == {path.parent.name}
    assert {trace.machines for sets in (whole, one_set, here) for (trace,) in sets.values()} == {4}


def test_a_market_without_any_machine_is_a_market_and_its_gang_is_never_up() -> None:
    market = market_of([trace_of(0, 0, 0)], **PRICED)
    assert not (market.capacity >= 1).any()
    assert market.hours == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"price": np.full((1, 2), -1.0)}, "not negative"),
        ({"price": np.full((1, 2), np.nan)}, "finite"),
        ({"on_demand_usd": np.array([-1.0])}, "on-demand price for each zone"),
        ({"on_demand_usd": np.array([np.nan])}, "on-demand price for each zone"),
        ({"zones": ()}, "a market of 0 zones"),
    ],
)
def test_a_market_of_impossible_values_is_refused(change: dict[str, Any], problem: str) -> None:
    given = {
        "zones": ("a",), "tick_s": 600.0, "capacity": np.ones((1, 2), np.int32), "price": np.ones((1, 2)),
        "on_demand_usd": np.ones(1),
    }  # fmt: skip
    with pytest.raises(UsageError, match=problem):
        Market(**{**given, **change})


def test_prices_that_are_missing_are_asked_for() -> None:
    with pytest.raises(UsageError, match="has no prices: give spot_usd"):
        market_of([trace_of(1)], on_demand_usd=3.0)
    with pytest.raises(UsageError, match="no on-demand price is known for us-east-1a"):
        market_of([trace_of(1)], spot_usd=1.0)
    unknown = trace_of(1, 1, prices=np.full(2, np.nan))
    with pytest.raises(UsageError, match="no price at all"):
        market_of([unknown], **PRICED)
    partly = trace_of(1, 1, 1, prices=np.array([np.nan, 2.0, np.nan]))
    assert market_of([partly], on_demand_usd=3.0).price.tolist() == [[2.0, 2.0, 2.0]]


def test_parts_of_a_market() -> None:
    market = market_of([trace_of(1, 2, 3, start=START), trace_of(4, 4, 4, zone="b", start=START)], **PRICED)
    assert market.only([1]).zones == ("b",)
    later = market.between(1, 3)
    assert (later.ticks, later.start_s) == (2, START.timestamp() + 600)
    for first, last in ((2, 2), (-1, 2), (0, 4)):
        with pytest.raises(UsageError, match="outside of a market of 3 ticks"):
            market.between(first, last)


@pytest.mark.parametrize(
    ("zone", "region"),
    [("us-east-1c", "us-east-1"), ("us-central1-a", "us-central1"), ("use1-az4", "use1"), ("eastus", "eastus")],
)
def test_a_zone_has_a_region(zone: str, region: str) -> None:
    assert region_of(zone) == region
