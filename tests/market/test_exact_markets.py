"""The built-in market in figures, prices of reference, and catalogues as they were."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepvm.errors import UsageError
from deepvm.market import catalog_history
from deepvm.market.builtin import builtin_history, builtin_market, classes_of
from deepvm.market.catalog_history import as_of, at_percentile
from deepvm.market.hazard import AlternatingSpells, Hyperexponential
from deepvm.market.history import PriceHistory
from deepvm.market.market import Market, market_of
from deepvm.market.reference_prices import machine_types, on_demand_usd, zone_id_region
from deepvm.market.trace import Trace, TraceKind
from tests.market.test_catalog_history import NEWEST, small_aws
from tests.support.documents import assert_document

DOCUMENTS = Path(__file__).with_name("documents")
ZONES = ("us-east-1a", "us-east-1b", "us-west-2a")
USD = {"spot_usd": 1.0, "on_demand_usd": 3.0}


def drawn(accelerator: str | None, seed: int, **options: Any) -> dict[str, Any]:
    market = builtin_market(accelerator, ZONES, seed=seed, **{**USD, "days": 2.0, **options})
    return {
        "name": market.name, "accelerator": market.accelerator, "tick_s": market.tick_s, "shape": market.capacity.shape,
        "priced": market.priced, "price": [market.price[0, 0], market.price[-1, -1]],
        "on_demand_usd": market.on_demand_usd.tolist(), "means": market.capacity.mean(axis=1).tolist(),
        "first": market.capacity[:, :12].tolist(), "last": market.capacity[:, -3:].tolist(),
    }  # fmt: skip


def test_seeds_of_the_built_in_market_draw_these_machines() -> None:
    document = {
        "H100": drawn("H100", 1),
        "tight": drawn("nvidia-h100", 2, tightness="tight", machines=5, days=0.5),
        "calm": drawn(
            "V100", 3, tightness="calm", machines=40, spot_usd=dict(zip(ZONES, (1.0, 2.0, 3.0), strict=True))
        ),
        "unknown": drawn("B200", 4, days=1.0),
        "any": drawn(None, 5, days=1.0),
    }
    assert_document(document, DOCUMENTS / "drawn.json")


def test_what_built_in_figures_rest_on_is_said_like_this() -> None:
    document = {
        str(name): [builtin_history(name).to_json(), str(builtin_history(name))]
        for name in ("H100", "K80", "B200", None)
    }
    document["classes"] = [
        [row.accelerator, row.tightness, row.availability, row.machines, row.history.zones, row.history.guess]
        for name in ("V100", "B200")
        for row in classes_of(name)
    ]
    assert_document(document, DOCUMENTS / "histories.json")


def test_reference_prices_are_of_the_cloud_of_the_zone() -> None:
    zones = ("us-east-1a", "us-central1-a", "use1-az4")
    names = ("V100", "k80", "T4", "A10G", "L4", "A100", "H100", "INTEL", "C3-88", "B200", None)
    asked = [(name, count) for name in names for count in (1, 4, 8, 16)]
    document = {
        f"{name} × {count}": [
            [on_demand_usd(name, count, zone), list(machine_types(name, count, zone))] for zone in zones
        ]
        for name, count in asked
    }
    document["regions"] = [
        zone_id_region(name) for name in ("us-east-1", "eu-west-3", "ap-southeast-1", "us-gov-west-1")
    ]
    assert_document(document, DOCUMENTS / "reference.json")


def test_spells_of_no_gang_are_refused() -> None:
    for spells in ({}, {0: classes_of("V100")[0].spells}):
        with pytest.raises(UsageError, match="spells are fitted for gangs of at least one machine"):
            AlternatingSpells(by_machines=spells)


def test_a_catalogue_as_it_was_keeps_what_has_no_history_and_refuses_days_without_prices() -> None:
    first = NEWEST.toordinal() - 9
    rows = [
        ("aws", "g4dn.xlarge", "use1-az1", "spot", first, 0.7),
        ("aws", "g4dn.xlarge", "use1-az2", "spot", first + 2, 0.9),
        ("aws", "another", "use1-az1", "spot", first, 5.0),
        ("gcp", "g4dn.xlarge", "use1-az1", "spot", first, 6.0),
        ("aws", "g4dn.xlarge", "elsewhere", "spot", first, 7.0),
    ]
    history = PriceHistory.of(rows, seen=[first, first + 2])
    found = as_of(small_aws(), history, date.fromordinal(first + 1))
    offers = [
        (offer.zone, offer.market.value, offer.usd_per_hour, offer.seen.toordinal() - first) for offer in found.offers()
    ]
    assert offers == [
        ("use1-az1", "on-demand", 0.5, 9), ("use1-az1", "spot", 0.7, 0),
    ]  # fmt: skip
    assert found.notes[-1] == f"Prices as of {date.fromordinal(first + 1)}, from the price history."
    with pytest.raises(UsageError, match="the price history of small begins on 2026-08-13: 2026-08-12 is before it"):
        as_of(small_aws(), history, date.fromordinal(first - 1))
    strangers = PriceHistory.of(rows[2:])
    with pytest.raises(UsageError, match="the price history has no price of small on 2026-08-22"):
        as_of(small_aws(), strangers, NEWEST)


def test_notes_count_the_prices_that_a_percentile_replaced() -> None:
    history = PriceHistory.of([("aws", "g4dn.xlarge", "use1-az2", "spot", NEWEST.toordinal() - 3, 0.6)])
    for share, about in ((50, "the median"), (90, "percentile 90")):
        found = at_percentile(small_aws(), history, share, days=7)
        assert found.notes[-1] == (
            f"{about} of the prices of 7 days until 2026-08-19 for 1 of 3 prices of small; "
            "the others have no history and are the catalogue's own."
        )
    unknown = at_percentile(small_aws(), None, 50)
    assert unknown.notes[-1] == (
        "small has no price history, so the median of the prices of 30 days is not known: its own prices are used."
    )


def trace(zone: str, *up: int, **fields: Any) -> Trace:
    return Trace(
        zone=zone, **{"machines": 4, "gap_s": 600.0, "kind": TraceKind.LAUNCH, "up": np.array(up, np.int32), **fields}
    )


def test_a_market_of_traces_has_these_parts() -> None:
    traces = [
        trace("us-east-1a", 1, 2, 3, prices=np.array([np.nan, 0.5, np.nan]), accelerator="T4"),
        trace("us-east-1b", 4, 4, 4, gap_s=1200.0),
        trace("us-west-2a", 0, 1, 2, 3, 4, gap_s=600.0, first_s=600.0),
    ]
    found = market_of(traces, name="mine", spot_usd={"us-east-1b": 0.7, "us-west-2a": 0.8}, on_demand_usd=3.0)
    assert (found.name, found.accelerator, found.priced, found.tick_s, found.start_s) == (
        "mine",
        "T4",
        False,
        600.0,
        None,
    )
    assert found.capacity.tolist() == [[2, 3], [4, 4], [0, 1]]
    assert found.price.tolist() == [[0.5, 0.5], [0.7, 0.7], [0.8, 0.8]]
    assert found.move_usd_per_gb.tolist() == [[0, 0.02, 0.02], [0.02, 0, 0.02], [0.02, 0.02, 0]]
    assert found.paid[0].tolist() == pytest.approx([0.0, 0.5 / 6, 1.0 / 6])
    longer = found.repeated(0.9)
    assert (longer.ticks, longer.capacity[2].tolist()) == (6, [0, 1, 0, 1, 0, 1])
    assert found.repeated(0.0).ticks == 2
    assert found.repeated(2 / 6).ticks == 2
    with pytest.raises(UsageError, match=r"a market of 0\.333333 h cannot last 1e\+06 h: that is over 5,000,000 ticks"):
        found.repeated(1e6)


def test_a_market_whose_columns_do_not_fit_is_refused() -> None:
    one = market_of([trace("a", 1, 2)], spot_usd=1.0, on_demand_usd=3.0)
    for change in ({"price": one.price[:, :1]}, {"capacity": one.capacity[0]}, {"zones": ("a", "b")}):
        with pytest.raises(UsageError, match=r"a market of \d zones has capacities of shape"):
            Market(**{**one.__dict__, **change})
    with pytest.raises(UsageError, match="one on-demand price for each zone"):
        replace(one, on_demand_usd=np.ones(2))


def test_weights_that_are_nearly_shares_of_one_draw_too() -> None:
    law = Hyperexponential(weights=(0.6, 0.4000005), means_h=(0.5, 9.0))
    found = law.sample(np.random.default_rng(1), 2000)
    assert found.mean() == pytest.approx(law.mean_h, rel=0.1)


def test_days_of_an_update_from_aws_are_all_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DEEPVM_HOME", str(tmp_path))
    found = [("g4dn.xlarge", "us-east-1a", day, 0.1 + day.day / 100) for day in (date(2026, 8, 3), date(2026, 8, 6))]
    monkeypatch.setattr(catalog_history, "fetch_history", lambda region, days, **_: found)
    history = catalog_history.update_from_aws("us-east-1", 9, name="east")
    assert [date.fromordinal(day).day for day in history.seen.tolist()] == [3, 4, 5, 6]
    assert (history.first, history.last) == (date(2026, 8, 3), date(2026, 8, 6))
