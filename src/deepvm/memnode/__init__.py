"""The memory node: keeps checkpoints in memory for trainers on machines that may vanish."""

from __future__ import annotations

from deepvm.memnode.server import MemoryNode
from deepvm.memnode.settings import Limits, Settings

__all__ = ["Limits", "MemoryNode", "Settings"]
