"""A plain DataLoader, resumed in the middle of an epoch, in real processes and through a real Checkpointer."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    WeightedRandomSampler,
)

from deepvm.checkpoint import (
    Checkpointer,
    ResumableLoader,
    ResumableSampler,
    SeededDataset,
    per_sample_seed,
    resumable,
)
from deepvm.errors import CheckpointError, UsageError
from tests.support.checkpoint import dataset_readers
from tests.support.checkpoint.dataset_readers import Augmented, Numbers, augmented_loader, children_of, lines_of
from tests.support.checkpoint.processes import Forked, template
from tests.support.checkpoint.rank_processes import run_ranks
from tests.support.waiting import wait_until

Batches = list[list[int]]


def made(samples: int = 23, *, seed: int | None = None, **options: Any) -> ResumableLoader:
    return resumable(DataLoader(Numbers(samples), 4, **options), seed=seed)


def lists(batches: Any) -> Batches:
    return [batch.tolist() for batch in batches]


def epochs_of(loader: ResumableLoader, count: int) -> Batches:
    return [batch for _ in range(count) for batch in lists(loader)]


# --- the position -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_a_resumed_epoch_is_the_one_that_nobody_disturbed(
    workers: int, persistent: bool, shuffle: bool, drop_last: bool
) -> None:
    options = {"shuffle": shuffle, "drop_last": drop_last, "num_workers": workers, "persistent_workers": persistent}
    undisturbed = epochs_of(made(**options), 3)
    seen: Batches = []
    state: dict[str, Any] = {}
    for stop_after in (3, 1, 5, 2):  # within an epoch, twice in the same one, over the end of one
        loader = made(**options)
        if state:
            loader.load_state_dict(state)
        while stop_after:
            part = lists(islice(loader, stop_after))
            stop_after -= len(part)
            seen += part
        state = loader.state_dict()
    last = made(**options)
    last.load_state_dict(state)
    assert seen + epochs_of(last, 3 - last.epoch) == undisturbed
    assert last.state_dict() == {**state, "epoch": 3, "consumed": 0}


@pytest.mark.parametrize("workers", [0, 2])
def test_what_workers_prefetch_is_not_consumed(workers: int) -> None:
    loader = made(80, num_workers=workers, prefetch_factor=4 if workers else None)
    for number, _ in enumerate(loader, 1):
        assert loader.consumed == 4 * number  # in the body of the loop, this batch is behind us
        assert loader.batches_left == 20 - number
        assert len(loader) == 20
        if number == 7:
            break
    assert loader.consumed == 28
    assert lists(loader)[0] == [28, 29, 30, 31]  # a pass goes on where the last one was left


def test_a_save_at_the_end_of_an_epoch_resumes_with_an_empty_pass_and_one_after_it_with_the_next() -> None:
    loader = made(8)
    passed = iter(loader)
    assert lists(islice(passed, 2)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    at_the_end = loader.state_dict()
    assert (loader.epoch, loader.consumed) == (0, 8)
    assert next(passed, None) is None
    assert next(passed, None) is None
    after = loader.state_dict()
    assert (loader.epoch, loader.consumed) == (1, 0)

    again = made(8)
    again.load_state_dict(at_the_end)
    again.set_epoch(0)
    assert (again.epoch, again.batches_left) == (0, 0)
    assert lists(again) == []
    assert again.state_dict() == after
    assert len(lists(again)) == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_an_empty_dataset_has_epochs_without_batches(workers: int) -> None:
    loader = made(0, num_workers=workers)
    assert epochs_of(loader, 2) == []
    assert (len(loader), loader.epoch) == (0, 2)


def test_another_batch_size_continues_with_what_is_left() -> None:
    first = made(30, shuffle=True, seed=9)
    seen = lists(islice(first, 3))
    second = resumable(DataLoader(Numbers(30), 7, shuffle=True))
    second.load_state_dict(first.state_dict())
    rest = lists(second)
    assert [len(batch) for batch in rest] == [7, 7, 4]
    assert sorted(chain.from_iterable(seen + rest)) == list(range(30))


@pytest.mark.parametrize("workers", [0, 2])
def test_no_global_generator_is_drawn_from(workers: int) -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    loader = made(shuffle=True, num_workers=workers)
    epochs_of(loader, 2)
    loader.load_state_dict(loader.state_dict())
    epochs_of(loader, 1)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]


def test_accumulated_gradients_count_the_batches_that_were_handed_out() -> None:
    loader = made(24, shuffle=True)
    undisturbed = lists(made(24, shuffle=True))
    for number, _ in enumerate(loader, 1):
        if number % 2 == 0:  # the optimizer steps
            state = loader.state_dict()
        if number == 5:
            break  # one batch since the last step of the optimizer: lost with it
    again = made(24, shuffle=True)
    again.load_state_dict(state)
    assert lists(again) == undisturbed[4:]


# --- passes that are no more --------------------------------------------------------------------------------------


def test_of_two_passes_only_the_newer_continues() -> None:
    loader = made()
    older = iter(loader)
    next(older)
    newer = iter(loader)
    with pytest.raises(UsageError, match="another one began"):
        next(older)
    assert next(newer).tolist() == [4, 5, 6, 7]
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(UsageError, match="a state was loaded"):
        next(newer)
    third = iter(loader)
    loader.set_epoch(loader.epoch)
    assert next(third).tolist() == [8, 9, 10, 11]
    loader.set_epoch(5)
    with pytest.raises(UsageError, match="another epoch was set"):
        next(third)
    assert lists(islice(loader, 1)) == [[0, 1, 2, 3]]
    assert (loader.epoch, loader.consumed) == (5, 4)


class Fails(Numbers):
    def __getitem__(self, index: int) -> int:
        if index == 9 and not FIXED:
            raise OSError("the disk is gone")
        return index


FIXED: list[bool] = []


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_that_failed_is_not_left_out(workers: int) -> None:
    FIXED.clear()
    loader = resumable(DataLoader(Fails(20), 4, num_workers=workers))
    passed = iter(loader)
    seen = lists(islice(passed, 2))
    with pytest.raises(OSError, match="the disk is gone"):
        next(passed)
    with pytest.raises(UsageError, match="a batch failed"):
        next(passed)
    FIXED.append(True)
    assert seen + lists(loader) == lists(made(20))
    FIXED.clear()


def test_a_pass_that_is_left_stops_its_workers() -> None:
    before = set(children_of(os.getpid()))
    loader = made(num_workers=2)
    for _ in loader:
        assert len(set(children_of(os.getpid())) - before) >= 2
        break
    wait_until(lambda: set(children_of(os.getpid())) <= before, "the end of the workers", timeout_s=10)


# --- what can be made resumable -----------------------------------------------------------------------------------


def test_the_options_of_a_loader_are_taken_over() -> None:
    def collate(batch: list[int]) -> int:
        return sum(batch)

    plain = DataLoader(Numbers(8), 4, num_workers=2, collate_fn=collate, timeout=30, prefetch_factor=3)
    loader = resumable(plain)
    assert list(loader) == [6, 22]
    assert (loader.timeout, loader.prefetch_factor, loader.num_workers) == (30, 3, 2)
    assert loader.dataset is plain.dataset
    with pytest.raises(AttributeError, match="no_such"):
        loader.no_such  # noqa: B018


def test_the_seed_is_that_of_the_argument_the_generator_or_the_sampler() -> None:
    generator = torch.Generator().manual_seed(77)
    assert resumable(DataLoader(Numbers(8), shuffle=True, generator=generator)).sampler.seed == 77
    assert resumable(DataLoader(Numbers(8), shuffle=True, generator=generator), seed=5).sampler.seed == 5
    assert resumable(DataLoader(Numbers(8), shuffle=True)).sampler.seed == 0
    data = Numbers(9)
    loader = resumable(DataLoader(data, 2, sampler=DistributedSampler(data, 2, 1, seed=8)))
    assert (loader.sampler.seed, loader.sampler.shuffle) == (8, True)
    assert loader.sampler.rank_and_world_size == (1, 2)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


class Own(DataLoader[int]):
    pass


def refusals() -> dict[str, Any]:
    data = Numbers(9)
    sampler = ResumableSampler(data, 2)
    return {
        "dataset is iterable": DataLoader(Stream()),
        "batches of its own": DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 2, False)),
        r"batches of its own.*None": DataLoader(data, batch_size=None),
        "a WeightedRandomSampler": DataLoader(data, sampler=WeightedRandomSampler([1.0] * 9, 9)),
        "a SequentialSampler": DataLoader(data, sampler=SequentialSampler(range(3))),
        "in_order=False": DataLoader(data, in_order=False),
        "generator of its own": DataLoader(data, batch_sampler=sampler, generator=torch.Generator()),
        "a Own may load differently": Own(data),
        "state of its own": dataset_readers.Stateful(0),
    }


@pytest.mark.parametrize("told", list(refusals()))
def test_a_loader_whose_position_cannot_be_known_is_refused_with_the_reason(told: str) -> None:
    with pytest.raises(UsageError, match=told):
        resumable(refusals()[told])


def test_a_sampler_with_a_seed_is_given_no_other_and_a_subclass_with_a_sampler_is_taken() -> None:
    data = Numbers(9)
    with pytest.raises(UsageError, match="has a seed already"):
        resumable(DataLoader(data, batch_sampler=ResumableSampler(data, 2)), seed=3)
    with pytest.raises(UsageError, match=r"use resumable\(loader\)"):
        ResumableLoader(DataLoader(data))
    assert lists(resumable(Own(data, batch_sampler=ResumableSampler(data, 5, shuffle=False)))) == [
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8],
    ]


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    loader = made(20)
    next(iter(loader))
    before = loader.state_dict()
    fits = made(20).state_dict()
    for wrong, told in (
        ({}, "it has nothing"),
        ({"_num_yielded": 3}, "it has _num_yielded"),
        ({**fits, "version": 2}, "version 1"),
        ({**fits, "consumed": "3"}, "not a valid state of a ResumableLoader"),
        ({**fits, "consumed": 21}, "not a valid state of a ResumableLoader"),
        ({**fits, "epoch": -1}, "not a valid state of a ResumableLoader"),
        ({**fits, "consumed": 4, "samples": 21}, "has 20 samples, but 4 of 21"),
        ({**fits, "consumed": 4, "shuffle": True}, "began with shuffle=True"),
    ):
        with pytest.raises(CheckpointError, match=told):
            loader.load_state_dict(wrong)
        assert loader.state_dict() == before


# --- through a checkpoint -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_a_checkpoint_in_the_middle_of_an_epoch_resumes_there_in_a_new_object(tmp_path: Path, workers: int) -> None:
    undisturbed = epochs_of(made(40, shuffle=True, seed=3), 2)
    model = torch.nn.Linear(2, 2)
    loader = made(40, shuffle=True, seed=3, num_workers=workers)
    with Checkpointer({"model": model, "loader": loader}, f"file://{tmp_path}") as ckpt:
        for number, _ in enumerate(loader, 1):
            if number == 4:
                ckpt.save(4).wait("remote", 20)
            if number == 6:
                break
    again = made(40, shuffle=True, num_workers=workers)  # its own seed does not matter: the saved one does
    with Checkpointer({"model": model, "loader": again}, f"file://{tmp_path}") as ckpt:
        assert ckpt.restore() == 4
        assert epochs_of(again, 2) == undisturbed[4:]


@pytest.mark.parametrize("workers", [0, 2])
def test_training_with_dropout_and_augmentation_resumes_bit_for_bit(tmp_path: Path, workers: int) -> None:
    """Without workers, augmentation draws from the trainer's generators: those of the checkpoint."""

    def train(url: str, save_at: int, stop_at: int) -> list[torch.Tensor]:
        torch.manual_seed(1)
        dataset = per_sample_seed(Augmented(26)) if workers else Augmented(26)
        loader = resumable(DataLoader(dataset, 4, shuffle=True, num_workers=workers))
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with Checkpointer({"model": model, "optimizer": optimizer, "loader": loader}, url) as ckpt:
            step = ckpt.restore() or 0
            while step < stop_at:
                for batch in loader:
                    optimizer.zero_grad()
                    model(batch).square().mean().backward()
                    optimizer.step()
                    step += 1
                    if step == save_at:
                        ckpt.save(step).wait("remote", 30)
                    if step == stop_at:
                        break
            assert not ckpt.status().drift
        return [parameter.detach() for parameter in model.parameters()]

    random.seed(1)
    np.random.seed(1)
    undisturbed = train(f"file://{tmp_path / 'a'}", save_at=-1, stop_at=17)
    random.seed(1)
    np.random.seed(1)
    train(f"file://{tmp_path / 'b'}", save_at=4, stop_at=6)
    train(f"file://{tmp_path / 'b'}", save_at=9, stop_at=9)  # in the second epoch
    resumed = train(f"file://{tmp_path / 'b'}", save_at=-1, stop_at=17)
    assert all(map(torch.equal, resumed, undisturbed))


def test_for_a_plain_loader_in_the_state_the_error_names_resumable(tmp_path: Path) -> None:
    state = {"model": torch.nn.Linear(2, 2), "loader": DataLoader(Numbers(3))}
    with pytest.raises(UsageError, match=r"state 'loader' is a DataLoader.*deepvm\.checkpoint\.resumable\(loader\)"):
        Checkpointer(state, f"file://{tmp_path}")


def test_loaders_with_a_state_of_their_own_keep_each_ranks_tensors(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'kept'}"
    run_ranks(2, tmp_path, dataset_readers.save_stateful, url)
    for rank, told in enumerate(run_ranks(2, tmp_path, dataset_readers.restore_stateful, url)):
        truth = dataset_readers.Stateful(rank + 1).state
        assert told == {name: (str(v.dtype), list(v.shape), v.tolist()) for name, v in truth.items()}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.chaos)])  # which end only after seconds
def test_torchdatas_stateful_loader_resumes_through_a_checkpoint(tmp_path: Path, workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def fresh() -> Any:
        torch.manual_seed(4)
        return stateful(Numbers(40), 4, shuffle=True, num_workers=workers)

    undisturbed = lists(fresh())
    loader = fresh()
    with Checkpointer({"model": torch.nn.Linear(2, 2), "loader": loader}, f"file://{tmp_path}") as ckpt:
        for number, _ in enumerate(loader, 1):
            if number == 4:
                ckpt.save(4).wait("remote", 20)
            if number == 6:
                break
    again = fresh()
    with Checkpointer({"model": torch.nn.Linear(2, 2), "loader": again}, f"file://{tmp_path}") as ckpt:
        assert ckpt.restore() == 4
        assert lists(again) == undisturbed[4:]


@pytest.mark.parametrize(("samples", "workers"), [(103, 0), (65, 2)])
def test_two_ranks_then_one_then_three_see_every_sample_of_the_epoch_exactly_once(
    tmp_path: Path, samples: int, workers: int
) -> None:
    url = f"file://{tmp_path / 'kept'}"
    seen: list[int] = []
    for world_size, batch_size, steps in ((2, 5, 3), (1, 4, 4), (3, 6, None)):
        told = run_ranks(world_size, tmp_path, dataset_readers.train_some, url, samples, batch_size, steps, workers)
        assert [one["consumed"] for one in told] == [len(seen)] * world_size
        assert len({len(one["seen"]) for one in told}) == 1
        if steps is None:
            assert [one["left"] for one in told] == [len(one["seen"]) for one in told]
            assert [one["epoch"] for one in told] == [1] * 3
        seen += [index for one in told for batch in one["seen"] for index in batch]
    assert sorted(seen) == list(range(samples))


def test_a_killed_trainer_with_workers_reads_what_it_would_have_read_augmented_alike(tmp_path: Path) -> None:
    samples, epochs = 60, 2
    undisturbed = [(epoch, batch.tolist()) for epoch in range(epochs) for batch in _epoch_of(samples, epoch)]
    log, url = tmp_path / "log", f"file://{tmp_path / 'kept'}"
    chance, restored = random.Random(1), []
    for session in range(4):
        trainer = Forked(dataset_readers.read_until_killed, url, str(log), samples, epochs, 2)
        workers: list[int] = []
        try:
            restored.append(trainer.receive())
            if session == 3:
                assert trainer.receive() == "done"
                break
            goal = len(lines_of(log)) + chance.randint(3, 7)
            wait_until(lambda wanted=goal: len(lines_of(log)) >= wanted, what="reading")
            workers = children_of(trainer.process.pid)
        finally:
            trainer.kill()
            for worker in workers:  # they would notice within seconds
                with suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)
    rows = lines_of(log)
    assert rows[-1]["step"] == len(undisturbed) == 30
    assert restored[1:] == sorted(restored[1:])
    assert restored[-1] > 3
    assert all((row["epoch"], row["batch"]) == undisturbed[row["step"] - 1] for row in rows)


def _epoch_of(samples: int, epoch: int) -> list[torch.Tensor]:
    loader = augmented_loader(samples, 0)
    loader.set_epoch(epoch)
    return list(loader)


# --- augmentation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"workers": 0},
        {"workers": 2},
        {"workers": 2, "persistent_workers": True},
        {"workers": 1, "multiprocessing_context": template},
    ],
)
def test_augmentation_is_a_function_of_the_sample_and_the_epoch(options: dict[str, Any]) -> None:
    rows = {(epoch, row[0].item()): row for epoch in range(2) for batch in _epoch_of(11, epoch) for row in batch}
    assert len({tuple(row.tolist()) for row in rows.values()}) == 22
    assert all(rows[0, i][column] != rows[1, i][column] for i in range(11) for column in (1, 2, 3))
    loader = augmented_loader(11, **options)
    next(iter(loader))
    resumed = augmented_loader(11, **options)
    resumed.load_state_dict(loader.state_dict())
    for epoch in range(2):
        for batch in resumed:
            assert all(torch.equal(row, rows[epoch, row[0].item()]) for row in batch)


def test_without_it_the_augmentation_of_workers_is_another_after_a_resume() -> None:
    """What per_sample_seed is for. If this fails, torch has learned to do it."""

    def fresh() -> ResumableLoader:
        return resumable(DataLoader(Augmented(12), 4, num_workers=1))

    whole = fresh()
    undisturbed = list(whole)
    again = fresh()
    next(iter(again))
    assert not torch.equal(next(iter(again)), undisturbed[1])


def test_the_trainers_own_generators_are_left_alone() -> None:
    dataset = per_sample_seed(Augmented(5), seed=1)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    first = [dataset[i] for i in range(5)]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]
    assert torch.equal(torch.stack(first), torch.stack([dataset[i] for i in range(5)]))
    assert not torch.equal(first[0], per_sample_seed(Augmented(5), seed=2)[0])


def test_what_has_no_numbered_samples_cannot_be_seeded_by_them() -> None:
    with pytest.raises(UsageError, match="iterable dataset"):
        per_sample_seed(Stream())
    with pytest.raises(UsageError, match="a seed is"):
        SeededDataset(Numbers(3), seed=-1)
