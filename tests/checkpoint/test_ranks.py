"""Several ranks, as processes that meet over gloo, save one checkpoint together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ranked
from killable import BLOCK, Node, nodes, url_of
from ranked import run_ranks

from deepvm.checkpoint.deciding import MOST_STEPS
from deepvm.runtime.events import Event


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[list[Node]]:
    with nodes(2) as started:
        yield started


@pytest.mark.parametrize(("world_size", "count"), [(2, 1), (3, 2)])
def test_ranks_share_the_bytes_evenly_and_any_number_restores(
    tmp_path: Path, two_nodes: list[Node], world_size: int, count: int
) -> None:
    url = url_of(two_nodes[:count], connections=1)
    told = run_ranks(world_size, tmp_path, ranked.save_once, url, 7)
    sent = [one["sent"] for one in told]
    assert min(sent) > 0
    assert max(sent) - min(sent) <= 2 * BLOCK, sent  # one chunk, and the last is shorter
    truth = told[0]["truth"]
    for others in (1, world_size) if world_size == 2 else (1, 2, world_size):
        found = run_ranks(others, tmp_path, ranked.restore, url)
        assert [one["step"] for one in found] == [7] * others
        assert [one["digest"] for one in found] == [truth] * others
        assert [one["position"]["index"] for one in found] == [10**rank for rank in range(others)]
        assert [len(one["position"]["seen"]) for one in found] == [700 * rank for rank in range(others)]


def test_a_save_is_skipped_on_all_ranks_or_on_none_and_skeletons_may_differ(
    tmp_path: Path, two_nodes: list[Node]
) -> None:
    first, *others = run_ranks(3, tmp_path, ranked.save_often, url_of(two_nodes, replicas=2), 12)
    assert "failed" not in first["states"], first
    assert {"remote", "durable"} & set(first["states"])
    for other in others:
        assert [s == "skipped" for s in other["states"]] == [s == "skipped" for s in first["states"]]


def test_ranks_with_different_tensors_are_refused_at_once(tmp_path: Path, two_nodes: list[Node]) -> None:
    for one in run_ranks(2, tmp_path, ranked.save_different_layouts, url_of(two_nodes[:1])):
        assert one["state"] == "failed"
        assert "rank 1 has other tensors than rank 0" in one["reason"]
        assert one["took_s"] < 10


def test_a_rank_that_cannot_save_lets_the_others_know(tmp_path: Path, two_nodes: list[Node]) -> None:
    first, second = run_ranks(2, tmp_path, ranked.save_what_one_rank_cannot, url_of(two_nodes[:1]))
    assert (first["state"], second["state"]) == ("failed", "failed")
    assert "rank 1 could not go on" in first["reason"]
    assert "cannot be saved" in second["reason"]


def test_a_rank_that_breaks_while_sending_fails_the_save_within_its_deadline(
    tmp_path: Path, two_nodes: list[Node]
) -> None:
    url = url_of(two_nodes[:1])
    for one in run_ranks(2, tmp_path, ranked.die_in_the_middle, url):
        assert one["state"] == "failed"
        assert one["took_s"] < 12
    assert [one["step"] for one in run_ranks(2, tmp_path, ranked.restore, url)] == [1, 1]


def test_policies_that_read_a_clock_decide_alike(tmp_path: Path, two_nodes: list[Node]) -> None:
    first, second = run_ranks(2, tmp_path, ranked.decide_by_time, url_of(two_nodes[:1]))
    assert len(first["saved"]) >= 2
    assert first["saved"] == second["saved"]


def test_a_notice_to_one_machine_makes_all_ranks_save(tmp_path: Path, two_nodes: list[Node]) -> None:
    first, second = run_ranks(2, tmp_path, ranked.notice_on_one_rank, url_of(two_nodes[:1]))
    assert first["saved"] == second["saved"] != []
    assert 3 <= first["saved"][0] < 3 + MOST_STEPS


def test_a_notice_in_a_file_on_one_machine_makes_all_ranks_save_whatever_the_policy(
    tmp_path: Path, two_nodes: list[Node]
) -> None:
    first, second = run_ranks(2, tmp_path, ranked.notice_in_a_file, url_of(two_nodes[:1]), str(tmp_path))
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
        assert [(d["step"], d["rank"]) for d in remote] == [(at_notice, rank), (40, rank)]
        assert all(0 <= d["bytes_sent"] < d["bytes"] for d in remote)


def test_every_ranks_own_state_is_in_files_too(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'kept'}"
    run_ranks(2, tmp_path, ranked.save_into_files, url)
    found = run_ranks(2, tmp_path, ranked.restore, url)
    assert [one["position"]["index"] for one in found] == [1, 10]


def test_three_ranks_of_ddp_resume_bit_for_bit_where_their_buckets_are_settled(
    tmp_path: Path, two_nodes: list[Node]
) -> None:
    url = url_of(two_nodes[:1])
    truth = run_ranks(3, tmp_path, ranked.summed_steps, url, "undisturbed", 6, "settled")
    for steps in (2, 4):  # two starts, 6 steps in all
        told = run_ranks(3, tmp_path, ranked.summed_steps, url, "restarted", steps, "settled")
    assert [one["step"] for one in told] == [2, 2, 2]
    assert [one["digest"] for one in told] == [one["digest"] for one in truth]
