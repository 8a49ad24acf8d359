"""Several ranks, as processes that meet over gloo, save one checkpoint together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deepvm.checkpoint.save.schedule import MOST_STEPS
from deepvm.events import Event
from tests.support.checkpoint import rank_processes
from tests.support.checkpoint.processes import BLOCK, Node, nodes, url_of
from tests.support.checkpoint.rank_processes import run_ranks


@pytest.fixture
def two_nodes() -> Iterator[list[Node]]:
    """For each test its own: a run that has steps already takes none below them."""
    with nodes(2) as started:
        yield started


@pytest.mark.parametrize(("world_size", "count"), [(2, 1), (3, 2)])
def test_ranks_share_the_bytes_evenly_and_any_number_restores(
    tmp_path: Path, two_nodes: list[Node], world_size: int, count: int
) -> None:
    url = url_of(two_nodes[:count], connections=1)
    told = run_ranks(world_size, tmp_path, rank_processes.save_once, url, 7)
    sent = [one["sent"] for one in told]
    assert min(sent) > 0
    assert max(sent) - min(sent) <= 2 * BLOCK, sent  # one chunk, and the last is shorter
    truth = told[0]["truth"]
    for others in (1, world_size) if world_size == 2 else (1, 2, world_size):
        found = run_ranks(others, tmp_path, rank_processes.restore, url)
        assert [one["step"] for one in found] == [7] * others
        assert [one["digest"] for one in found] == [truth] * others
        assert [one["position"]["index"] for one in found] == [10**rank for rank in range(others)]
        assert [len(one["position"]["seen"]) for one in found] == [700 * rank for rank in range(others)]


def test_a_save_is_skipped_on_all_ranks_or_on_none_and_skeletons_may_differ(
    tmp_path: Path, two_nodes: list[Node]
) -> None:
    first, *others = run_ranks(3, tmp_path, rank_processes.save_often, url_of(two_nodes, replicas=2), 12)
    assert "failed" not in first["states"], first
    assert {"remote", "durable"} & set(first["states"])
    for other in others:
        assert [s == "skipped" for s in other["states"]] == [s == "skipped" for s in first["states"]]


def test_all_ranks_refuse_a_save_below_what_nobody_restored_and_remove_what_they_went_back_from(
    tmp_path: Path, two_nodes: list[Node]
) -> None:
    url = url_of(two_nodes[:1])
    for step in (7, 20):
        run_ranks(2, tmp_path, rank_processes.save_once, url, step)
    for one in run_ranks(2, tmp_path, rank_processes.save_below_what_is_there, url):
        assert one["state"] == "failed"
        assert "has step 20, newer than step 5 and not restored" in one["reason"]
        assert one["branch"] in ("remote", "durable")
    found = run_ranks(2, tmp_path, rank_processes.restore, url)
    assert [one["step"] for one in found] == [8, 8]  # and not 20, which the new branch supersedes


def test_ranks_with_different_tensors_are_refused_at_once(tmp_path: Path, two_nodes: list[Node]) -> None:
    for one in run_ranks(2, tmp_path, rank_processes.save_different_layouts, url_of(two_nodes[:1])):
        assert one["state"] == "failed"
        assert "model.weight is a tensor (float32, shape [30, 30]) on rank 0 and a tensor" in one["reason"]
        assert "shape [31, 30]) on rank 1" in one["reason"]


def test_a_rank_that_cannot_save_lets_the_others_know(tmp_path: Path, two_nodes: list[Node]) -> None:
    first, second = run_ranks(2, tmp_path, rank_processes.save_what_one_rank_cannot, url_of(two_nodes[:1]))
    assert (first["state"], second["state"]) == ("failed", "failed")
    assert "rank 1: state 'own.odd' is a builtins.object, which cannot be saved" in first["reason"]
    assert "cannot be saved" in second["reason"]


def test_a_rank_that_breaks_while_sending_fails_the_save_within_its_deadline(
    tmp_path: Path, two_nodes: list[Node]
) -> None:
    url = url_of(two_nodes[:1])
    for one in run_ranks(2, tmp_path, rank_processes.die_in_the_middle, url):
        assert one["state"] == "failed"
    assert [one["step"] for one in run_ranks(2, tmp_path, rank_processes.restore, url)] == [1, 1]


def test_policies_that_read_a_clock_decide_alike(tmp_path: Path, two_nodes: list[Node]) -> None:
    first, second = run_ranks(2, tmp_path, rank_processes.decide_by_time, url_of(two_nodes[:1]))
    assert len(first["saved"]) >= 2
    assert first["saved"] == second["saved"]


def test_a_notice_to_one_machine_makes_all_ranks_save(tmp_path: Path, two_nodes: list[Node]) -> None:
    first, second = run_ranks(2, tmp_path, rank_processes.notice_on_one_rank, url_of(two_nodes[:1]))
    assert first["saved"] == second["saved"] != []
    assert 3 <= first["saved"][0] < 3 + MOST_STEPS


def test_a_notice_in_a_file_on_one_machine_makes_all_ranks_save_whatever_the_policy(
    tmp_path: Path, two_nodes: list[Node]
) -> None:
    first, second = run_ranks(2, tmp_path, rank_processes.notice_in_a_file, url_of(two_nodes[:1]), str(tmp_path))
    assert first["saved"] == second["saved"]
    at_notice, at_40 = first["saved"]
    assert 3 <= at_notice < 3 + MOST_STEPS
    assert at_40 == 40
    events = [
        [Event.from_line(line) for line in (tmp_path / f"events.{rank}").read_text().splitlines()] for rank in range(2)
    ]
    assert [e.data["step"] for e in events[0] if e.kind == "step"] == list(range(1, 51))
    assert {e.kind for e in events[1]} == {"save"}
    for rank in range(2):
        remote = [e.data for e in events[rank] if e.kind == "save" and e.data["state"] == "remote"]
        assert [(d["step"], d["rank"]) for d in remote] == [(at_notice, rank), (40, rank), (50, rank)]
        assert all(0 <= d["bytes_sent"] < d["bytes"] for d in remote)


def test_every_ranks_own_state_is_in_files_too(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'kept'}"
    run_ranks(2, tmp_path, rank_processes.save_into_files, url)
    found = run_ranks(2, tmp_path, rank_processes.restore, url)
    assert [one["position"]["index"] for one in found] == [1, 10]


@pytest.mark.parametrize("tiers", [1, 2])
def test_a_rank_does_not_take_the_older_save_of_a_step_for_the_new_one(
    tmp_path: Path, two_nodes: list[Node], tiers: int
) -> None:
    stores = [url_of(two_nodes[:1]), f"file://{tmp_path / 'kept'}"][-tiers:]
    told = run_ranks(2, tmp_path, rank_processes.save_a_step_again, stores, str(tmp_path))
    assert [one["early"] for one in told] == [False, False]


def test_three_ranks_of_ddp_resume_bit_for_bit_where_their_buckets_are_settled(
    tmp_path: Path, two_nodes: list[Node]
) -> None:
    url = url_of(two_nodes[:1])
    truth = run_ranks(3, tmp_path, rank_processes.summed_steps, url, "undisturbed", 6, "settled")
    for steps in (2, 4):  # two starts, 6 steps in all
        told = run_ranks(3, tmp_path, rank_processes.summed_steps, url, "restarted", steps, "settled")
    assert [one["step"] for one in told] == [2, 2, 2]
    assert [one["digest"] for one in told] == [one["digest"] for one in truth]


RULE = "every rank creates the Checkpointer and calls restore(), step(), save() and close() alike, not only rank 0"


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        (["step 2", "nothing"], "rank 1 did not reach save(2) within 1 s"),  # `if rank == 0: ckpt.step(n)`
        (["restore", "close"], "rank 1 has left (its Checkpointer is closed), and rank 0 is at restore()"),
        (["close", "save 1"], "rank 0 has left (its Checkpointer is closed), and others are at save(1)"),
        (["save 8", "step 9"], None),  # a save that one rank leaves out; the other waits until it has left
        (["save 8", "save 9"], "rank 1 is at save(9) while rank 0 is at save(8)"),
    ],
)
def test_ranks_that_are_not_at_the_same_call_say_so_in_one_sentence(
    tmp_path: Path, two_nodes: list[Node], calls: list[str], said: str | None
) -> None:
    told = run_ranks(2, tmp_path, rank_processes.diverge, url_of(two_nodes[:1]), calls, 1.0)
    found = [one["problem"] for one in told if one["problem"] is not None]
    assert found, told
    for problem in found:
        assert RULE in problem
        assert said is None or problem.startswith(said), problem


def test_a_rank_with_other_components_is_refused_on_every_rank(tmp_path: Path, two_nodes: list[Node]) -> None:
    for one in run_ranks(2, tmp_path, rank_processes.components_differ, url_of(two_nodes[:1])):
        assert one["problem"].startswith("the state's 'epoch' is values on rank 0 and missing on rank 1")


def test_a_rank_that_cannot_restore_tells_the_others_at_once_and_why(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/kept"
    run_ranks(2, tmp_path, rank_processes.save_a_small_model, url)
    first, second = run_ranks(2, tmp_path, rank_processes.restore_another_model, url)
    assert "the checkpoint is of another model: model.weight is (4, 3), saved (3, 3)" in second["problem"]
    assert first["problem"] == f"rank 1: {second['problem']}"


def test_a_value_that_is_a_tensor_on_one_rank_only_is_named_with_its_rank(
    tmp_path: Path, two_nodes: list[Node]
) -> None:
    for one in run_ranks(2, tmp_path, rank_processes.tensor_on_one_rank, url_of(two_nodes[:1])):
        (reason,) = one["reasons"]
        assert reason.startswith("meter.best is a tensor (float32, shape []) on rank 0 and a float on rank 1")


def test_the_last_step_is_saved_though_the_process_group_is_destroyed(tmp_path: Path, two_nodes: list[Node]) -> None:
    for one in run_ranks(2, tmp_path, rank_processes.last_step_after_the_group, url_of(two_nodes[:1])):
        assert one["newest"] == 1
