"""A dataset -> the same dataset, whose random augmentation depends only on (seed, epoch, index of the sample).

The generators of a worker start again with it. So an epoch that is resumed in its middle, or with other numbers of
workers or ranks, would augment the rest of its samples differently.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from deepvm.errors import UsageError


class SeededDataset(Dataset[Any]):
    """Seeds Python's, NumPy's and torch's global CPU generators for each sample.

    A ``ResumableLoader`` sets the epoch; with another loader, call ``set_epoch``. In the trainer's own process
    (``num_workers=0``) the generators are restored afterwards. It must be the loader's own dataset: the index of a
    sample is the sampler's.
    """

    def __init__(self, dataset: Dataset[Any], *, seed: int) -> None:
        if isinstance(dataset, IterableDataset):
            raise UsageError("the samples of an iterable dataset have no index to seed by: use one with __getitem__")
        check_seed(seed)
        self.dataset, self.seed = dataset, seed
        # shared with persistent workers, so that they use a new epoch, too
        self._epoch = torch.zeros((), dtype=torch.int64, device="cpu").share_memory_()  # type: ignore[no-untyped-call]

    def set_epoch(self, epoch: int) -> None:
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        seed = xxhash.xxh3_64_intdigest(struct.pack("<QQq", self.seed, int(self._epoch), index))
        in_worker = get_worker_info() is not None  # its generators serve nothing else
        with nullcontext() if in_worker else _generators_restored():
            _seed(seed)
            return self.dataset[index]


def per_sample_seed(dataset: Dataset[Any], *, seed: int = 0) -> SeededDataset:
    """Make the dataset's random augmentation a function of (seed, epoch, index of the sample)."""
    return SeededDataset(dataset, seed=seed)


def check_seed(seed: int) -> None:
    if not 0 <= seed < 2**64:
        raise UsageError(f"a seed is a whole number from 0 to 2**64 - 1, not {seed!r}")


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed CUDA's generators, too


@contextmanager
def _generators_restored() -> Iterator[None]:
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(cpu)
