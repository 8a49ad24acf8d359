"""Random augmentation that is a function of the sample, so that it survives a restart of the workers.

A worker's generators begin anew when it is started. An epoch that is resumed in its middle would then augment the rest
of its samples differently from one that nobody disturbed, and so would another number of workers or ranks. Seeded for
each sample by (seed, epoch, number of the sample), it is the same in all of them.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from deepvm.errors import UsageError


class SeededDataset(Dataset[Any]):
    """A dataset of which every sample is made with Python's, NumPy's and torch's global CPU generators seeded for it.

    A ``ResumableLoader`` tells it the epoch; with another loader, call ``set_epoch``. In the trainer's own process
    (``num_workers=0``) the generators are put back afterwards. It has to be the dataset that the loader sees: the
    number of a sample is the one that the sampler asks for.
    """

    def __init__(self, dataset: Dataset[Any], *, seed: int) -> None:
        if isinstance(dataset, IterableDataset):
            raise UsageError(
                "the samples of an iterable dataset have no numbers to seed them by: use one with __getitem__"
            )
        if not 0 <= seed < 2**64:
            raise UsageError(f"a seed is a whole number from 0 to 2**64 - 1, not {seed!r}")
        self.dataset, self.seed = dataset, seed
        # shared, so that persistent workers hear of a new epoch, too
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def set_epoch(self, epoch: int) -> None:
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        seed = xxhash.xxh3_64_intdigest(struct.pack("<QQq", self.seed, int(self._epoch), index))
        if get_worker_info() is not None:  # its generators serve nothing else
            _seed(seed)
            return self.dataset[index]
        with _kept_generators():
            _seed(seed)
            return self.dataset[index]


def per_sample_seed(dataset: Dataset[Any], *, seed: int = 0) -> SeededDataset:
    """Make the dataset's random augmentation a function of (seed, epoch, number of the sample)."""
    return SeededDataset(dataset, seed=seed)


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would reach for CUDA's generators


@contextmanager
def _kept_generators() -> Iterator[None]:
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(cpu)
