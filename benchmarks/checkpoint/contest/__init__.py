"""The contestants of the checkpoint benchmark, each in a process of its own, all over the same state.

A contestant makes one save and tells how long things took, in seconds from the call:

- ``at_once``: until the optimizer may step, when it wants to at once; includes the call itself
- ``long_step``: how long training was kept waiting when the next update comes after everything is over
- ``remote``: until all bytes are in another process's memory, over TCP
- ``durable``: until they are on disk, fsync included
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from benchmarks.common.workloads import State

Times = dict[str, float]


class Contestant(Protocol):
    def __init__(self, state: State, scratch: Path, options: dict[str, Any]) -> None: ...

    def save(self, step: int) -> Times: ...

    def close(self) -> None: ...
