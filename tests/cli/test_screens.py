"""Whole screens of the terminal, compared line by line: columns, order, units and what is left out.

After a change that is meant, ``SCREENS=write pytest tests/cli/test_screens.py`` writes the files in ``screens/`` anew.
"""

from __future__ import annotations

import dataclasses
from datetime import date
from pathlib import Path

import numpy as np
import pytest

from deepvm.catalog import Catalog, Instance, Market, Prices, Quota, library
from deepvm.cli import catalog as commands
from deepvm.cli import render
from deepvm.cli.app import run
from deepvm.cli.run.report import show_report
from deepvm.runtime.ledger.report import make_report
from deepvm.store.files.store import FileStore
from tests.cli.conftest import DAY, Screen
from tests.cli.run.test_run_report import long_story
from tests.runtime.ledger.test_report import CLUSTER, STORY
from tests.support.store.checkpoints import payload, safetensors_payload, save
from tests.support.store.places import FilePlace

pytestmark = pytest.mark.usefixtures("terminal")


def prices(rows: list[tuple[int, int, float, float | None, int]]) -> Prices:
    instance, place, usd, low, days_ago = zip(*rows, strict=True)
    lows = np.array([np.nan if one is None else one for one in low])
    return Prices(
        instance=np.array(instance, dtype=np.int32),
        place=np.array(place, dtype=np.int32),
        usd_per_hour=np.array(usd),
        usd_low=lows,
        usd_high=lows * 2,
        seen=np.array([DAY.toordinal() - days for days in days_ago], dtype=np.int32),
    )


def small_catalog() -> Catalog:
    return Catalog(
        name="small",
        provider="aws",
        description="Four types in three places.",
        instances=(
            Instance(
                name="g4dn.xlarge", family="G", vcpus=4.0, memory_gib=16.0, accelerator="T4", accelerator_count=1.0,
                sustained_gbps=5.0, burst_gbps=25.0, interruption_percent=(5, 10),
            ),
            Instance(
                name="g5.12xlarge", family="G", vcpus=48.0, memory_gib=192.0, accelerator="A10G",
                accelerator_count=4.0, burst_gbps=40.0, interruption_percent=(20, 100),
            ),
            Instance(name="c5.[b]xlarge", vcpus=4.0),
            Instance(name="r5.large", vcpus=2.0, memory_gib=16.0, sustained_gbps=0.75),
        ),
        places=(("us-east-1", None), ("us-east-1", "us-east-1a"), ("eu-west-1", "eu-west-1b")),
        prices={
            Market.SPOT: prices([(0, 1, 0.1578, 0.15, 0), (0, 2, 0.2, None, 1), (1, 1, 2.25, None, 0)]),
            Market.ON_DEMAND: prices([(0, 0, 0.526, None, 0), (1, 0, 5.672, None, 2), (2, 0, 0.17, None, 0)]),
        },
        quotas=(Quota(families=("G", "VT"), market=Market.SPOT, vcpus=128, region="us-east-1"),),
        notes=("A note in [brackets].",),
    )  # fmt: skip


def deepvm(*words: object, code: int = 0) -> None:
    assert run([str(word) for word in words]) == code


@pytest.mark.parametrize("columns", [70, 90, 120])
def test_the_types_of_a_catalogue_with_as_many_columns_as_fit(
    columns: int, monkeypatch: pytest.MonkeyPatch, screen: Screen
) -> None:
    library.save(small_catalog())
    monkeypatch.setenv("COLUMNS", str(columns))
    deepvm("catalog", "show", "small")
    screen(f"catalog-show-{columns}")


def test_one_type_with_its_offers_old_prices_and_a_limit(monkeypatch: pytest.MonkeyPatch, screen: Screen) -> None:
    library.save(small_catalog())
    monkeypatch.setattr(commands, "_today", lambda: date(2026, 10, 22))
    deepvm("catalog", "show", "small", "--limit", "1")
    deepvm("catalog", "show", "small", "--instance", "g4dn.xlarge")
    deepvm("catalog", "show", "small", "--instance", "c5.[b]xlarge")
    deepvm("catalog", "show", "small", "--gpu", "T4", "--json")
    deepvm("catalog", "show", "small", "--instance", "g5.12xlarge", "--json")
    screen("catalog-offers")


def test_the_list_of_catalogues(screen: Screen) -> None:
    library.save(small_catalog())
    library.save(dataclasses.replace(small_catalog(), name="empty", prices={}))
    (library.directory() / "broken.json").write_text("{")
    deepvm("catalog", "list")
    deepvm("catalog", "list", "--json")
    screen("catalog-list")


def test_what_changed_between_two_catalogues(screen: Screen) -> None:
    before = small_catalog()
    library.save(before)
    spot = dataclasses.replace(before.prices[Market.SPOT], usd_per_hour=np.array([0.1, 0.3, 2.25]))
    fewer = {Market.SPOT: spot, Market.ON_DEMAND: prices([(1, 0, 5.672, None, 2), (2, 0, 0.34, None, 0)])}
    library.save(dataclasses.replace(before, name="later", prices=fewer))
    deepvm("catalog", "diff", "small", "later")
    deepvm("catalog", "diff", "small", "later", "--limit", "1")
    deepvm("catalog", "diff", "small", "later", "--json")
    screen("catalog-diff")


def test_the_findings_of_a_check(screen: Screen) -> None:
    library.save(small_catalog())
    deepvm("catalog", "check", "small")
    deepvm("catalog", "check", "small", "--json")
    low = {m: dataclasses.replace(p, usd_low=np.full(len(p), 99.0)) for m, p in small_catalog().prices.items()}
    library.save(dataclasses.replace(small_catalog(), name="wrong", prices=low))
    deepvm("catalog", "check", "wrong", code=1)
    screen("catalog-check")


def test_an_import_and_a_second_one(screen: Screen) -> None:
    header = "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,"
    header += "AvailabilityZone"
    rows = ["c5.xlarge,,,4,8,,0.17,0.07,us-east-1,a", "m5.xlarge,,,4,16,,0.2,0.3,us-east-1,a", ",TPU,1,,,,1,1,r,a"]
    file = Path("vms.csv")
    file.write_text("\n".join([header, *rows]))
    deepvm("catalog", "import", file, "--name", "sky", "--seen", "2026-08-20")
    file.write_text("\n".join([header, rows[0].replace("0.07", "0.14"), *rows[2:], "x1.xlarge,,,4,8,,1,0.5,r,b"]))
    deepvm("catalog", "import", file, "--name", "sky", "--seen", "2026-08-21")
    deepvm("catalog", "import", file, "--name", "sky", "--seen", "2026-08-21", "--json")
    screen("catalog-import")


def test_checkpoints_listed_shown_verified_and_removed(screen: Screen) -> None:
    store = FileStore(Path("kept"))
    for step in (5, 10):
        save(store, safetensors_payload(), "resnet", step)
    deepvm("checkpoint", "ls", "kept")
    deepvm("checkpoint", "ls", "kept", "--json")
    deepvm("checkpoint", "show", "kept", "--step", "5")
    deepvm("checkpoint", "show", "kept", "--json")
    deepvm("checkpoint", "verify", "kept")
    deepvm("checkpoint", "export", "kept", "model.safetensors")
    deepvm("checkpoint", "pull", "kept", "other", "--step", "5")
    FilePlace(Path("kept")).flip("resnet", 5, 2 * 2**16 + 9)
    deepvm("checkpoint", "verify", "kept", "--all", code=1)
    deepvm("checkpoint", "rm", "kept", "--run", "resnet", "--step", "5", "--yes")
    deepvm("checkpoint", "ls", "kept", "--run", "other")
    save(FileStore(Path("plain")), payload(1000), "bytes", 1)
    deepvm("checkpoint", "verify", "plain", code=1)
    (Path("kept") / "resnet" / "step-000000000010.json").write_text("{")
    deepvm("checkpoint", "ls", "kept", "--json")
    screen("checkpoint")


def test_the_report_of_a_run(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render.console, "_width", 120)
    show_report(make_report(STORY, CLUSTER, run="one"))
    show_report(long_story(14))
    screen("run-report")
