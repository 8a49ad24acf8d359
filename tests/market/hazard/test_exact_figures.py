"""Every figure of the hazard models of one short series of counts, and the first ticks that they draw."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deepvm.market.hazard import AlternatingSpells, HiddenBulk, Hyperexponential, IndependentMachines, Observed
from deepvm.market.hazard.alternating import TYPICAL
from deepvm.market.hazard.bulk import BulkKernel
from deepvm.market.hazard.drawing import draw
from deepvm.market.hazard.held_out import fit_zones, held_out
from deepvm.market.hazard.hyperexponential import TYPICAL_DOWN, TYPICAL_UP, fit_spells
from deepvm.market.hazard.observed import spells_of
from deepvm.market.hazard.smoothing import log_evidence, smooth

TICK_S = 1200.0
WEST = "4444433344440002222444444444444444000000033334444444443322100000444444444444"
EAST = "2222222344444444111144444444444440000444444440000000000444444444444444430000"


def zones() -> list[Observed]:
    return [
        Observed(zone=name, up=np.array([int(digit) for digit in digits], np.int32), tick_s=TICK_S, machines=4)
        for name, digits in (("west", WEST), ("east", EAST))
    ]


def law(one: Hyperexponential) -> list[float]:
    return [*one.weights, *one.means_h]


def spells_fitted() -> list[list[float]]:
    found = AlternatingSpells.fit(zones(), [2, 4], half_life_h=9.0)
    again = AlternatingSpells.fit(zones()[:1], [2], prior=found, prior_spells=3.0)
    pairs = (found.spells(2), found.spells(4), again.spells(2))
    return [[*law(pair.up), *law(pair.down), pair.availability] for pair in pairs]


def kernels(model: HiddenBulk) -> list[list[float]]:
    rows = [list(row) for row in model.change]
    return [*rows, *([one.drop, one.rise, *one.drop_sizes, *one.rise_sizes] for one in model.kernels)]


def bulk_fitted() -> list[list[float]]:
    return kernels(HiddenBulk.fit(zones(), half_life_h=9.0))


def machines_fitted() -> list[float]:
    one = IndependentMachines.fit(zones(), prior_spells=1.5)
    return [one.lost_per_h, one.back_per_h, one.machines, one.tick_h]


def likelihoods() -> list[float]:
    seen = zones()
    bulk, alone = HiddenBulk.typical(machines=4, tick_s=TICK_S), IndependentMachines.fit(seen)
    taking_turns = AlternatingSpells(by_machines={3: TYPICAL})
    gangs = [model.loglik(seen, machines=3) for model in (bulk, alone, taking_turns)]
    return [*gangs, bulk.loglik_counts(seen), alone.loglik_counts(seen)]


def spells_of_chains() -> list[list[float]]:
    bulk = HiddenBulk.typical(machines=4, tick_s=TICK_S)
    alone = IndependentMachines(lost_per_h=0.2, back_per_h=0.5, machines=4, tick_h=1 / 3)
    return [[*law(pair.up), *law(pair.down)] for pair in (bulk.spells(3), alone.spells(3), alone.spells(1))]


def later_part() -> dict[str, Any]:
    return held_out(zones(), 4, share=0.7, half_life_h=20.0).to_json()


def zones_fitted() -> list[list[list[float]]]:
    return [[law(spells.spells(3).up), *kernels(bulk)] for spells, bulk in fit_zones(zones(), 3)]


def assert_near(found: Any, expected: Any) -> None:
    """Compare nested lists of figures; fits end when they hardly change any more."""
    assert len(found) == len(expected)
    if isinstance(expected[0], list):
        for ours, theirs in zip(found, expected, strict=True):
            assert_near(ours, theirs)
    else:
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-9)


def drawn() -> list[str]:
    bulk = HiddenBulk.typical(machines=4, tick_s=TICK_S)
    alone = IndependentMachines(lost_per_h=0.2, back_per_h=0.5, machines=4, tick_h=1 / 3)
    rarer = HiddenBulk.typical(machines=4, tick_s=TICK_S / 2)
    chance = np.random.default_rng(3)
    rows = [
        *bulk.sample(chance, zones=2, ticks=60, tick_s=TICK_S, machines=9),
        *alone.sample(chance, zones=2, ticks=60, tick_s=TICK_S / 2),
        *AlternatingSpells(by_machines={3: TYPICAL, 2: TYPICAL}).sample(chance, zones=3, ticks=60, tick_s=TICK_S),
        *draw(chance, [bulk, rarer, bulk], machines=5, ticks=60, groups=[7, 4, 7], shared=0.9),
    ]
    return ["".join(map(str, row)) for row in rows]


def test_spells_are_fitted_with_open_ends_and_weights_of_age() -> None:
    expected = [
        [0.21623132, 0.78376868, 0.54070522, 6.4794395, 0.60448483, 0.39551517, 1.3623683, 3.1822017, 0.71389111],
        [0.52035889, 0.47964111, 2.6279823, 6.3378242, 0.59319686, 0.40680314, 1.784826, 3.4950753, 0.63986877],
        [0.10818969, 0.89181031, 0.54492521, 6.4278438, 0.62110519, 0.37889481, 1.470795, 2.4556122, 0.75849872],
    ]
    assert_near(spells_fitted(), expected)


def test_bulk_kernels_are_fitted_with_weights_of_age() -> None:
    expected = [
        [0.9667875, 0.028231787, 0.0049807173],
        [0.081073765, 0.87869752, 0.040228714],
        [0.010018695, 0.034211617, 0.95576969],
        [0.02918666, 0.29153126, 0.64528057, 0.054133964, 0.30058547, 0.57447164, 0.092650016, 0.33287835],
        [0.57954295, 0.095682011, 0.31564176, 0.54983792, 0.13452033, 0.53086797, 0.1740727, 0.29505934],
        [0.4710594, 0.031093958, 0.48983477, 0.23129201, 0.27887323, 0.51323333, 0.18793255, 0.29883413],
    ]
    assert_near(bulk_fitted(), expected)


def test_each_zone_is_fitted_with_all_zones_as_its_prior() -> None:
    expected = [
        [
            [0.55858284, 0.44141716, 4.2978362, 5.7324425],
            [0.97303065, 0.024197709, 0.0027716416],
            [0.1041993, 0.86646539, 0.029335305],
            [0.010520464, 0.035023686, 0.95445585],
            [0.046983157, 0.25234973, 0.64148768, 0.19193732, 0.16657501, 0.43014541, 0.035608725, 0.53424587],
            [0.55336429, 0.050701665, 0.17507611, 0.74297648, 0.081947411, 0.56641928, 0.14704245, 0.28653827],
            [0.45619866, 0.03276775, 0.48716833, 0.23489008, 0.27794159, 0.51683165, 0.18416311, 0.29900524],
        ],
        [
            [0.5732479, 0.4267521, 3.6232751, 4.8739227],
            [0.97309142, 0.023771614, 0.0031369696],
            [0.096353935, 0.86917151, 0.034474557],
            [0.010432065, 0.034805917, 0.95476202],
            [0.048596764, 0.2220853, 0.53144789, 0.019109859, 0.44944225, 0.56491102, 0.061849542, 0.37323944],
            [0.59277847, 0.056144338, 0.3502919, 0.55108415, 0.098623953, 0.55865199, 0.15898289, 0.28236512],
            [0.46549431, 0.03016024, 0.49377631, 0.23361155, 0.27261214, 0.52006024, 0.18423775, 0.29570201],
        ],
    ]
    assert_near(zones_fitted(), expected)


def test_independent_machines_are_fitted() -> None:
    assert_near(machines_fitted(), [0.21694451, 0.49280083, 4, 0.33333333])


def test_what_was_seen_has_these_likelihoods() -> None:
    assert_near(likelihoods(), [-53.130084, -48.796163, -59.021107, -94.74122, -165.14699])


def test_chains_have_these_spells() -> None:
    expected = [
        [0.58308727, 0.41691273, 0.81460654, 7.4413167, 0.58537576, 0.41462424, 0.89912624, 5.2729636],
        [0.15791394, 0.84208606, 0.61092573, 3.4208125, 0.21512022, 0.78487978, 0.54635527, 1.7029864],
        [0.074862365, 0.92513763, 0.78191448, 95.700242, 0.81500901, 0.18499099, 0.4878454, 0.55364101],
    ]
    assert_near(spells_of_chains(), expected)


def test_the_later_part_is_judged_tick_by_tick() -> None:
    expected = {
        "machines": 4,
        "zones": 2,
        "ticks": 46,
        "spells": -0.29962794,
        "hidden": -0.30578437,
        "poisson": -0.39374285,
        "hidden_counts": -0.6430764,
        "poisson_counts": -1.0538523,
    }
    assert later_part() == pytest.approx(expected, rel=1e-5)


def test_seeds_draw_these_ticks() -> None:
    assert drawn() == [
        "000000000000000000096000000010000000000788899999999999999999",
        "932000000000000011000099999999990000011006000000000000000000",
        "333333333322222333334444433333333433333343333343333332222222",
        "333332333334444444444443112332222222222222333333333333222222",
        "333333333333333333333333333333333333333333333333000000000000",
        "000003333333330333333333333333333330333333333333333333333333",
        "333333333333333333333333333033003000033030030033000000000000",
        "555555555555555555555555555555055550550012115000001555555555",
        "555555555555555555555555555000000000000100000555544444505545",
        "005544400000122555555555555555555550011123225000001555555555",
    ]


def test_what_is_known_of_a_state_from_the_future_is_a_walk_backwards() -> None:
    chance = np.random.default_rng(2)
    change, evidence, start = chance.dirichlet(np.ones(3), 3), chance.random((11, 3)), np.array([0.2, 0.3, 0.5])
    walked, rows = np.full(3, 1 / 3), []
    for row in evidence[::-1]:
        rows.append(walked)
        walked = change @ (row * walked)
        walked = walked / walked.sum()
    assert smooth(start, change, evidence)[1] == pytest.approx(np.array(rows[::-1]))
    assert log_evidence(start, change, evidence[:0]) == 0.0


def test_spells_that_look_alike_count_as_one_that_weighs_more() -> None:
    seen = zones()
    once, twice = (spells_of(seen * times, 3, up=True) for times in (1, 2))
    fits = [fit_spells(once, prior=TYPICAL_UP, prior_spells=1.0), fit_spells(twice, prior=TYPICAL_UP, prior_spells=2.0)]
    assert law(fits[0]) == pytest.approx(law(fits[1]))
    assert TYPICAL_DOWN.loglik(twice) == pytest.approx(2 * TYPICAL_DOWN.loglik(once))


def test_counts_that_a_model_never_has_are_as_good_as_impossible() -> None:
    all_or_none = BulkKernel(drop=0.2, rise=0.3, drop_sizes=(1.0, 0.0, 0.0), rise_sizes=(1.0, 0.0, 0.0))
    model = HiddenBulk(change=((1.0,),), kernels=(all_or_none,), machines=4, tick_s=TICK_S)
    seen = [Observed(zone="a", up=np.array(up, np.int32), tick_s=TICK_S, machines=4) for up in ([4, 0, 0], [2, 2, 2])]
    possible, impossible = (model.loglik_counts([one]) for one in seen)
    assert possible == pytest.approx(np.log(0.2 * 0.7))
    assert -1e4 < impossible < -600
    assert np.isfinite([model.loglik([one], machines=3) for one in seen]).all()
