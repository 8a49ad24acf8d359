"""Which checkpoints to keep: steps in, steps to delete out. Savers and nodes prune by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepvm.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    keep_last: int = 2  # the newest, and one to fall back to if it is bad
    keep_every: int | None = None  # and every step that this divides, for ever

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise UsageError(
                f"keep_last is {self.keep_last}, which deletes the newest checkpoint: it must be at least 1"
            )
        if self.keep_every is not None and self.keep_every < 1:
            raise UsageError(f"keep_every is {self.keep_every}: it must be at least 1, or None")

    def expired(self, steps: Sequence[int]) -> list[int]:
        """Return the steps to delete, for steps in the order of their making, newest last."""
        return [s for s in steps[: -self.keep_last] if self.keep_every is None or s % self.keep_every]
