"""The trainer's side: snapshot, layout, transfer, commit, restore; data loaders that go on where they were."""

from deepvm.checkpoint.batches import BatchShare, share_of_batch
from deepvm.checkpoint.buckets import settled
from deepvm.checkpoint.checkpointer import Checkpointer
from deepvm.checkpoint.handle import SaveHandle, Status
from deepvm.checkpoint.loader import ResumableLoader, resumable
from deepvm.checkpoint.per_sample import SeededDataset, per_sample_seed
from deepvm.checkpoint.sampler import ResumableSampler
from deepvm.checkpoint.seeding import Determined, deterministic

__all__ = [
    "BatchShare",
    "Checkpointer",
    "Determined",
    "ResumableLoader",
    "ResumableSampler",
    "SaveHandle",
    "SeededDataset",
    "Status",
    "deterministic",
    "per_sample_seed",
    "resumable",
    "settled",
    "share_of_batch",
]
