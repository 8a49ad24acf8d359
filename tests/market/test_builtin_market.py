"""The market without a file: fitted figures with their origin, drawn by seed, correlated within a region."""

from __future__ import annotations

import numpy as np
import pytest

from deepvm.errors import UnknownName, UsageError
from deepvm.market.builtin import (
    TIGHTNESS,
    History,
    builtin_history,
    builtin_market,
    classes_of,
    hazard_classes,
    history_of,
)
from deepvm.market.market import Market

ZONES = ("us-east-1a", "us-east-1b", "us-west-2a", "us-west-2b")
USD = {"spot_usd": 1.0, "on_demand_usd": 3.0}


def test_every_class_has_its_origin_its_day_and_sound_figures() -> None:
    rows = hazard_classes()
    assert {"V100", "H100", "K80"} <= {row.accelerator for row in rows}
    for row in rows:
        assert row.history.origin
        assert len(row.fitted) == 10
        assert 0 < row.availability < 1
        assert row.spells.up.means_h[0] < row.spells.up.means_h[1]
        assert row.tightness in TIGHTNESS


def test_calm_is_calmer_than_tight() -> None:
    up = [(builtin_market("V100", ZONES, seed=1, tightness=t, days=20, **USD).capacity >= 8).mean() for t in TIGHTNESS]
    assert up[0] > up[1] > up[2]


def test_a_seed_repeats_exactly() -> None:
    first, again, other = (builtin_market("H100", ZONES, seed=seed, days=3, **USD) for seed in (1, 1, 2))
    assert (first.capacity == again.capacity).all()
    assert not (first.capacity == other.capacity).all()


def test_zones_of_a_region_rise_and_fall_together_and_regions_do_not() -> None:
    market = builtin_market("H100", ZONES, seed=4, tightness="medium", days=120, **USD)
    levels = np.corrcoef(market.capacity >= 8)
    assert 0.25 < levels[0, 1] < 0.85
    assert 0.25 < levels[2, 3] < 0.85
    assert abs(levels[0, 2]) < 0.2


def test_any_number_of_machines_and_prices_by_zone() -> None:
    spot = dict(zip(ZONES, (1.0, 2.0, 3.0, 4.0), strict=True))
    market = builtin_market("nvidia-h100", ZONES, seed=1, spot_usd=spot, on_demand_usd=9, days=2, machines=100)
    assert market.capacity.max() == 100
    assert market.price[:, 0].tolist() == [1, 2, 3, 4]
    assert builtin_market("K80", ["a"], seed=1, days=1, machines=1, **USD).capacity.max() <= 1


def test_risk_says_what_it_rests_on() -> None:
    assert builtin_history("H100").enough
    assert str(builtin_history("K80")).startswith("not enough history: 13.5 days of 2 zones")
    guess = builtin_history("B200")
    assert not guess.enough
    assert "other accelerators, as there are no traces of B200: " in str(guess)
    assert guess.to_json()["enough"] is False
    assert classes_of("B200") == classes_of(None)


@pytest.mark.parametrize(
    ("days", "zones", "enough"), [(7, 3, True), (6.9, 3, False), (30, 2, False), (0, 0, False), (365, 40, True)]
)
def test_under_seven_days_or_three_zones_is_not_enough(days: float, zones: int, enough: bool) -> None:
    history = History(days=days, zones=zones, origin="x")
    assert history.enough is enough
    assert ("not enough history" in str(history)) is not enough


def test_a_market_of_traces_is_a_history() -> None:
    flat = np.ones((3, 24 * 8))
    market = Market(
        zones=("a", "b", "c"), tick_s=3600, capacity=flat.astype(np.int32), price=flat, on_demand_usd=np.ones(3)
    )
    history = history_of(market, "own traces")
    assert (history.days, history.zones, history.enough) == (8, 3, True)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"zones": []}, "a market needs zones"),
        ({"zones": ["a", "a"]}, "each once"),
        ({"days": 0}, "a market of 0 days"),
        ({"days": -3}, "a market of -3 days"),
        ({"days": 1e9}, "days"),
        ({"machines": 0}, "a market of 0 machines"),
        ({"machines": 10**6}, "a market of 1000000 machines"),
        ({"spot_usd": {}}, "no spot price is known for a"),
        ({"spot_usd": -1.0}, "not negative"),
    ],
)
def test_a_market_that_cannot_be_is_refused_in_one_sentence(change: dict[str, object], problem: str) -> None:
    given = {"zones": ["a"], "seed": 1, "days": 1, **USD, **change}
    with pytest.raises(UsageError, match=problem):
        builtin_market("V100", **given)  # type: ignore[arg-type]
    with pytest.raises(UnknownName, match="no tightness is called 'calmest': did you mean calm"):
        builtin_market("V100", ["a"], seed=1, tightness="calmest", **USD)


@pytest.mark.parametrize("seed", [-1, -(10**30), 2**63, 10**400])
def test_a_seed_that_cannot_seed_a_draw_is_refused(seed: int) -> None:
    with pytest.raises(UsageError, match=r"the seed is (negative|too large): it must be an integer from 0 to 9223"):
        builtin_market("V100", ZONES, seed=seed, days=1, **USD)


@pytest.mark.parametrize("days", [float("nan"), float("inf"), -1.0, 0.0, 1e-9, 1e6, 1e300])
def test_days_that_no_market_lasts_are_refused(days: float) -> None:
    with pytest.raises(UsageError, match=r"a market of .* days: it must be from one tick of \d+ s to [\d,]+ days"):
        builtin_market("V100", ZONES, seed=1, days=days, **USD)
