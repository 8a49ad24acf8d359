"""Price histories: changes only, lookups with their age, percentiles, and files that are wrong."""

from __future__ import annotations

import gzip
import math
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepvm.catalog import Instance
from deepvm.errors import MalformedFile, UnknownName, UsageError
from deepvm.market.history import PriceHistory
from tests.support.small_markets import small_catalog

HEADER = "cloud,type,place,market,date,usd_per_h\n"
ROWS = """aws,g4dn.xlarge,use1-az1,spot,2026-08-01,0.20
aws,g4dn.xlarge,use1-az1,spot,2026-08-03,0.20
aws,g4dn.xlarge,use1-az1,spot,2026-08-05,0.30
aws,g4dn.xlarge,use1-az1,spot,2026-08-08,
aws,g4dn.xlarge,us-east-1,ondemand,2026-08-01,0.526
"""


@pytest.fixture
def history(tmp_path: Path) -> PriceHistory:
    path = tmp_path / "prices.csv"
    path.write_text(HEADER + ROWS)
    return PriceHistory.read(path)


def day(number: int) -> date:
    return date(2026, 8, number)


def test_only_changes_are_kept(history: PriceHistory) -> None:
    days, usd = history.changes["aws", "g4dn.xlarge", "use1-az1", "spot"]
    assert [date.fromordinal(d).day for d in days] == [1, 5, 8]
    assert usd[:2].tolist() == [0.2, 0.3]
    assert math.isnan(usd[2])


def test_a_price_comes_with_its_age_and_the_day_of_its_change(history: PriceHistory) -> None:
    found = history.at("g4dn.xlarge", "use1-az1", "spot", day(4))
    assert found is not None
    assert (found.usd_per_h, found.since, found.age_days) == (0.2, day(1), 1)  # prices were looked up on the 3rd
    assert history.at("g4dn.xlarge", "use1-az1", "spot", day(8)) is None  # no longer offered
    assert history.at("g4dn.xlarge", "use1-az1", "spot", date(2026, 7, 31)) is None  # not yet known
    assert history.at("g4dn.xlarge", "us-east-1c", "on-demand", day(20)).age_days == 12  # type: ignore[union-attr]


def test_percentiles_count_every_day_once(history: PriceHistory) -> None:
    spot = ("g4dn.xlarge", "use1-az1", "spot")
    assert history.percentile(50, 7, *spot, until=day(7)) == pytest.approx(0.2)  # four days at 0.2, three at 0.3
    assert history.percentile(75, 4, *spot, until=day(7)) == pytest.approx(0.3)
    assert history.percentile(50, 3, "g4dn.xlarge", "nowhere", "spot") is None
    with pytest.raises(UsageError, match="0 to 100"):
        history.percentile(101, 3, *spot)


def test_an_unknown_type_is_refused_with_the_nearest_name(history: PriceHistory) -> None:
    with pytest.raises(UnknownName, match=r"did you mean g4dn\.xlarge"):
        history.keys("g4dn.xlrge")


def test_a_written_history_reads_the_same_and_repeats_its_bytes(history: PriceHistory, tmp_path: Path) -> None:
    first, second = tmp_path / "a.csv.gz", tmp_path / "b.csv.gz"
    history.write(first)
    again = PriceHistory.read(first)
    again.write(second)
    assert first.read_bytes() == second.read_bytes()
    assert again.seen.tolist() == history.seen.tolist()
    assert gzip.decompress(first.read_bytes()).startswith(b"#seen=2026-08-01 2026-08-03")
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 60), st.sampled_from([0.1, 0.2, 0.3, math.nan])), max_size=25))
def test_changes_give_the_price_of_every_day(entries: list[tuple[int, float]]) -> None:
    daily = dict(entries)  # one price a day
    start = day(1).toordinal()
    rows = [("aws", "t", "z", "spot", start + at, usd) for at, usd in daily.items()]
    history = PriceHistory.of(rows)
    now = math.nan
    for at in range(62):
        now = daily.get(at, now)
        found = history.at("t", "z", "spot", date.fromordinal(start + at))
        assert (None if math.isnan(now) else now) == (None if found is None else found.usd_per_h)


def test_dated_catalogues_become_a_history_and_a_missing_offer_ends() -> None:
    machines = [Instance(name="a", vcpus=4, memory_gib=8)]
    places = (("r1", None), ("r1", "r1a"))
    before, after = (small_catalog(machines, [(0, 0, 1.0)], [(0, 1, usd)], places=places) for usd in (0.3, 0.4))
    history = PriceHistory.from_catalogs([(day(1), before), (day(3), after)])
    assert history.at("a", "r1a", "spot", day(2)).usd_per_h == 0.3  # type: ignore[union-attr]
    assert history.at("a", "r1a", "spot", day(3)).usd_per_h == 0.4  # type: ignore[union-attr]
    assert history.at("a", "r1", "on-demand", day(3)).since == day(1)  # type: ignore[union-attr]
    gone = PriceHistory.from_catalogs([(day(1), before), (day(3), replace(after, prices={}))])
    assert gone.at("a", "r1a", "spot", day(2)) is not None
    assert gone.at("a", "r1a", "spot", day(3)) is None
    with pytest.raises(UsageError, match="does not follow"):
        PriceHistory.from_catalogs([(day(3), before), (day(1), after)])


def test_merging_lets_the_newer_import_win(history: PriceHistory) -> None:
    newer = PriceHistory.of([("aws", "g4dn.xlarge", "use1-az1", "spot", day(5).toordinal(), 0.4)])
    both = history.merged(newer)
    assert both.at("g4dn.xlarge", "use1-az1", "spot", day(6)).usd_per_h == 0.4  # type: ignore[union-attr]
    assert both.at("g4dn.xlarge", "use1-az1", "spot", day(4)).usd_per_h == 0.2  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", r"line 1: is not a price history: the first line must be cloud,type"),
        ("type,place\n", r"line 1: is not a price history"),
        (HEADER + "aws,t,z,spot,2026-08-01\n", r"line 2: has 5 columns, a price history has 6"),
        (
            HEADER + "aws,t,z,spot,2026-08-01,0.1\naws,t,z,spot,2026-13-01,0.1\n",
            r"line 3: date is '2026-13-01', not a day",
        ),
        (
            HEADER + "aws,t,z,spot,2026-08-01,-0.1\n",
            r"line 2: usd_per_h is '-0\.1', not a price from 1e-06 to 1e\+06, or empty",
        ),
        (HEADER + "aws,t,z,spot,2026-08-01,0\n", r"line 2: usd_per_h is '0'"),
        (HEADER + "aws,t,z,spot,2026-08-01,nan\n", r"line 2: usd_per_h is 'nan'"),
        (HEADER + "aws,t,z,spot,2026-08-01,1e999\n", r"line 2: usd_per_h"),
        (HEADER + "aws,t,z,spot,2026-08-01,cheap\n", r"line 2: usd_per_h is 'cheap'"),
        (HEADER + "aws,t,z,reserved,2026-08-01,1\n", r"line 2: market is 'reserved', not spot or ondemand"),
        (HEADER + "aws,,z,spot,2026-08-01,1\n", r"line 2: cloud, type or place is empty"),
        (
            HEADER + "aws,t,z,spot,2026-08-01,1\naws,t,z,spot,2026-08-01,2\n",
            r"t in z \(spot\) has two prices on 2026-08-01",
        ),
        (HEADER + 'aws,t,"z,spot,2026-08-01,1\n', r"is not valid CSV"),
        ("#seen=2026-99-01\n" + HEADER, r"line 1: has a day that is not valid"),
        ("#seen=2026-08-01\n" + HEADER + "aws,t,z,spot,2026-08-01,x\n", r"line 3: usd_per_h is 'x'"),
    ],
)
def test_a_malformed_file_gets_one_sentence_with_its_line(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "prices.csv"
    path.write_text(text)
    with pytest.raises(MalformedFile, match=problem):
        PriceHistory.read(path)


def test_files_that_are_no_text_or_damaged_or_missing_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "prices.csv.gz"
    with pytest.raises(MalformedFile, match="cannot be read"):
        PriceHistory.read(path)
    path.write_bytes(gzip.compress((HEADER + ROWS).encode())[:-12])
    with pytest.raises(MalformedFile, match="damaged gzip"):
        PriceHistory.read(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(MalformedFile, match="not UTF-8"):
        PriceHistory.read(path)


def test_an_empty_history_says_so(tmp_path: Path) -> None:
    path = tmp_path / "prices.csv"
    path.write_text(HEADER)
    with pytest.raises(UsageError, match="the price history is empty"):
        _ = PriceHistory.read(path).last
