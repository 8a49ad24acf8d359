"""Spells of two phases: extraction with both ends open, fits, hazards by age, likelihoods."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepvm.errors import UsageError
from deepvm.market.hazard import AlternatingSpells, Hyperexponential, Observed, SpellPair, observe, spells_of
from deepvm.market.hazard.hyperexponential import TYPICAL_UP, fit_spells
from deepvm.market.market import market_of
from deepvm.market.trace import Trace, TraceKind

LAW = SpellPair(
    up=Hyperexponential(weights=(0.6, 0.4), means_h=(0.5, 9.0)),
    down=Hyperexponential(weights=(0.7, 0.3), means_h=(0.4, 3.0)),
)
MODEL = AlternatingSpells(by_machines={4: LAW})


def observed(*counts: int, machines: int = 4, tick_s: float = 3600.0) -> Observed:
    return Observed(zone="a", up=np.array(counts, np.int32), tick_s=tick_s, machines=machines)


def sampled(model: AlternatingSpells, seed: int, *, ticks: int = 20_000, zones: int = 2) -> list[Observed]:
    drawn = model.sample(np.random.default_rng(seed), zones=zones, ticks=ticks, tick_s=600.0)
    return [Observed(zone=f"z{i}", up=row, tick_s=600.0, machines=4) for i, row in enumerate(drawn)]


def test_a_spell_at_either_end_of_a_trace_is_open_there() -> None:
    up = spells_of([observed(4, 4, 0, 3, 4, 2, 4, 4, 4)], 4, up=True)
    assert up.ticks.tolist() == [2, 1, 3]
    assert (up.began.tolist(), up.ended.tolist()) == ([False, True, True], [True, True, False])
    down = spells_of([observed(4, 4, 0, 3, 4, 2, 4, 4, 4)], 4, up=False)
    assert (down.ticks.tolist(), down.began.all(), down.ended.all()) == ([2, 1], True, True)


def test_a_smaller_gang_has_longer_spells() -> None:
    assert spells_of([observed(4, 2, 0, 2, 2)], 2, up=True).ticks.tolist() == [2, 2]


def test_a_trace_without_a_change_is_one_spell_that_is_open_at_both_ends() -> None:
    spells = spells_of([observed(4, 4, 4)], 4, up=True)
    assert (spells.ticks.tolist(), spells.began.any(), spells.ended.any()) == ([3], False, False)
    assert not len(spells_of([observed(4, 4, 4)], 4, up=False))


def test_recent_spells_count_more() -> None:
    spells = spells_of([observed(4, 0, 4, 0, 4, 0)], 4, up=True, half_life_h=2.0)
    assert spells.weight.tolist() == pytest.approx([0.5**2.5, 0.5**1.5, 0.5**0.5])


def test_markets_and_traces_are_observed_alike() -> None:
    trace = Trace(zone="us-east-1a", machines=4, gap_s=600, up=np.array([4, 0, 4], np.int32), kind=TraceKind.LAUNCH)
    market = market_of([trace], spot_usd=1.0, on_demand_usd=3.0)
    assert observe(market)[0].up.tolist() == observe(trace)[0].up.tolist() == observe([trace])[0].up.tolist()


@pytest.mark.parametrize("gang", [0, 5, -1])
def test_a_gang_that_a_zone_never_had_is_refused(gang: int) -> None:
    with pytest.raises(UsageError, match=r"a gang of .* is outside of what a has: 1 to 4"):
        spells_of([observed(4, 0)], gang, up=True)


def test_the_hazard_falls_with_age_from_the_mixture_to_the_long_phase() -> None:
    hazards = LAW.up.hazard_per_h([0.0, 0.5, 2.0, 200.0])
    assert hazards[0] == pytest.approx(0.6 / 0.5 + 0.4 / 9)
    assert (np.diff(hazards) < 0).all()
    assert hazards[-1] == pytest.approx(1 / 9)
    assert LAW.up.remaining_h(0.0) == pytest.approx(LAW.up.mean_h)
    assert LAW.up.remaining_h(1e9) == pytest.approx(9.0)  # no underflow in old age
    assert LAW.up.survival([0.0, np.inf])[0] == 1.0


def test_the_hazard_is_the_slope_of_the_logarithm_of_the_survival() -> None:
    age, step = np.array([0.1, 1.0, 5.0]), 1e-6
    slope = -(np.log(LAW.up.survival(age + step)) - np.log(LAW.up.survival(age))) / step
    assert slope == pytest.approx(LAW.up.hazard_per_h(age), rel=1e-4)
    assert LAW.up.remaining_survival(1.0, 2.0) == pytest.approx(LAW.up.survival(3.0) / LAW.up.survival(1.0))


def test_the_likelihood_of_all_series_of_a_length_sums_to_one() -> None:
    """Given the first tick, whatever the censoring: the law is a law of tick series."""
    total = 0.0
    for bits in range(2**6):
        series = [4, *(4 * (bits >> i & 1) for i in range(6))]
        total += np.exp(MODEL.loglik([observed(*series, tick_s=1800.0)], machines=4))
    assert total == pytest.approx(1.0, abs=1e-9)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_a_fit_recovers_the_law_that_drew_the_spells(seed: int) -> None:
    fit = AlternatingSpells.fit(sampled(MODEL, seed), [4]).spells(4)
    assert fit.up.weights[0] == pytest.approx(0.6, abs=0.1)
    assert fit.up.means_h == pytest.approx((0.5, 9.0), rel=0.3)
    assert fit.down.means_h[1] == pytest.approx(3.0, rel=0.4)
    assert fit.availability == pytest.approx(LAW.availability, abs=0.05)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(1.6, 5.0))
def test_the_true_law_explains_a_long_sample_better_than_a_wrong_one(seed: int, factor: float) -> None:
    wrong = SpellPair(
        up=Hyperexponential(weights=(0.6, 0.4), means_h=(0.5 * factor, 9.0 * factor)),
        down=LAW.down,
    )
    series = sampled(MODEL, seed)
    assert MODEL.loglik(series, machines=4) > AlternatingSpells(by_machines={4: wrong}).loglik(series, machines=4)


def test_a_seed_repeats_exactly_and_another_does_not() -> None:
    first, again, other = (sampled(MODEL, seed, ticks=500)[0].up for seed in (7, 7, 8))
    assert (first == again).all()
    assert not (first == other).all()


def test_ticks_of_different_lengths_are_fitted_together() -> None:
    coarse = sampled(MODEL, 3, ticks=10_000)
    drawn = MODEL.sample(np.random.default_rng(4), zones=2, ticks=40_000, tick_s=150.0)
    fine = [Observed(zone="f", up=row, tick_s=150.0, machines=4) for row in drawn]
    fit = AlternatingSpells.fit([*coarse, *fine], [4]).spells(4)
    assert fit.up.means_h == pytest.approx((0.5, 9.0), rel=0.25)


def test_nothing_observed_leaves_the_prior_and_little_hardly_moves_it() -> None:
    assert fit_spells(spells_of([observed(0, 0)], 4, up=True), prior=TYPICAL_UP) == TYPICAL_UP
    fit = fit_spells(spells_of([observed(4, 4, 4)], 4, up=True), prior=TYPICAL_UP)
    assert TYPICAL_UP.mean_h < fit.mean_h < 3 * TYPICAL_UP.mean_h  # three hours without a loss


@pytest.mark.parametrize(
    ("weights", "means"), [((0.5,), (1.0, 2.0)), ((0.5, 0.6), (1, 2)), ((0.5, 0.5), (2, 1)), ((1.0,), (0.0,)), ((), ())]
)
def test_a_law_that_is_none_is_refused(weights: tuple[float, ...], means: tuple[float, ...]) -> None:
    with pytest.raises(UsageError):
        Hyperexponential(weights=weights, means_h=means)


def test_a_gang_that_was_not_fitted_and_no_zone_at_all_are_refused() -> None:
    with pytest.raises(UsageError, match="spells of 3 machines were not fitted, only of 4"):
        MODEL.spells(3)
    with pytest.raises(UsageError, match="at least one zone"):
        AlternatingSpells.fit([], [1])
    with pytest.raises(UsageError, match="at least one tick"):
        observed()
    with pytest.raises(UsageError, match="it must be 0 to 4"):
        observed(-1, 2)
