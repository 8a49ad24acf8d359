"""Hidden bulk kernels and independent machines: laws of counts, fits, samples, and who explains bulk losses."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepvm.errors import UsageError
from deepvm.market.hazard import AlternatingSpells, HiddenBulk, IndependentMachines, Observed
from deepvm.market.hazard.bulk import BulkKernel
from deepvm.market.hazard.chains import balance
from deepvm.market.hazard.drawing import draw
from deepvm.market.hazard.held_out import held_out
from deepvm.market.hazard.smoothing import log_evidence, smooth

TICK_S = 600.0
HIDDEN = HiddenBulk.typical(machines=8, tick_s=TICK_S)
POISSON = IndependentMachines(lost_per_h=0.2, back_per_h=0.5, machines=8, tick_h=TICK_S / 3600)


def drawn(model: HiddenBulk | IndependentMachines, seed: int, *, ticks: int, zones: int = 2) -> list[Observed]:
    rows = model.sample(np.random.default_rng(seed), zones=zones, ticks=ticks, tick_s=TICK_S)
    return [Observed(zone=f"z{i}", up=row, tick_s=TICK_S, machines=8) for i, row in enumerate(rows)]


@pytest.mark.parametrize("machines", [1, 2, 16])
def test_a_kernel_is_a_law_of_counts(machines: int) -> None:
    for kernel in HIDDEN.kernels:
        assert kernel.matrix(machines).sum(axis=1) == pytest.approx(1.0)
    chain = IndependentMachines(lost_per_h=0.2, back_per_h=0.5, machines=machines, tick_h=1.0).chain
    assert chain.sum(axis=1) == pytest.approx(1.0)


def test_the_balance_of_rare_states_keeps_its_digits() -> None:
    chain = IndependentMachines(lost_per_h=0.3, back_per_h=0.003, machines=8, tick_h=1.0).chain
    up = math.expm1(-0.003) / (math.expm1(-0.003) + math.expm1(-0.3))
    expected = [math.comb(8, k) * up**k * (1 - up) ** (8 - k) for k in range(9)]
    assert balance(chain) == pytest.approx(expected, rel=1e-9, abs=0)
    never_left = np.array([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0], [0.2, 0.3, 0.5]])
    assert balance(never_left) == pytest.approx([0.0, 1.0, 0.0])


def test_a_drop_of_all_takes_all() -> None:
    kernel = BulkKernel(drop=0.2, rise=0.1, drop_sizes=(1, 0, 0), rise_sizes=(0, 1, 0))
    row = kernel.matrix(5)[3]
    assert row.tolist() == pytest.approx([0.2, 0, 0, 0.7, 0.1, 0])


@pytest.mark.parametrize("model", [HiddenBulk.typical(machines=2, tick_s=TICK_S), None])
def test_the_likelihood_of_all_series_sums_to_one(model: HiddenBulk | None) -> None:
    chosen = model or IndependentMachines(lost_per_h=0.2, back_per_h=0.5, machines=2, tick_h=TICK_S / 3600)
    counts = gangs = 0.0
    for tail in product(range(3), repeat=3):
        series = Observed(zone="a", up=np.array([1, *tail], np.int32), tick_s=TICK_S, machines=2)
        counts += np.exp(chosen.loglik_counts([series]))
        if all(one in (0, 2) for one in tail):
            whole = Observed(zone="a", up=np.array([2, *tail], np.int32), tick_s=TICK_S, machines=2)
            gangs += np.exp(chosen.loglik([whole], machines=2))
    assert (counts, gangs) == (pytest.approx(1.0), pytest.approx(1.0))


def test_smoothing_in_blocks_agrees_with_a_walk_tick_by_tick() -> None:
    chance = np.random.default_rng(1)
    change, evidence = chance.dirichlet(np.ones(3), 3), chance.random((57, 3))
    start = np.array([0.2, 0.3, 0.5])
    past, total = start, 0.0
    before = []
    for row in evidence:
        before.append(past)
        past = (past @ change) * row
        total += np.log(past.sum())
        past = past / past.sum()
    found, after = smooth(start, change, evidence)
    assert found == pytest.approx(np.array(before))
    assert after[-1] == pytest.approx([1 / 3] * 3)
    assert log_evidence(start, change, evidence) == pytest.approx(total)


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_the_true_model_explains_a_long_sample_better_than_the_wrong_one(seed: int) -> None:
    bulk, alone = drawn(HIDDEN, seed, ticks=3000), drawn(POISSON, seed, ticks=3000)
    assert HIDDEN.loglik_counts(bulk) > POISSON.loglik_counts(bulk)
    assert POISSON.loglik_counts(alone) > HIDDEN.loglik_counts(alone)


def test_fits_recover_what_was_drawn() -> None:
    alone = IndependentMachines.fit(drawn(POISSON, 5, ticks=4000))
    assert (alone.lost_per_h, alone.back_per_h) == (pytest.approx(0.2, rel=0.1), pytest.approx(0.5, rel=0.1))
    seen = drawn(HIDDEN, 6, ticks=6000)
    fit = HiddenBulk.fit(seen)
    assert fit.loglik_counts(seen) >= HIDDEN.loglik_counts(seen)
    assert fit.kernels[0].drop == pytest.approx(HIDDEN.kernels[0].drop, rel=0.5)
    assert fit.kernels[2].rise == pytest.approx(HIDDEN.kernels[2].rise, rel=0.5)
    assert fit.kernels[1].drop_sizes == pytest.approx(HIDDEN.kernels[1].drop_sizes, abs=0.12)


def test_spells_of_a_chain_agree_with_spells_that_were_drawn() -> None:
    pair = HIDDEN.spells(4)
    fit = AlternatingSpells.fit(drawn(HIDDEN, 7, ticks=40_000), [4]).spells(4)
    assert pair.up.mean_h == pytest.approx(fit.up.mean_h, rel=0.2)
    assert pair.availability == pytest.approx(fit.availability, abs=0.06)
    alone = POISSON.spells(8)  # all of 8 independent machines: lost at 8 times the rate of one
    assert alone.up.mean_h == pytest.approx(1 / 1.6, rel=0.15)


def test_bulk_losses_are_explained_by_bulk_models_only() -> None:
    row = held_out(drawn(HIDDEN, 8, ticks=3000), 4)
    assert row.spells > row.poisson
    assert row.hidden > row.poisson
    assert row.hidden_counts > row.poisson_counts
    assert set(row.to_json()) >= {"spells", "hidden", "poisson", "ticks"}


def test_seeds_repeat_and_zones_of_a_group_rise_and_fall_together() -> None:
    first, again = (drawn(HIDDEN, 9, ticks=300)[0].up for _ in range(2))
    assert (first == again).all()
    groups = [0, 0, 1, 1]
    up = draw(np.random.default_rng(1), [HIDDEN] * 4, machines=8, ticks=6000, groups=groups, shared=0.92) >= 4
    levels = np.corrcoef(up)
    assert min(levels[0, 1], levels[2, 3]) > 0.25
    assert abs(levels[0, 2]) < 0.25


def test_other_ticks_other_sizes_and_no_zone_are_refused_by_name() -> None:
    fine = Observed(zone="b", up=np.array([8, 0], np.int32), tick_s=60.0, machines=8)
    more = Observed(zone="c", up=np.array([9, 0], np.int32), tick_s=TICK_S, machines=9)
    with pytest.raises(UsageError, match="b has ticks of 60 s, the model 600 s"):
        HIDDEN.loglik_counts([fine])
    with pytest.raises(UsageError, match="c has 9 machines, the model was fitted to 8"):
        HIDDEN.loglik_counts([more])
    with pytest.raises(UsageError, match="b has ticks of 60 s"):
        POISSON.loglik([fine], machines=8)
    with pytest.raises(UsageError, match="one length of tick"):
        IndependentMachines.fit([fine, more])
    for model in (HiddenBulk, IndependentMachines):
        with pytest.raises(UsageError, match="at least one zone"):
            model.fit([])
    with pytest.raises(UsageError, match="cannot draw ticks of 60"):
        HIDDEN.sample(np.random.default_rng(1), zones=1, ticks=1, tick_s=60.0)


@pytest.mark.parametrize("level", [0, 8])
def test_a_market_that_never_changes_is_fitted(level: int) -> None:
    calm = [Observed(zone="a", up=np.full(500, level, np.int32), tick_s=TICK_S, machines=8)]
    fits = (HiddenBulk.fit(calm), IndependentMachines.fit(calm), AlternatingSpells.fit(calm, [8]))
    for fit in fits:
        assert np.isfinite(fit.loglik(calm, machines=8))
        assert (fit.spells(8).availability > 0.5) == (level == 8)
