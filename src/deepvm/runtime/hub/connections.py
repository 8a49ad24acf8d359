"""The machines that are connected to the hub, and their places in the run."""

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
    leaves: bool = False  # it will be taken away, and trains no more

    def send(self, what: str, **fields: Any) -> None:
        """Send a message. If the machine has ended, its receiving thread notices."""
        with contextlib.suppress(HubGone):
            self.lines.send(what, **fields)


def free_place(asked: str, machines: Mapping[str, Machine], taken: Collection[str]) -> str:
    """Return the place of a machine that asks for it by name, or for any of a role as ``worker/auto``."""
    role, _, number = asked.partition("/")
    if number == "auto":
        free = [name for name, machine in machines.items() if machine.role == role and name not in taken]
        if not free:
            raise UsageError(f"every place of a {role} is taken")
        return free[0]
    if asked not in machines:
        raise UsageError(f"{asked} is no machine of this run: it has {', '.join(machines)}")
    if asked in taken:
        raise UsageError(f"{asked} is here already")
    return asked
