"""The trainer's side: snapshot, layout, transfer, commit, restore; data loaders that go on where they were."""

from deepvm.checkpoint.checkpointer import Checkpointer
from deepvm.checkpoint.data.batch_share import BatchShare, share_of_batch
from deepvm.checkpoint.data.loader import ResumableLoader, resumable
from deepvm.checkpoint.data.sample_seed import SeededDataset, per_sample_seed
from deepvm.checkpoint.data.sampler import ResumableSampler
from deepvm.checkpoint.determinism.ddp_buckets import settled
from deepvm.checkpoint.determinism.seeding import Determined, deterministic
from deepvm.checkpoint.handle import SaveHandle, Status

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
