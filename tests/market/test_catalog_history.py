"""Catalogues over time: a git repository of daily files, a catalogue as of a day, differences, and the commands."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from deepvm.catalog import Catalog, Instance, Market, Prices, library
from deepvm.catalog.sources import git_history
from deepvm.cli.app import run
from deepvm.errors import SourceFailed, UsageError
from deepvm.market.catalog_history import (
    at_percentile,
    diff,
    histories,
    history_path,
    import_git,
    load_as_of,
    load_dated,
    load_history,
)
from deepvm.market.history import PriceHistory

HEADER = "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,AvailabilityZone"
GPU = "g4dn.xlarge,T4,1,4,16,,0.526,{usd},us-east-1,us-east-1a"
CPU = "c5.xlarge,,,4,8,,0.17,{usd},us-east-1,us-east-1a"
OLD = "p2.xlarge,K80,1,4,61,,0.9,0.27,us-east-1,us-east-1b"


def commit(repository: Path, when: str, *rows: str, path: str = "catalogs/v8/aws/vms.csv") -> None:
    """Commit one day's file. The dates are given, so that the repository is the same every time."""
    file = repository / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join((HEADER, *rows, "")))
    names = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    dates = {"GIT_AUTHOR_DATE": when, "GIT_COMMITTER_DATE": when, "GIT_CONFIG_NOSYSTEM": "1"}
    for words in (("add", "-A"), ("commit", "-q", "--allow-empty", "-m", when)):
        environment = {**os.environ, **names, **dates}
        subprocess.run(["git", "-C", str(repository), *words], check=True, timeout=30, env=environment)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPVM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    repository = tmp_path / "clone"
    repository.mkdir()
    subprocess.run(["git", "init", "-q", str(repository)], check=True, timeout=30)
    commit(repository, "2026-06-30T12:00:00+00:00", GPU.format(usd=0.09), path="catalogs/v7/aws/vms.csv")
    commit(repository, "2026-07-01T08:00:00+00:00", GPU.format(usd=0.10), CPU.format(usd=0.07), OLD)
    commit(repository, "2026-07-02T08:00:00+00:00", GPU.format(usd=9.99), CPU.format(usd=0.07), OLD)
    commit(repository, "2026-07-02T20:00:00+00:00", GPU.format(usd=0.20), CPU.format(usd=0.07), OLD)
    commit(repository, "2026-07-06T01:00:00+02:00", GPU.format(usd=0.30), CPU.format(usd=0.07))  # the 5th in UTC
    return repository


def july(first: int = 1, last: int = 31) -> dict[str, date]:
    return {"first": date(2026, 7, first), "last": date(2026, 7, last)}


def test_the_last_commit_of_every_day_counts_by_utc(clone: Path) -> None:
    found = git_history.snapshots(clone, provider="aws", **july())
    assert [one.day.day for one in found] == [1, 2, 5]
    assert all(one.path == "catalogs/v8/aws/vms.csv" for one in found)
    earlier = git_history.snapshots(clone, provider="aws", first=date(2026, 6, 1), last=date(2026, 6, 30))
    assert [one.path for one in earlier] == ["catalogs/v7/aws/vms.csv"]


def test_an_import_keeps_changes_and_the_types_that_are_gone(clone: Path) -> None:
    lines: list[str] = []
    report = import_git(clone, **july(), progress=lines.append)
    assert (report.days, len(lines), report.history.first, report.history.last) == (
        3, 3, date(2026, 7, 1), date(2026, 7, 5),
    )  # fmt: skip
    days, usd = report.history.changes["aws", "g4dn.xlarge", "us-east-1a", "spot"]
    assert ([date.fromordinal(d).day for d in days], usd.tolist()) == ([1, 2, 5], [0.1, 0.2, 0.3])
    assert len(report.history.changes["aws", "c5.xlarge", "us-east-1a", "spot"][0]) == 1
    assert report.history.at("p2.xlarge", "us-east-1b", "spot", date(2026, 7, 5)) is None
    assert library.load("skypilot-aws").instance("p2.xlarge").accelerator == "K80"
    assert histories() == ["skypilot-aws"]
    assert "skypilot-aws" in library.names()
    assert len(library.names()) == len(library.BUILT_IN) + 1  # the history is no catalogue


def test_a_catalogue_as_it_was_has_the_prices_and_the_age_of_that_day(clone: Path) -> None:
    import_git(clone, **july())
    past = load_as_of("skypilot-aws", date(2026, 7, 4))
    spot = {o.instance.name: o for o in past.offers() if o.market is Market.SPOT}
    assert (spot["g4dn.xlarge"].usd_per_hour, spot["g4dn.xlarge"].seen) == (0.2, date(2026, 7, 2))
    assert spot["p2.xlarge"].zone == "us-east-1b"
    assert "p2.xlarge" not in {o.instance.name for o in load_dated("skypilot-aws@2026-07-05").offers()}
    assert past.notes[-1] == "Prices as of 2026-07-04, from the price history."
    with pytest.raises(UsageError, match="begins on 2026-07-01: 2026-06-30 is before it"):
        load_as_of("skypilot-aws", date(2026, 6, 30))


def test_a_second_import_adds_days_and_repeats_nothing(clone: Path) -> None:
    import_git(clone, **july(1, 2))
    before = history_path("skypilot-aws").read_bytes()
    import_git(clone, **july(1, 2))
    assert history_path("skypilot-aws").read_bytes() == before
    history = import_git(clone, **july(3, 31)).history
    assert [date.fromordinal(d).day for d in history.seen] == [1, 2, 5]
    assert history.at("g4dn.xlarge", "us-east-1a", "spot", date(2026, 7, 1)).usd_per_h == 0.1  # type: ignore[union-attr]


def test_two_days_are_compared(clone: Path) -> None:
    import_git(clone, **july())
    changes = diff("skypilot-aws@2026-07-01", "skypilot-aws@2026-07-02")
    assert [(m.instance, m.usd_before, m.usd_after) for m in changes.moves] == [("g4dn.xlarge", 0.1, 0.2)]
    with pytest.raises(UsageError, match="'2026-07-99' is not a day"):
        load_dated("skypilot-aws@2026-07-99")


def test_what_cannot_be_read_is_named(clone: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is after --to"):
        import_git(clone, first=date(2026, 7, 2), last=date(2026, 7, 1))
    with pytest.raises(UsageError, match=r"no commit of gcp/vms\.csv from 2026-07-01 to 2026-07-31"):
        import_git(clone, provider="gcp", **july())
    with pytest.raises(UsageError, match="is not a folder"):
        import_git(tmp_path / "absent", **july())
    (tmp_path / "plain").mkdir()
    with pytest.raises(SourceFailed, match=r"git cannot read .*plain"):
        import_git(tmp_path / "plain", **july())
    with pytest.raises(UsageError, match="no price history chosen"):
        load_history()
    with pytest.raises(UsageError, match="'aws-2026-08' has no price history"):
        load_history("aws-2026-08")
    commit(clone, "2026-07-09T08:00:00+00:00", 'broken,"row')
    with pytest.raises(UsageError, match=r"vms\.csv of [0-9a-f]{12}"):
        import_git(clone, **july(9, 9))
    assert histories() == []


@pytest.fixture
def deepvm(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    def call(*words: object, code: int = 0) -> Any:
        assert run([*map(str, words)]) == code
        captured = capsys.readouterr()
        return json.loads(captured.out) if "--json" in words else captured.out + captured.err

    return call


def test_the_commands_import_show_compare_and_plan_as_of_a_day(clone: Path, deepvm: Callable[..., Any]) -> None:
    days = ("--from", "2026-07-01", "--to", "2026-07-31")
    document = deepvm("catalog", "import", "--git", clone, *days, "--json")
    assert document["days"] == 3
    assert document["history"] == {"from": "2026-07-01", "to": "2026-07-05", "days_seen": 3, "prices": 6, "changes": 10}
    assert "3 days read" in deepvm("catalog", "import", "--git", clone, *days)
    shown = deepvm("catalog", "history", "g4dn.xlarge", "--market", "spot", "--json")
    (place,) = shown["places"]
    assert (place["usd_per_hour"], place["lowest"], place["highest"], len(place["changes"])) == (0.3, 0.1, 0.3, 3)
    assert "us-east-1a" in deepvm("catalog", "history", "g4dn.xlarge")
    recent = deepvm("catalog", "history", "g4dn.xlarge", "--days", 1, "--market", "spot", "--json")
    assert (recent["from"], recent["places"][0]["lowest"]) == ("2026-07-05", 0.3)
    moves = deepvm("catalog", "diff", "skypilot-aws@2026-07-01", "skypilot-aws", "--json")["moves"]
    assert moves[0]["usd_after"] == 0.3
    assert "g4dn.xlarge spot in us-east-1a: $0.1000 -> $0.3000 (+200%)" in deepvm(
        "catalog", "diff", "skypilot-aws@2026-07-01", "skypilot-aws"
    )
    plans = [
        deepvm("plan", "--catalog", "skypilot-aws", "--budget", 3, "--as-of", day, "--gpu", "T4", "--top", 1, "--json")
        for day in ("2026-07-01", "2026-07-05")
    ]
    counts = [plan["recommendations"][0]["roles"][0]["count"] for plan in plans]
    assert counts[0] > 2 * counts[1]  # a third of the price


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("import",), "give one of the two"),
        (("import", "vms.csv", "--git", "."), "give one of the two"),
        (("import", "--git", "."), "--git needs --from and --to"),
        (("import", "vms.csv", "--from", "2026-07-01"), "--from and --to are for --git"),
        (("history", "g4dn.xlarge"), "no price history chosen"),
        (("update", "--source", "skypilot", "--history", "3"), "--history is for --source aws"),
    ],
)
def test_mistakes_end_with_one_sentence_and_code_2(
    deepvm: Callable[..., Any], words: tuple[str, ...], problem: str
) -> None:
    assert problem in " ".join(deepvm("catalog", *words, code=2).split())


def test_a_plan_as_of_a_day_without_a_history_is_refused(deepvm: Callable[..., Any]) -> None:
    assert "has no price history" in deepvm("plan", "--budget", 3, "--as-of", "2026-07-01", code=2)


def test_a_percentile_of_recent_prices_replaces_the_newest_where_there_is_a_history() -> None:
    rows = [("aws", "g4dn.xlarge", "use1-az1", "spot", NEWEST.toordinal() - back, usd) for back, usd in PRICES]
    known = PriceHistory.of(rows, seen=range(NEWEST.toordinal() - 40, NEWEST.toordinal() + 1))
    catalog = small_aws()
    high = at_percentile(catalog, known, 75, days=10)
    assert [offer.usd_per_hour for offer in high.offers("g4dn.xlarge")] == [0.5, pytest.approx(0.3), 0.2]
    assert "1 of 3 prices" in high.notes[-1]
    assert [o.usd_per_hour for o in at_percentile(catalog, known, 0, days=10).offers()] == [0.5, 0.1, 0.2]
    assert [o.usd_per_hour for o in at_percentile(catalog, known, 50, days=2).offers()] == [0.5, 0.1, 0.2]
    none = at_percentile(catalog, None, 75)
    assert [offer.usd_per_hour for offer in none.offers()] == [0.5, 0.1, 0.2]
    assert "no price history" in none.notes[-1]


NEWEST = date(2026, 8, 22)
PRICES = [(40, 9.0), (9, 0.3), (4, 0.1)]  # days back: 0.3 for five days, then 0.1 for five


def small_aws() -> Catalog:
    machine = Instance(name="g4dn.xlarge", accelerator="T4", accelerator_count=1)
    day = NEWEST.toordinal()
    return Catalog(
        name="small",
        provider="aws",
        description="",
        instances=(machine,),
        places=(("us-east-1", "use1-az1"), ("us-east-1", "use1-az2")),
        prices={
            Market.ON_DEMAND: Prices.from_rows([(0, 0, 0.5, day)]),
            Market.SPOT: Prices.from_rows([(0, 0, 0.1, day), (0, 1, 0.2, day)]),
        },
    )
