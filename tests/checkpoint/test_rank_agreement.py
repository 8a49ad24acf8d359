"""Meetings of ranks over torch's own key-value store; each rank is a thread here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from deepvm.checkpoint import rank_agreement
from deepvm.checkpoint.rank_agreement import GRACE_S, RULE, Meetings, RanksDiverged, Verdict
from deepvm.errors import CheckpointError

Hold = Callable[[], Verdict]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.HashStore]:
    monkeypatch.setattr(rank_agreement, "CHECK_S", 0.0)
    shared = dist.HashStore()
    shared.set_timeout(timedelta(seconds=20))
    dist.init_process_group("gloo", store=shared, rank=0, world_size=1)
    yield shared
    dist.destroy_process_group()


def together(*calls: Hold) -> list[Verdict | str]:
    """Call all at once; return verdicts, or the text of what was raised."""
    found: list[Any] = [None] * len(calls)

    def run(number: int, call: Hold) -> None:
        try:
            found[number] = call()
        except RanksDiverged as error:
            found[number] = str(error)

    threads = [threading.Thread(target=run, args=(number, call)) for number, call in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def meetings(name: str, world_size: int) -> list[Meetings]:
    return [Meetings(name, rank, world_size) for rank in range(world_size)]


def test_all_ranks_get_the_same_verdict_of_values_of_any_length_and_the_store_does_not_grow(
    store: dist.HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_agreement, "PIECE_BYTES", 8)
    both = meetings("long", 2)
    sizes = []
    for number in range(5):
        values = [{"rank": rank, "text": "x" * 50, "number": number} for rank in range(2)]
        found = together(
            *(
                lambda m=m, v=v: m.hold("save(1)", v, None, 30.0, gather=False)
                for m, v in zip(both, values, strict=True)
            )
        )
        assert found == [Verdict(values=values), Verdict(values=values)]
        sizes.append(store.num_keys())
    assert sizes[1:] == [sizes[1]] * 4


def test_only_rank_0_gets_gathered_values_and_all_get_the_problems(store: dist.HashStore) -> None:
    one, two, three = meetings("gather", 3)
    found = together(
        lambda: one.hold("save(1)", "a", None, 30.0, gather=True),
        lambda: two.hold("save(1)", "b", "no room", 30.0, gather=True),
        lambda: three.hold("save(1)", "c", "no disk", 30.0, gather=True),
    )
    problems = {1: "no room", 2: "no disk"}
    assert found == [
        Verdict(values=["a", "b", "c"], problems=problems),
        Verdict(values=[], problems=problems),
        Verdict(values=[], problems=problems),
    ]
    assert found[0].text() == "rank 1: no room; rank 2: no disk"  # type: ignore[union-attr]


def test_ranks_at_different_calls_are_told_which_ones(store: dist.HashStore) -> None:
    one, two = meetings("apart", 2)
    text = f"rank 1 is at restore() while rank 0 is at save(1): {RULE}"
    assert together(
        lambda: one.hold("save(1)", 1, None, 30.0, gather=False),
        lambda: two.hold("restore()", 1, None, 30.0, gather=False),
    ) == [text, text]


def test_rank_0_names_the_missing_and_a_late_rank_learns_the_same(store: dist.HashStore) -> None:
    ranks = meetings("late", 12)
    several = "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 3 more"
    text = f"{several} did not reach save(1) within 0 s: {RULE}"
    assert together(lambda: ranks[0].hold("save(1)", 1, None, 0.0, gather=False)) == [text]
    assert together(lambda: ranks[11].hold("save(1)", 1, None, 0.0, gather=False)) == [text]
    one, _ = meetings("late-too", 2)
    text = f"rank 1 did not reach save(1) within 0 s: {RULE}"
    assert together(lambda: one.hold("save(1)", 1, None, 0.0, gather=False)) == [text]


def test_a_rank_that_waited_in_vain_for_rank_0_decides_for_all(store: dist.HashStore) -> None:
    one, two, _ = meetings("alone", 3)
    text = f"rank 0 did not reach save(1) within 0 s: {RULE}"
    assert together(lambda: two.hold("save(1)", 1, None, -GRACE_S, gather=False)) == [
        text.replace("within 0 s", f"within {-GRACE_S + GRACE_S:g} s")
    ]
    assert together(lambda: one.hold("save(1)", 1, None, 30.0, gather=False)) == [text]  # though rank 2 is missing


def test_a_rank_that_has_left_is_not_waited_for_unless_it_may_come_back(store: dist.HashStore) -> None:
    one, two = meetings("left", 2)
    for each in (one, two):
        each.enter()
    two.enter()
    two.leave("close()")  # and is still there once
    found = together(
        lambda: one.hold("save(1)", 1, None, 30.0, gather=False),
        lambda: two.hold("save(1)", 2, None, 30.0, gather=False),
    )
    assert found == [Verdict(values=[1, 2])] * 2
    two.leave("close()")
    text = f"rank 1 has left (close()), and rank 0 is at save(2): {RULE}"
    assert together(lambda: one.hold("save(2)", 1, None, 30.0, gather=False)) == [text]
    two.enter()
    one.leave("an exception")
    together(lambda: two.hold("save(2)", 1, None, 30.0, gather=False))
    text = f"rank 0 has left (an exception), and others are at save(3): {RULE}"
    assert together(lambda: two.hold("save(3)", 1, None, 30.0, gather=False)) == [text]


def test_a_rank_that_has_come_back_is_waited_for_again(store: dist.HashStore) -> None:
    one, two = meetings("back", 2)
    for each in (one, two):
        each.enter()
        each.leave("close()")
        each.enter()
        assert one._left(0) is two._left(1) is None
    found = together(
        lambda: one.hold("save(1)", 1, None, 30.0, gather=False),
        lambda: two.hold("save(1)", 2, None, 30.0, gather=False),
    )
    assert found == [Verdict(values=[1, 2])] * 2


def test_creating_again_waits_for_a_rank_that_has_left(store: dist.HashStore) -> None:
    one, two = meetings("again", 2)
    for each in (one, two):
        each.enter()
        each.leave("close()")
    found = together(
        lambda: one.hold(rank_agreement.CREATING, 1, None, 30.0, gather=False),
        lambda: two.hold(rank_agreement.CREATING, 2, None, 30.0, gather=False),
    )
    assert found == [Verdict(values=[1, 2])] * 2


def test_a_store_that_is_lost_is_reported_with_the_call(store: dist.HashStore) -> None:
    _, two = meetings("lost", 2)
    two._store.set("0/verdict", '["nowhere", 1, "x"]')  # with a second piece that is not there any more
    two._store.set_timeout(timedelta(milliseconds=1))
    (text,) = together(lambda: two.hold("save(1)", 1, None, 30.0, gather=False))
    assert isinstance(text, str)
    assert text.startswith("rank 1 cannot reach the other ranks at save(1): ")


def test_a_group_without_a_store_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: None)  # as with MPI, which no wheel has
    with pytest.raises(CheckpointError, match=r"torch\.distributed was initialized without a store"):
        rank_agreement._group_store()
