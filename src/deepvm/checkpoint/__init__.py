"""The trainer's side of checkpoints: snapshot, layout, transfer, commit, restore."""

from deepvm.checkpoint.checkpointer import Checkpointer
from deepvm.checkpoint.handle import SaveHandle, Status

__all__ = ["Checkpointer", "SaveHandle", "Status"]
