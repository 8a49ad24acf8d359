"""A DataLoader -> a loader that knows how much of an epoch training has consumed, and continues there.

It counts batches that were handed out. Those that workers have prefetched are loaded again after a restore.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from deepvm.checkpoint.data.sample_seed import SeededDataset
from deepvm.checkpoint.data.sampler import ResumableSampler
from deepvm.errors import CheckpointError, UsageError

log = logging.getLogger("deepvm.checkpoint")

VERSION = 1
_STATE = {"version": int, "seed": int, "epoch": int, "consumed": int, "samples": int, "shuffle": bool}


class ResumableLoader:
    """A loader whose ``state_dict`` is the position of all ranks in the epoch, the same on every rank.

    A pass continues where the last one ended, by ``break`` or by a restore, until the epoch is over; the next pass is
    the next epoch. So ``for epoch in range(loader.epoch, epochs)`` is right with and without a restore. A save right
    after the last batch of an epoch resumes with an empty pass: the code after the pass runs once, as always.

    Creating an iterator draws from no global generator. All other attributes are those of the DataLoader.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        sampler = loader.batch_sampler
        if not isinstance(sampler, ResumableSampler):
            raise UsageError("the loader has no ResumableSampler as its batch_sampler: use resumable(loader)")
        if not loader.in_order:
            raise UsageError(
                "the loader hands out batches in any order (in_order=False), so the rest of an epoch is unknown: leave "
                "that out"
            )
        if loader.generator is not None:
            raise UsageError(
                "the loader has a generator of its own, whose position is not saved: leave it out; the sampler's seed "
                "decides the order and the seeds of workers"
            )
        self.loader, self.sampler = loader, sampler
        loader.generator = torch.Generator()  # or each iterator, also a resumed one, would draw from the global one
        self.handed_out = 0  # batches, in this process
        self._pass: object = None  # a token of the newest; not the pass itself, whose deletion stops its workers

    @property
    def epoch(self) -> int:
        return self.sampler.epoch

    @property
    def consumed(self) -> int:
        """Samples of this epoch that all ranks together have consumed."""
        return self.sampler.consumed

    @property
    def batches_left(self) -> int:
        return self.sampler.batches_left

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, unless it is the present one. Never needed: epochs follow each other."""
        if epoch != self.epoch:
            self._pass = None
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        """Return the batches in a whole epoch, also in its middle; ``batches_left`` are those until its end."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        sampler = self.sampler
        rank, _ = sampler.rank_and_world_size
        words = struct.pack("<4Q", sampler.seed, sampler.epoch, sampler.consumed, rank)
        assert self.loader.generator is not None  # noqa: S101 - ours
        self.loader.generator.manual_seed(xxhash.xxh3_64_intdigest(words))
        if isinstance(self.loader.dataset, SeededDataset):
            self.loader.dataset.set_epoch(sampler.epoch)
        return _Pass(self)

    def state_dict(self) -> dict[str, Any]:
        s = self.sampler
        return {
            "version": VERSION,
            "seed": s.seed,
            "epoch": s.epoch,
            "consumed": s.consumed,
            "samples": s.samples,
            "shuffle": s.shuffle,
        }

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that ``load_state_dict`` would accept this state. Changes nothing."""
        known = all(type(state.get(name)) is kind and state[name] >= 0 for name, kind in _STATE.items())
        if not known or state["version"] != VERSION or state["consumed"] > state["samples"]:
            found = ", ".join(map(str, state)) or "nothing"
            raise CheckpointError(f"not a valid state of a ResumableLoader (version {VERSION}): it has {found}")
        if state["shuffle"] != self.sampler.shuffle and state["consumed"]:
            raise CheckpointError(
                f"the epoch began with shuffle={state['shuffle']}, this loader has shuffle={self.sampler.shuffle}, so "
                "the rest of the epoch is unknown: use the same until the epoch is over"
            )
        self.sampler.check(consumed=state["consumed"], samples=state["samples"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved position; a pass that is under way ends. Nothing changes if the state does not fit."""
        self.check_state_dict(state)
        if state["consumed"] and self.loader.num_workers and not isinstance(self.loader.dataset, SeededDataset):
            log.info(
                "workers start again: their augmentation is repeatable only with deepvm.checkpoint.per_sample_seed"
            )
        self.sampler.seek(**{name: state[name] for name in ("seed", "epoch", "consumed", "samples")})
        self._pass = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.loader, name)


class _Pass(Iterator[Any]):
    """One pass over what is left of an epoch."""

    def __init__(self, owner: ResumableLoader) -> None:
        self._owner, self._over = owner, False
        self._batches = iter(owner.loader)
        self._token = owner._pass = object()

    def __next__(self) -> Any:
        if self._over:
            raise StopIteration
        if self._owner._pass is not self._token:
            raise UsageError(
                "this pass over the loader has ended: another one began, a state was loaded, another epoch was set, "
                "or a batch failed. Begin a new one; it continues at the loader's position"
            )
        try:
            batch = next(self._batches)
        except StopIteration:
            self._over, self._owner._pass = True, None
            self._owner.sampler.finish()
            raise
        except BaseException:
            self._owner._pass = None  # the DataLoader would continue behind the batch that failed, and skip it
            raise
        self._owner.handed_out += 1
        self._owner.sampler.advance()  # before it is handed out: a save in the loop's body includes this batch
        return batch


def resumable(loader: DataLoader[Any], *, seed: int | None = None) -> ResumableLoader:
    """Make a plain DataLoader resumable in the middle of an epoch, with any number of workers and ranks.

    A loader whose ``batch_sampler`` is a ResumableSampler is wrapped as it is. Any other is rebuilt with its dataset
    and options and a ResumableSampler: shuffled if it shuffles (by ``seed``, else by the seed of its generator or its
    DistributedSampler, else by 0), and divided among the ranks of torch.distributed.
    """
    if keeps_position(loader):
        raise UsageError(f"a {type(loader).__qualname__} has a state of its own: pass it to the Checkpointer as it is")
    if hasattr(loader, "state_dict"):
        raise UsageError(f"this is {without_position(loader)}")
    if isinstance(loader.dataset, IterableDataset):
        raise UsageError(
            "the loader's dataset is iterable, so a restore would have to read it again from the start: use "
            "torchdata's StatefulDataLoader, or a dataset with __getitem__ and __len__"
        )
    if isinstance(loader.batch_sampler, ResumableSampler):
        if seed is not None:
            raise UsageError("the loader's ResumableSampler has a seed already: pass it there")
        return ResumableLoader(loader)
    if type(loader) is not DataLoader:
        raise UsageError(
            f"a {type(loader).__qualname__} may load differently from a DataLoader: create it with "
            "batch_sampler=deepvm.ResumableSampler(dataset, batch_size)"
        )
    options = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
               "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order")  # fmt: skip
    kept = {name: getattr(loader, name) for name in options}
    return ResumableLoader(DataLoader(loader.dataset, batch_sampler=_sampler_like(loader, seed), **kept))


def keeps_position(loader: Any) -> bool:
    """True if its ``state_dict`` has its position. Accelerate's loaders always have one, which works only if the loader
    within has one. It is not called: that may start workers."""
    within = getattr(loader, "base_dataloader", loader)
    return hasattr(loader, "state_dict") and hasattr(within, "state_dict")


def without_position(loader: Any) -> str:
    """Describe a loader that wraps one without a position."""
    return (
        f"a {type(loader).__qualname__} around a {type(loader.base_dataloader).__qualname__}, which does not keep its "
        "position in an epoch: use accelerator.prepare(deepvm.resumable(loader)), and pass the resumable loader to the "
        "Checkpointer"
    )


def _sampler_like(loader: DataLoader[Any], seed: int | None) -> ResumableSampler:
    if loader.batch_size is None:
        problem = "batches of its own (batch_sampler, or batch_size=None)"
    else:
        found = _options_of(loader)
        if found is not None:
            found |= {"drop_last": loader.drop_last} | ({} if seed is None else {"seed": seed})
            return ResumableSampler(loader.dataset, loader.batch_size, **found)  # type: ignore[arg-type]
        problem = f"a {type(loader.sampler).__qualname__}"
    raise UsageError(
        f"the loader takes its samples from {problem}, whose position cannot be saved: use shuffle=True or False, or "
        "batch_sampler=deepvm.ResumableSampler(dataset, batch_size)"
    )


def _options_of(loader: DataLoader[Any]) -> dict[str, Any] | None:
    """Return the options of a ResumableSampler that is like this loader's own sampler; None if none is."""
    own: Any = loader.sampler
    kind = type(own)
    if getattr(own, "dataset" if kind is DistributedSampler else "data_source", None) is not loader.dataset:
        return None
    if kind is RandomSampler and not own.replacement and own._num_samples is None:
        generator = own.generator or loader.generator
        return {"shuffle": True, "seed": 0 if generator is None else generator.initial_seed() % 2**64}
    if kind is SequentialSampler:
        return {"shuffle": False}
    if kind is DistributedSampler:
        return {"shuffle": own.shuffle, "seed": own.seed, "rank": own.rank, "world_size": own.num_replicas}
    return None
