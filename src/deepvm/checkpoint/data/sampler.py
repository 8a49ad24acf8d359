"""A dataset's size and a position in an epoch -> the next batches of this rank, for ``loader``.

An epoch is a permutation of all samples that depends on (seed, epoch) alone. Ranks consume it from the front, one
global batch at a time, each rank its own range of it. What is left is always a suffix, and one number is its position,
so that any number of ranks, with batches of any size, can continue.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, Sampler

from deepvm.checkpoint import ranks
from deepvm.checkpoint.data.sample_seed import check_seed
from deepvm.errors import CheckpointError, UsageError

log = logging.getLogger("deepvm.checkpoint")

_Order = range | np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """How ranks divide what is left of an epoch. It depends only on the number of samples left, so that a resumed epoch
    is divided as without the interruption."""

    world_size: int
    batch_size: int  # of one rank
    global_batch: int | None = None  # of all ranks, if it is not world_size × batch_size
    drop_last: bool = False
    even: bool = True

    @property
    def full_batch(self) -> int:
        """Samples in a full global batch."""
        return self.world_size * self.batch_size if self.global_batch is None else self.global_batch

    def next_count(self, left: int) -> int:
        """Return how many samples all ranks together take next; 0 at the end of the epoch."""
        whole = self.full_batch
        if self.drop_last:
            return whole if left >= whole else 0
        return (left + 1) // 2 if self._halves(left) else min(left, whole)

    def _halves(self, left: int) -> bool:
        """True if the last two global batches share their samples, so that every rank has one in the last."""
        return 0 < left - self.full_batch < self.world_size <= left // 2

    def rank_range(self, count: int, rank: int) -> range:
        """Return which of the next samples are this rank's. Shares differ by one sample at most."""
        each, more = divmod(count, self.world_size)
        if each == 0 and rank >= more:  # fewer samples than ranks
            return range(rank % more, rank % more + 1) if self.even and more else range(0)
        start = rank * each + min(rank, more)
        return range(start, start + each + (rank < more))

    def batches(self, left: int, rank: int) -> int:
        """Return how many batches this rank will take: the same for all ranks, except for the last if not ``even``."""
        full, rest = divmod(left, self.full_batch)
        if self.drop_last or not rest:
            return full
        alone = rest < self.world_size and (full == 0 or not self._halves(self.full_batch + rest))
        return full + bool(self.rank_range(rest, rank) if alone else rest)


class ResumableSampler(Sampler[list[int]]):
    """A batch sampler for ``DataLoader(dataset, batch_sampler=...)``: every sample exactly once per epoch, over all
    ranks, also if their number or the batch size changes in the middle of it.

    Wrap the loader with ``resumable``: it counts the batches that training has consumed (not those that workers
    prefetch), and a ``Checkpointer`` saves it. Pass the ``batch_size`` of one rank, the same on every rank, or the
    ``global_batch`` of all ranks together, which they share as evenly as they can. It draws from no generator but its
    own, and the order is the same with every version of torch and NumPy.

    At the end of an epoch the last global batch is divided evenly. It shares the samples of the one before if a rank
    would have none, so that every rank takes the same number of steps, as DDP needs. If fewer samples are left than
    ranks, ``even=True``, the default, repeats some of them in that last step. With ``even=False`` no sample comes
    twice, some ranks end one step earlier, and DDP needs its ``join``. ``drop_last`` leaves out what does not fill a
    global batch.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int | None = None,
        *,
        global_batch: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        even: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise UsageError(
                f"the samples of a {type(dataset).__qualname__} have no index: use a dataset with __getitem__ and "
                "__len__, or torchdata's StatefulDataLoader, which keeps the state of iterable ones"
            )
        size = batch_size if global_batch is None else global_batch
        if (global_batch is not None and batch_size is not None) or not isinstance(size, int) or size < 1:
            found = repr(size) if None in (batch_size, global_batch) else f"{batch_size!r} and {global_batch!r}"
            raise UsageError(
                f"a batch has at least one sample, not {found}: pass the batch size of one rank, or the global_batch "
                "of all"
            )
        check_seed(seed)
        if (rank is None) != (world_size is None) or (rank is not None and not 0 <= rank < (world_size or 0)):
            raise UsageError(
                f"rank {rank} is out of range for world_size {world_size}: pass both, or none with torch.distributed"
            )
        self.dataset, self.samples = dataset, len(dataset)
        self.global_batch, self.shuffle, self.seed = global_batch, shuffle, seed
        self._batch_size = batch_size
        self.drop_last, self.even = drop_last, even
        self.epoch = self.consumed = 0
        self._fixed_rank = None if rank is None or world_size is None else (rank, world_size)
        self._order_of: tuple[int, int, int] | None = None
        self._order: _Order = range(0)

    def __iter__(self) -> Iterator[list[int]]:
        """Return the batches from the first sample that is not consumed to the end of the epoch. Counts none."""
        self.check(consumed=self.consumed, samples=self.samples)
        self.samples = len(self.dataset)  # it may grow between epochs
        rank, division = self._division()
        return _batches(self._ordered(), self.consumed, rank, division)

    def __len__(self) -> int:
        """Return the batches of this rank in a whole epoch with the present number of ranks, at any position."""
        rank, division = self._division()
        return division.batches(self.samples, rank)

    @property
    def batches_left(self) -> int:
        """Batches of this rank until the end of this epoch."""
        rank, division = self._division()
        return division.batches(self.samples - self.consumed, rank)

    @property
    def batch_size(self) -> int:
        """The most samples that this rank takes in a step."""
        return self._division()[1].batch_size

    @property
    def rank_and_world_size(self) -> tuple[int, int]:
        return self._fixed_rank or ranks.rank_and_world_size()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch. The present one is not begun again: a restored position is kept."""
        if epoch < self.epoch:
            text = "epoch %d begins again though epoch %d was reached: after a restore, continue at loader.epoch"
            log.warning(text, epoch, self.epoch)
        if epoch != self.epoch:
            self.epoch, self.consumed = epoch, 0

    def advance(self) -> None:
        """Count one more global batch as consumed."""
        _, division = self._division()
        self.consumed += division.next_count(self.samples - self.consumed)

    def finish(self) -> None:
        """End the epoch and begin the next one."""
        self.epoch, self.consumed = self.epoch + 1, 0

    def check(self, *, consumed: int, samples: int) -> None:
        """Check that an epoch of ``samples``, of which ``consumed`` are consumed, can be continued."""
        found = len(self.dataset)
        if found != samples and consumed:
            raise CheckpointError(
                f"the dataset has {found} samples, but {consumed} of {samples} are consumed in this epoch, so the rest "
                "is unknown: use the same samples, or leave the loader out of the state to begin again"
            )

    def seek(self, *, seed: int, epoch: int, consumed: int, samples: int) -> None:
        """Continue at the position of a sampler that had ``samples`` samples."""
        self.check(consumed=consumed, samples=samples)
        found = len(self.dataset)
        if found != samples:
            log.warning("the dataset had %d samples when it was saved and has %d now", samples, found)
        self.seed, self.epoch, self.consumed, self.samples = seed, epoch, consumed, found

    def _division(self) -> tuple[int, Division]:
        rank, world_size = self.rank_and_world_size
        size, whole = self._batch_size, self.global_batch
        if size is None:
            assert whole is not None  # noqa: S101 - one of them is set
            if whole < world_size:
                raise UsageError(
                    f"a global batch of {whole} has no sample for some of {world_size} ranks: make it at least "
                    f"{world_size}, or start fewer ranks"
                )
            size = -(-whole // world_size)
        return rank, Division(
            world_size=world_size, batch_size=size, global_batch=whole, drop_last=self.drop_last, even=self.even
        )

    def _ordered(self) -> _Order:
        wanted = (self.seed, self.epoch, self.samples)
        if self._order_of != wanted:
            self._order = shuffled(self.samples, self.seed, self.epoch) if self.shuffle else range(self.samples)
            self._order_of = wanted
        return self._order


def shuffled(samples: int, seed: int, epoch: int) -> np.ndarray[Any, np.dtype[Any]]:
    """Return the order of an epoch. An epoch may end with another version than it began with, and only RandomState's
    numbers never change: those of torch.randperm and NumPy's newer generators may."""
    words = [part >> shift & 0xFFFFFFFF for part in (seed, epoch) for shift in (0, 32)]
    return np.random.RandomState(words).permutation(samples)


def _batches(order: _Order, at: int, rank: int, division: Division) -> Iterator[list[int]]:
    while count := division.next_count(len(order) - at):
        own = division.rank_range(count, rank)
        if not own:
            return
        chosen = order[at + own.start : at + own.stop]
        yield list(chosen) if isinstance(chosen, range) else chosen.tolist()
        at += count
