"""Where a gang trains: the cheapest zone that is up, its ceiling, and when it moves."""

from __future__ import annotations

import numpy as np
import pytest

from deepvm.errors import UsageError
from deepvm.policy.placement import WAIT, CheapestUp, Stay

UP = np.array([[True, True, False, False], [True, False, True, False]])
USD = np.array([[2.0, 2.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0]])


def test_a_gang_that_stays_waits_for_its_zone() -> None:
    assert Stay(1).choose(UP, USD).tolist() == [1, WAIT, 1, WAIT]
    assert Stay().choose(UP, USD).tolist() == [0, 0, WAIT, WAIT]
    assert not Stay(1).leave(UP, USD).any()
    assert Stay(1).leave(UP, USD).shape == UP.shape
    for zone in (-1, 2):
        with pytest.raises(UsageError, match=f"zone {zone} is outside of a market of 2 zones"):
            Stay(zone).choose(UP, USD)


def test_the_cheapest_zone_that_is_up_is_chosen_up_to_the_ceiling() -> None:
    assert CheapestUp().choose(UP, USD).tolist() == [1, 0, 1, WAIT]
    assert CheapestUp(ceiling=2.0).choose(UP, USD).tolist() == [1, 0, 1, WAIT]
    assert CheapestUp(ceiling=1.99).choose(UP, USD).tolist() == [1, WAIT, 1, WAIT]
    assert CheapestUp(most_usd=1.0).choose(UP, USD).tolist() == [1, WAIT, 1, WAIT]
    assert CheapestUp(most_usd=0.9).choose(UP, USD).tolist() == [WAIT] * 4
    assert CheapestUp().choose(UP, 4 * USD / USD.max()).shape == (4,)
    three = np.array([[3.0], [1.0]]), np.array([[3.01], [1.0]])
    up = np.array([[True], [False]])
    assert [CheapestUp().choose(up, usd)[0] for usd in three] == [0, WAIT]


def test_a_gang_moves_where_another_zone_is_up_for_much_less() -> None:
    assert CheapestUp().leave(UP, USD).tolist() == [[True, False, True, False], [False, False, False, False]]
    assert CheapestUp(way_back=0.5).leave(UP, USD).tolist() == [[False] * 4, [False] * 4]
    assert CheapestUp(way_back=0.51).leave(UP, USD)[0].tolist() == [True, False, True, False]
    assert not CheapestUp(way_back=None).leave(UP, USD).any()
    assert CheapestUp(most_usd=0.9).leave(UP, USD).all()  # every zone is dearer: it waits


@pytest.mark.parametrize("options", [{"ceiling": 0.99}, {"ceiling": float("nan")}, {"way_back": 0}, {"way_back": 1}])
def test_rules_that_would_never_start_or_never_rest_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        CheapestUp(**options)
    assert CheapestUp(ceiling=1, way_back=0.999).ceiling == 1
