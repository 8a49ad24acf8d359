"""The memory node: chunks of trainers in, committed checkpoints out, from memory. Its client is store/memory."""

from deepvm.memnode.server import MemoryNode
from deepvm.memnode.settings import Limits, Settings

__all__ = ["Limits", "MemoryNode", "Settings"]
