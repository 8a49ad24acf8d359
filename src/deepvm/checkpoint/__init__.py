"""The trainer's side: state -> checkpoints in stores, and back; data loaders that resume where they were."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from deepvm.checkpoint.checkpointer import Checkpointer
from deepvm.checkpoint.data.batch_share import BatchShare, share_of_batch
from deepvm.checkpoint.data.loader import ResumableLoader, resumable
from deepvm.checkpoint.data.sample_seed import SeededDataset, per_sample_seed
from deepvm.checkpoint.data.sampler import ResumableSampler
from deepvm.checkpoint.determinism.ddp_buckets import with_final_buckets
from deepvm.checkpoint.determinism.seeding import DeterminismReport, deterministic
from deepvm.checkpoint.handle import SaveHandle, Status

__all__ = [
    "BatchShare",
    "Checkpointer",
    "DeterminismReport",
    "ResumableLoader",
    "ResumableSampler",
    "SaveHandle",
    "SeededDataset",
    "Status",
    "deterministic",
    "per_sample_seed",
    "resumable",
    "share_of_batch",
    "with_final_buckets",
]

_RENAMED: dict[str, Any] = {"Determined": DeterminismReport, "settled": with_final_buckets}


def __getattr__(name: str) -> Any:
    if name == "dcp":  # imports torch.distributed.checkpoint, which takes a second
        return importlib.import_module(f"{__name__}.dcp")
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = _RENAMED[name]
    warnings.warn(f"{__name__}.{name} is now called {found.__name__}", DeprecationWarning, stacklevel=2)
    return found
