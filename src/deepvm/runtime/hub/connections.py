"""A machine's request to join -> its name in the run and its connection, for ``hub``."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from deepvm.errors import UsageError
from deepvm.runtime.cluster import Machine
from deepvm.runtime.hub.json_lines import HubGone, Lines


@dataclass
class MachineConnection:
    """A connected machine."""

    name: str
    lines: Lines
    address: str
    workers: int = 1
    memory: str | None = None  # where its memory node listens
    beats: bool = False  # not while it imports
    leaves: bool = False  # it will be preempted, and joins no more groups

    def send(self, what: str, **fields: Any) -> None:
        """Send a message. If the machine has ended, its receiving thread notices."""
        with contextlib.suppress(HubGone):
            self.lines.send(what, **fields)


def assign_name(asked: str, machines: Mapping[str, Machine], connected: Collection[str]) -> str:
    """Return the name of a new machine: the one it asks for, or for ``worker/auto`` a free one of that role."""
    role, _, number = asked.partition("/")
    if number == "auto":
        free = [name for name, machine in machines.items() if machine.role == role and name not in connected]
        if not free:
            raise UsageError(f"every {role} of this run is connected already")
        return free[0]
    if asked not in machines:
        raise UsageError(f"{asked} is not a machine of this run: it has {', '.join(machines)}")
    if asked in connected:
        raise UsageError(f"{asked} is connected already")
    return asked
