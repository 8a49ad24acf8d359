"""Who trains together, and when a group is formed anew."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from deepvm.policy.loss import parse_after_loss
from deepvm.runtime.hub.membership import RETURN_S, START_S, Membership

NAMES = ("worker/0", "worker/1", "worker/2")


def group(after_loss: str = "wait", names: tuple[str, ...] = NAMES) -> Membership:
    return Membership(names, parse_after_loss(after_loss))


def formed(after_loss: str = "wait") -> Membership:
    membership = group(after_loss)
    for name in NAMES:
        membership.join(name, 0.0)
    assert membership.form(0.0) is not None
    return membership


def test_the_first_group_is_formed_when_all_are_there_in_the_order_of_the_cluster() -> None:
    membership = group("shrink")
    membership.join("worker/2", 0.0)
    membership.join("worker/0", 1.0)
    assert membership.form(2.0) is None
    membership.join("worker/1", 2.0)
    found = membership.form(2.0)
    assert found is not None
    assert found.members == NAMES
    assert membership.training


def test_the_first_group_does_not_wait_for_ever_where_it_may_be_smaller() -> None:
    membership = group("shrink")
    membership.join("worker/1", 0.0)
    assert membership.form(START_S - 1) is None
    found = membership.form(START_S + 1)
    assert found is not None
    assert found.members == ("worker/1",)


def test_a_loss_breaks_the_group_and_survivors_wait_for_the_replacement() -> None:
    membership = formed("wait")
    assert membership.lose("worker/1")
    assert membership.broken_by == "worker/1"
    membership.join("worker/0", 10.0)
    membership.join("worker/2", 10.0)
    assert membership.form(10_000.0) is None
    membership.join("worker/1", 10_001.0)
    found = membership.form(10_001.0)
    assert found is not None
    assert (found.number, found.members) == (2, NAMES)


def test_survivors_continue_smaller_and_grow_when_another_comes() -> None:
    membership = formed("shrink")
    assert membership.lose("worker/1")
    membership.join("worker/0", 10.0)
    membership.join("worker/2", 10.1)
    found = membership.form(10.1)
    assert found is not None
    assert found.members == ("worker/0", "worker/2")
    assert membership.join("worker/1", 20.0)  # that breaks the smaller group
    for name in ("worker/0", "worker/2"):
        assert not membership.join(name, 20.1)
    again = membership.form(20.2)
    assert again is not None
    assert again.members == NAMES


def test_all_may_be_lost_at_once_and_come_back() -> None:
    membership = formed("wait")
    assert membership.lose("worker/0")
    assert not membership.lose("worker/1")  # it is broken already
    membership.lose("worker/2")
    assert membership.form(5.0) is None
    for name in NAMES:
        membership.join(name, 6.0)
    found = membership.form(6.0)
    assert found is not None
    assert found.members == NAMES


def test_it_is_over_when_all_have_finished_and_a_finished_machine_may_go() -> None:
    membership = formed()
    membership.finish("worker/0")
    assert not membership.lose("worker/0")
    membership.finish("worker/1")
    assert not membership.over
    assert membership.lose("worker/2")  # before it had finished: the others must come again
    for name in NAMES:
        membership.join(name, 9.0)
    assert membership.form(9.0) is not None
    for name in NAMES:
        membership.finish(name)
    assert membership.over


@given(
    st.lists(
        st.tuples(st.sampled_from(["join", "lose", "fail", "finish", "form"]), st.sampled_from(NAMES)), max_size=60
    ),
    st.sampled_from(["wait", "shrink", "shrink:2", "wait:3s"]),
)
def test_whatever_happens_a_group_has_only_machines_that_joined_and_numbers_grow(
    moves: list[tuple[str, str]], after_loss: str
) -> None:
    membership = group(after_loss)
    ready: set[str] = set()
    last = 0
    for now_s, (what, name) in enumerate(moves):
        if what == "join":
            membership.join(name, float(now_s))
            ready.add(name)
        elif what == "lose":
            membership.lose(name)
            ready.discard(name)
        elif what == "form":
            found = membership.form(float(now_s))
            if found is not None:
                assert set(found.members) <= ready
                assert found.number == last + 1
                last = found.number
                ready = set()
        else:
            getattr(membership, what)(name)


def test_a_smaller_group_waits_for_its_survivors_so_that_none_breaks_what_the_others_just_formed() -> None:
    membership = formed("shrink")
    assert membership.lose("worker/1")
    membership.join("worker/2", 10.0)
    assert membership.form(10.0) is None, "worker/0 is still there, and ends its workers"
    membership.join("worker/0", 11.0)
    found = membership.form(11.0)
    assert found is not None
    assert found.members == ("worker/0", "worker/2")
    assert membership.join("worker/1", 20.0), "its replacement breaks the smaller group"
    assert membership.form(20.0) is None
    membership.join("worker/0", 20.1)
    membership.join("worker/2", 20.2)
    grown = membership.form(20.2)
    assert grown is not None
    assert grown.members == NAMES


def test_a_survivor_that_never_joins_again_is_not_waited_for_without_end() -> None:
    membership = formed("shrink")
    assert membership.lose("worker/1")
    membership.join("worker/2", 10.0)
    found = membership.form(10.0 + RETURN_S)
    assert found is not None
    assert found.members == ("worker/2",)


def test_who_keeps_checkpoints_elsewhere_now_breaks_a_group_that_trains() -> None:
    membership = formed("wait")
    assert membership.move("memory/0")
    assert not membership.move("memory/0"), "it is broken already"
    for name in NAMES:
        membership.join(name, 1.0)
    assert membership.form(1.0) is not None


def test_a_machine_that_is_lost_while_it_waits_is_in_no_round() -> None:
    membership = group("shrink")
    for name in NAMES:
        membership.join(name, 0.0)
    assert not membership.lose("worker/1")
    assert membership.joined == ("worker/0", "worker/2")
    found = membership.form(START_S)
    assert found is not None
    assert (found.number, found.members) == (1, ("worker/0", "worker/2"))


def test_survivors_have_their_time_to_return_and_not_more() -> None:
    membership = formed("shrink")
    assert membership.fail("worker/2")
    membership.join("worker/2", 50.0)
    assert membership.form(50.0 + RETURN_S - 0.01) is None
    found = membership.form(50.0 + RETURN_S)
    assert found is not None
    assert found.members == ("worker/2",)


def test_a_round_is_broken_once_and_never_after_its_end() -> None:
    membership = formed()
    assert not membership.fail("worker/9")
    assert membership.move("memory/0")
    assert membership.broken_by == "memory/0"
    assert not membership.lose("worker/0"), "it is broken already"
    done = formed()
    for name in NAMES:
        assert not done.over
        done.finish(name)
    assert done.over
    assert not done.move("memory/0")
    assert not done.lose("worker/1")
    assert done.training
