"""Follow a run's checkpoints at the memory nodes: a run in, the states of a checkpoint out, and waiting for a change.

The nodes hold back the answer until something changes, so nothing is polled while they answer.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from deepvm.errors import StoreError
from deepvm.protocol.frames import Kind
from deepvm.store.memory.answers import list_version, step_rows

if TYPE_CHECKING:
    from deepvm.store.memory.store import MemoryStore

_AGAIN_S = 0.05  # until a node that does not answer, or does not wait, is asked again


class RunWatch:
    def __init__(self, store: MemoryStore, run: str) -> None:
        self._store, self._run = store, run
        self._versions: dict[str, int] = {}  # of the list of each node that answered
        self.writes_on = False  # True if a node writes committed checkpoints back by itself

    def states(self, step: int) -> dict[str, str]:
        """Return the state of a checkpoint at each reachable node that has it: remote, spilled or durable."""
        answers, _ = self._store.call_each(self._run, Kind.STEPS)
        self._versions = {node: list_version(answer, node) for node, (answer, _) in answers.items()}
        self.writes_on = any(answer.get("writes_on") for answer, _ in answers.values())
        rows = ((node, row) for node, (answer, _) in answers.items() for row in step_rows(answer, node))
        return {node: row["state"] for node, row in rows if row["step"] == step}

    def wait(self, timeout_s: float, *, node: str | None = None) -> None:
        """Wait until the list of a node differs from the one that ``states`` saw last; without a name, of the first."""
        ends_s = time.monotonic() + timeout_s
        asked = node if node is not None else next(iter(self._versions), None)
        if asked in self._versions:
            meta: dict[str, object] = {"after": self._versions[asked], "timeout_s": timeout_s}
            try:
                answer, _ = self._store.call(asked, self._run, Kind.STEPS, meta, timeout_s=timeout_s)
                if list_version(answer, asked) != self._versions[asked]:
                    return
            except StoreError:
                pass
        time.sleep(max(0.0, min(_AGAIN_S, ends_s - time.monotonic())))
