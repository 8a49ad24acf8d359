"""Which checkpoints to keep."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deepvm.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    keep_last: int = 2  # the newest, and one to fall back to where it proves bad
    keep_every: int | None = None  # and for good each whose step this divides

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise UsageError(f"keep_last={self.keep_last} would delete the newest checkpoint: it must be 1 at least")
        if self.keep_every is not None and self.keep_every < 1:
            raise UsageError(f"keep_every={self.keep_every}: it must be 1 at least, or none")

    def expired(self, steps: Iterable[int]) -> list[int]:
        """The steps to delete, oldest first."""
        return self.expired_in_order(sorted(set(steps)))

    def expired_in_order(self, steps: Sequence[int]) -> list[int]:
        """The same of steps that are given in the order in which they were made, the newest last."""
        return [s for s in steps[: -self.keep_last] if self.keep_every is None or s % self.keep_every]
