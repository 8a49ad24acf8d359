"""Every sample exactly once per epoch, whatever becomes of the ranks; and the same order as if nothing had happened."""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader

import deepvm
from deepvm.checkpoint import ResumableSampler, resumable
from deepvm.checkpoint.data.sampler import Division, shuffled
from deepvm.checkpoint.state.skeleton import Tensors, flatten, rebuild
from deepvm.errors import CheckpointError, UsageError

Step = list[list[int]]  # each rank's batch
Stage = tuple[int, int, int]  # ranks, batch size of each, steps

sizes = st.integers(0, 120)
worlds = st.integers(1, 7)
batch_sizes = st.integers(1, 6)
stages = st.lists(st.tuples(worlds, batch_sizes, st.integers(0, 6)), max_size=4)
seeds = st.integers(0, 2**64 - 1)
laws = settings(deadline=None)  # of two cores that others use, too


def ranks_of(samples: int, world_size: int, batch_size: int, **options: Any) -> list[ResumableSampler]:
    return [
        ResumableSampler(range(samples), batch_size, rank=rank, world_size=world_size, **options)
        for rank in range(world_size)
    ]


def run(samplers: list[ResumableSampler], steps: int | None = None) -> list[Step]:
    """Take steps on all ranks, to the end of the epoch where their number is not given."""
    passes = [iter(sampler) for sampler in samplers]
    taken: list[Step] = []
    while steps is None or len(taken) < steps:
        batches = [next(one, None) for one in passes]
        if batches[0] is None:
            assert batches == [None] * len(batches)
            break
        assert samplers[0].even is False or None not in batches, "a rank would wait for the others for ever"
        taken.append([batch or [] for batch in batches])
        for sampler in samplers:
            sampler.advance()
        assert len({sampler.consumed for sampler in samplers}) == 1
    return taken


def run_stages(samples: int, plan: list[Stage], **options: Any) -> list[tuple[int, int, Step]]:
    """One epoch, with the number of ranks and the batch size changed on the way; the last stage goes to its end."""
    taken: list[tuple[int, int, Step]] = []
    consumed = 0
    for number, (world_size, batch_size, steps) in enumerate(plan):
        samplers = ranks_of(samples, world_size, batch_size, **options)
        for sampler in samplers:
            sampler.seek(seed=sampler.seed, epoch=sampler.epoch, consumed=consumed, samples=samples)
        found = run(samplers, None if number == len(plan) - 1 else steps)
        taken += [(world_size, batch_size, step) for step in found]
        consumed = samplers[0].consumed
    return taken


@laws
@given(sizes, stages, worlds, batch_sizes, seeds, st.booleans())
def test_every_sample_comes_exactly_once_though_the_ranks_change(
    samples: int, before: list[Stage], world_size: int, batch_size: int, seed: int, shuffle: bool
) -> None:
    taken = run_stages(samples, [*before, (world_size, batch_size, 0)], seed=seed, shuffle=shuffle, even=False)
    seen = list(chain.from_iterable(chain.from_iterable(step for *_, step in taken)))
    assert sorted(seen) == list(range(samples))
    order = shuffled(samples, seed, 0).tolist() if shuffle else list(range(samples))
    assert seen == order, "steps and ranks, one after another, follow the one order of the epoch"
    for _, size, step in taken:
        assert max(map(len, step)) <= size
        assert max(map(len, step)) - min(map(len, step)) <= 1


@laws
@given(sizes, stages, worlds, batch_sizes)
def test_every_rank_takes_as_many_steps_and_repeats_a_sample_only_where_ranks_outnumber_them(
    samples: int, before: list[Stage], world_size: int, batch_size: int
) -> None:
    taken = run_stages(samples, [*before, (world_size, batch_size, 0)])
    times = Counter(chain.from_iterable(chain.from_iterable(step for *_, step in taken)))
    assert times.keys() == set(range(samples))
    assert all(batch for *_, step in taken for batch in step)
    repeated = sum(times.values()) - samples
    if repeated:
        ranks_then, size_then, last = taken[-1]
        assert set(map(len, last)) == {1}
        assert ranks_then - repeated == len({batch[0] for batch in last})
        same_ranks_before = len(taken) > 1 and taken[-2][:2] == taken[-1][:2]
        assert size_then == 1 or not same_ranks_before, "batches of two or more can always be divided better"


@laws
@given(sizes, worlds, batch_sizes, seeds, st.integers(0, 3), st.booleans(), st.booleans(), st.data())
def test_a_resumed_epoch_continues_as_it_would_have(
    samples: int, world_size: int, batch_size: int, seed: int, epoch: int, shuffle: bool, drop_last: bool, data: Any
) -> None:
    options = {"seed": seed, "shuffle": shuffle, "drop_last": drop_last}
    whole = ranks_of(samples, world_size, batch_size, **options)
    for sampler in whole:
        sampler.set_epoch(epoch)
    undisturbed = run(whole)
    assert [len(sampler) for sampler in whole] == [len(undisturbed)] * world_size
    at = data.draw(st.integers(0, len(undisturbed)))
    first = ranks_of(samples, world_size, batch_size, **options)
    for sampler in first:
        sampler.set_epoch(epoch)
    begun = run(first, at)
    again = ranks_of(samples, world_size, batch_size, shuffle=shuffle, drop_last=drop_last)
    for sampler in again:
        sampler.seek(seed=seed, epoch=epoch, consumed=first[0].consumed, samples=samples)
        assert sampler.batches_left == len(undisturbed) - at
    assert begun + run(again) == undisturbed


@laws
@given(sizes, batch_sizes, st.booleans())
def test_one_rank_makes_the_batches_that_torch_makes(samples: int, batch_size: int, drop_last: bool) -> None:
    own = ResumableSampler(range(samples), batch_size, seed=3, drop_last=drop_last, rank=0, world_size=1)
    assert list(own) == list(BatchSampler(shuffled(samples, 3, 0).tolist(), batch_size, drop_last))


@laws
@given(sizes, worlds, batch_sizes)
def test_drop_last_leaves_out_less_than_a_global_batch_and_makes_whole_ones(
    samples: int, world_size: int, batch_size: int
) -> None:
    taken = run(ranks_of(samples, world_size, batch_size, drop_last=True))
    seen = list(chain.from_iterable(chain.from_iterable(taken)))
    assert len(seen) == len(set(seen))
    assert samples - len(seen) < world_size * batch_size
    assert {len(batch) for step in taken for batch in step} <= {batch_size}


@laws
@given(sizes, worlds, batch_sizes, st.booleans(), st.booleans())
def test_the_number_of_batches_is_known_beforehand(
    left: int, world_size: int, batch_size: int, drop_last: bool, even: bool
) -> None:
    division = Division(world_size=world_size, batch_size=batch_size, drop_last=drop_last, even=even)
    for rank in range(world_size):
        counted, rest = 0, left
        while count := division.next_count(rest):
            counted += bool(division.rank_range(count, rank))
            rest -= count
        assert division.batches(left, rank) == counted


@laws
@given(sizes, seeds, st.integers(0, 2**40), st.integers(0, 120))
def test_the_state_is_plain_json_the_same_on_every_rank(samples: int, seed: int, epoch: int, batches: int) -> None:
    states = []
    for rank in range(3):
        sampler = ResumableSampler(range(samples), 2, seed=seed, rank=rank, world_size=3)
        sampler.set_epoch(epoch)
        for _ in range(min(batches, len(sampler))):
            sampler.advance()
        states.append(resumable(DataLoader(range(samples), batch_sampler=sampler)).state_dict())  # type: ignore[arg-type]
    assert states[0] == states[1] == states[2]
    tensors = Tensors()
    back = rebuild(json.loads(json.dumps(flatten(states[0], "loader", tensors), allow_nan=False)), {})
    assert back == states[0]
    assert not tensors
    fresh = resumable(DataLoader(range(samples), batch_size=5))  # type: ignore[arg-type]
    fresh.sampler.shuffle = True
    fresh.load_state_dict(back)
    assert (fresh.epoch, fresh.consumed, fresh.sampler.seed) == (epoch, states[0]["consumed"], seed)


def test_the_order_of_an_epoch_stays_for_ever() -> None:
    """Epochs that were begun with an older version are finished with this one: these numbers may not change."""
    assert shuffled(12, 0, 0).tolist() == [0, 5, 6, 11, 10, 7, 8, 2, 9, 4, 3, 1]
    assert shuffled(12, 2**63 + 5, 7).tolist() == [7, 5, 3, 1, 0, 4, 8, 2, 9, 10, 11, 6]


def test_orders_differ_by_seed_and_by_epoch_and_draw_from_no_global_generator() -> None:
    before = torch.get_rng_state()
    orders = {tuple(shuffled(50, seed, epoch).tolist()) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16
    assert torch.equal(torch.get_rng_state(), before)


def test_a_dataset_smaller_than_the_world_size_gives_every_rank_a_step_or_each_sample_once() -> None:
    assert run(ranks_of(3, 5, 4, shuffle=False)) == [[[0], [1], [2], [0], [1]]]
    assert run(ranks_of(3, 5, 4, shuffle=False, even=False)) == [[[0], [1], [2], [], []]]
    assert run(ranks_of(3, 5, 4, drop_last=True)) == []
    assert run(ranks_of(0, 5, 4)) == []


def test_the_last_two_batches_share_where_a_rank_would_have_none() -> None:
    assert run(ranks_of(13, 3, 4, shuffle=False)) == [[[0, 1, 2], [3, 4], [5, 6]], [[7, 8], [9, 10], [11, 12]]]


def test_setting_the_epoch_we_are_in_keeps_the_position_and_another_begins_at_its_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sampler = ResumableSampler(range(20), 4)
    sampler.seek(seed=0, epoch=3, consumed=8, samples=20)
    sampler.set_epoch(3)
    assert (sampler.epoch, sampler.consumed) == (3, 8)
    assert not caplog.records
    sampler.set_epoch(0)
    assert (sampler.epoch, sampler.consumed) == (0, 0)
    assert "continue at loader.epoch" in caplog.text


def test_a_dataset_of_another_length_is_refused_in_the_middle_of_an_epoch_and_taken_between_epochs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = list(range(20))
    sampler = ResumableSampler(data, 4)
    with pytest.raises(CheckpointError, match="has 20 samples, but 8 of 30 are consumed"):
        sampler.seek(seed=0, epoch=1, consumed=8, samples=30)
    assert (sampler.epoch, sampler.consumed) == (0, 0)
    sampler.advance()
    data.append(20)
    with pytest.raises(CheckpointError, match="has 21 samples, but 4 of 20 are consumed"):
        iter(sampler)
    sampler.finish()
    assert sorted(chain.from_iterable(sampler)) == list(range(21))
    sampler.seek(seed=0, epoch=1, consumed=0, samples=30)
    assert "had 30 samples when it was saved and has 21 now" in caplog.text
    assert sampler.samples == 21


@pytest.mark.parametrize(
    ("words", "options", "told"),
    [
        ((range(3), 0), {}, "at least one sample"),
        ((range(3), 2.0), {}, "at least one sample"),
        ((range(3), 1), {"seed": -1}, "a seed is"),
        ((range(3), 1), {"rank": 1}, "pass both"),
        ((range(3), 1), {"rank": 2, "world_size": 2}, "rank 2 is out of range for world_size 2"),
        ((iter([1]), 1), {}, "have no index"),
    ],
)
def test_what_no_sampler_can_be_made_of_is_refused(words: Any, options: Any, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        ResumableSampler(*words, **options)


def test_the_package_offers_it_by_name() -> None:
    assert deepvm.ResumableSampler is ResumableSampler
    assert deepvm.resumable is resumable


# --- one global batch, whatever the ranks -------------------------------------------------------------------------


global_stages = st.lists(st.tuples(worlds, st.integers(0, 6)), max_size=4)


@laws
@given(sizes, global_stages, worlds, st.integers(7, 30), st.booleans())
def test_a_global_batch_stays_what_it_is_though_the_ranks_change(
    samples: int, before: list[tuple[int, int]], world_size: int, global_batch: int, drop_last: bool
) -> None:
    taken: list[Step] = []
    consumed = 0
    for ranks, steps in [*before, (world_size, None)]:
        samplers = [
            ResumableSampler(
                range(samples), global_batch=global_batch, rank=rank, world_size=ranks, shuffle=False,
                drop_last=drop_last, even=False,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        for sampler in samplers:
            sampler.seek(seed=0, epoch=0, consumed=consumed, samples=samples)
        left = samplers[-1].batches_left
        found = run(samplers, steps)
        assert steps is not None or len(found) >= left >= len(found) - 1
        for step in found:
            assert max(map(len, step)) - min(map(len, step)) <= 1
            assert max(map(len, step)) <= samplers[0].batch_size == -(-global_batch // ranks)
        taken += found
        consumed = samplers[0].consumed
    sizes_of_steps = [sum(map(len, step)) for step in taken]
    seen = [sample for step in taken for batch in step for sample in batch]
    assert seen == list(range(samples - samples % global_batch if drop_last else samples))
    full = samples // global_batch
    assert set(sizes_of_steps[: full - 1]) <= {global_batch}
    assert len(taken) == full + bool(samples % global_batch and not drop_last)


@laws
@given(sizes, worlds, batch_sizes, st.booleans(), st.booleans())
def test_a_global_batch_that_all_ranks_share_alike_is_what_a_batch_size_is(
    samples: int, world_size: int, batch_size: int, drop_last: bool, even: bool
) -> None:
    options = {"drop_last": drop_last, "even": even, "seed": 5, "world_size": world_size}
    for rank in range(world_size):
        own = ResumableSampler(range(samples), batch_size, rank=rank, **options)
        shared = ResumableSampler(range(samples), global_batch=world_size * batch_size, rank=rank, **options)
        assert list(own) == list(shared)
        assert len(own) == len(shared)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "not None"),
        ({"batch_size": 4, "global_batch": 8}, "not 4 and 8"),
        ({"global_batch": 0}, "not 0"),
        ({"global_batch": 2.5}, "not 2.5"),
    ],
)
def test_either_a_batch_size_or_a_global_batch_is_given(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        ResumableSampler(range(9), **options)


def test_a_global_batch_smaller_than_the_ranks_is_refused() -> None:
    sampler = ResumableSampler(range(9), global_batch=3, rank=0, world_size=4)
    with pytest.raises(UsageError, match="no sample for some of 4 ranks"):
        list(sampler)


def test_without_a_seed_the_order_is_that_of_seed_0_and_shuffled() -> None:
    plain, zero, one = (ResumableSampler(range(40), 4, **more) for more in ({}, {"seed": 0}, {"seed": 1}))
    assert list(plain) == list(zero) != list(one)
    assert list(plain) != list(ResumableSampler(range(40), 4, shuffle=False))
