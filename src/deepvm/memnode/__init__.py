"""The memory node: keeps checkpoints in memory for trainers on machines that may vanish.

The server is loaded when it is first asked for: whoever only speaks to nodes needs the wire protocol alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepvm.memnode.server import MemoryNode
    from deepvm.memnode.settings import Limits, Settings

__all__ = ["Limits", "MemoryNode", "Settings"]


def __getattr__(name: str) -> Any:
    if name == "MemoryNode":
        from deepvm.memnode.server import MemoryNode

        return MemoryNode
    if name in ("Limits", "Settings"):
        from deepvm.memnode import settings

        return getattr(settings, name)
    raise AttributeError(f"module 'deepvm.memnode' has no attribute {name!r}")
