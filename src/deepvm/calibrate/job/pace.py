"""The steps of a script's optimizers -> where one training step ends and the next begins.

With several optimizers (a GAN has two), a training step ends when the one that steps least often has stepped: a cycle
of all of them. An optimizer that stops, such as that of a pre-training, is left out after a while.
"""

from __future__ import annotations

from typing import Any

FORGOTTEN = 50  # steps of the others after which an optimizer counts as stopped


class Pace:
    def __init__(self) -> None:
        self._counts: dict[int, int] = {}  # in the order of the first step since the count began
        self._last: dict[int, int] = {}
        self._steps = 0
        self.optimizers: list[Any] = []  # in the order of their first step
        self._fixed: int | None = None

    def stepped(self, optimizer: Any) -> bool:
        """Count a step; True if it ends a training step."""
        key = id(optimizer)
        self._steps += 1
        if key not in self._counts:
            self.optimizers.append(optimizer)
        self._counts[key] = (self._counts[key] if self._counts.get(key) else self._counts.pop(key, 0)) + 1
        self._last[key] = self._steps
        for other in [one for one, last in self._last.items() if self._steps - last > FORGOTTEN]:
            del self._counts[other], self._last[other]
            self.optimizers = [one for one in self.optimizers if id(one) != other]
            self._fixed = None if self._fixed == other else self._fixed
        return key == (self._slowest() if self._fixed is None else self._fixed)

    def _slowest(self) -> int:
        least = min(self._counts.values())
        return [key for key, count in self._counts.items() if count == least][-1]

    def fix(self) -> None:
        """Keep to the optimizer that is slowest now: in the middle of a cycle, counts differ by one."""
        rarest = min(self._counts.values())
        # One step behind may be the same frequency: then the last of the cycle decides
        keys = [key for key, count in self._counts.items() if count <= rarest + (1 if rarest > 1 else 0)]
        self._fixed = keys[-1]

    def is_new(self, optimizer: Any) -> bool:
        return id(optimizer) not in self._counts

    def restart(self) -> None:
        """Count again from here: another optimizer joined."""
        self._counts = dict.fromkeys(self._counts, 0)
        self._fixed = None
