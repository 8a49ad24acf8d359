"""Where committed checkpoints flow on to, in the background: the spill directory and the durable store."""

from __future__ import annotations

from typing import Any

from deepvm.memnode.checkpoints import Checkpoint
from deepvm.memnode.runs import Run


class Flow:
    def offer(self, run: Run, checkpoint: Checkpoint) -> None:
        pass

    def remember(self, run: Run) -> None:
        pass

    def remove(self, run: Run, checkpoint: Checkpoint) -> None:
        pass

    def make_room(self, run: Run) -> None:
        pass

    def status(self) -> dict[str, Any]:
        return {}
