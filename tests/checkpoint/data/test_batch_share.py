"""What a step is made of when there are more ranks than planned, or fewer."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import deepvm
from deepvm.checkpoint import BatchShare, ResumableSampler, ranks, share_of_batch
from deepvm.errors import UnknownName, UsageError
from tests.support.checkpoint import rank_processes

sizes = st.integers(16, 5000)
worlds = st.integers(1, 16)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEEPVM_BATCH", raising=False)
    monkeypatch.delenv("DEEPVM_PLANNED_WORLD_SIZE", raising=False)


def share(world_size: int, global_batch: int, **options: object) -> BatchShare:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ranks, "rank_and_world_size", lambda: (0, world_size))
        return share_of_batch(global_batch, **options)  # type: ignore[arg-type]


@given(sizes, worlds, worlds)
def test_the_global_batch_is_kept_unless_configured_otherwise(size: int, world_size: int, planned: int) -> None:
    found = share(world_size, size, planned_world_size=planned)
    assert (found.global_batch, found.lr_factor) == (size, 1.0)
    shares = [
        len(next(iter(ResumableSampler(range(size), global_batch=size, rank=rank, world_size=world_size))))
        for rank in range(world_size)
    ]
    assert sum(shares) == size
    assert max(shares) == found.per_rank
    planned_share = -(-size // planned)
    assert -(-found.per_rank // found.accumulate) <= planned_share  # no part is larger than a rank was planned for
    assert found.accumulate == 1 or found.per_rank > (found.accumulate - 1) * planned_share


@given(sizes, worlds, worlds)
def test_the_local_batch_is_kept_and_the_learning_rate_follows(size: int, world_size: int, planned: int) -> None:
    found = share(world_size, size, policy="keep-local-batch", planned_world_size=planned)
    assert abs(found.global_batch / world_size - size / planned) < 1
    assert found.lr_factor == world_size / planned
    assert abs(found.per_rank - size / planned) <= 1
    assert found.accumulate == 1


def test_as_planned_both_are_the_same() -> None:
    plain = BatchShare(global_batch=100, per_rank=34, accumulate=1, lr_factor=1.0)
    assert share(3, 100) == plain
    assert share(3, 100, policy="keep-local-batch", planned_world_size=3) == plain


def test_the_environment_says_what_was_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPVM_BATCH", "keep-local-batch")
    monkeypatch.setenv("DEEPVM_PLANNED_WORLD_SIZE", "4")
    assert share(2, 64) == BatchShare(global_batch=32, per_rank=16, accumulate=1, lr_factor=0.5)
    assert share(2, 64, policy="keep-global-batch") == BatchShare(
        global_batch=64, per_rank=32, accumulate=2, lr_factor=1.0
    )
    assert deepvm.share_of_batch(64, planned_world_size=1) == BatchShare(
        global_batch=64, per_rank=64, accumulate=1, lr_factor=1.0
    )


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownName, match="did you mean keep-local-batch"):
        share(2, 64, policy="keep-local")
    with pytest.raises(UsageError, match="each of 8 ranks"):
        share(2, 4, planned_world_size=8)
    with pytest.raises(UsageError, match="no sample for some of 8 ranks"):
        share(8, 4, planned_world_size=2)
    with pytest.raises(UsageError, match="0 ranks"):
        share(2, 4, planned_world_size=0)
    monkeypatch.setenv("DEEPVM_PLANNED_WORLD_SIZE", "many")
    with pytest.raises(UsageError, match="DEEPVM_PLANNED_WORLD_SIZE is 'many'"):
        share(2, 64)


def test_real_ranks_share_a_batch_that_cannot_be_divided(tmp_path: Path) -> None:
    told = rank_processes.run_ranks(3, tmp_path, rank_processes.share_a_batch, 64, 4)
    assert [one["own"] for one in told] == [22, 21, 21]
    assert {(one["per_rank"], one["accumulate"]) for one in told} == {(22, 2)}
