"""Machines that join, finish and fail -> the groups that train together. Pure: time is an argument.

A **round** is a group of machines that train together. It breaks when one of them is lost or asks to join again, and
when another one joins that it could use. The next round has the machines that have joined, when the policy for losses
allows it. Ranks follow the order of the cluster, so a replacement has the rank of what it replaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepvm.policy.loss import AfterLoss

START_S = 120.0  # for which the first group waits for its last machine, whatever the policy is
RETURN_S = 60.0  # for which a later group waits for connected machines of the last one: they end their workers first


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    number: int
    members: tuple[str, ...]  # by rank


class Membership:
    def __init__(self, wanted: Sequence[str], after_loss: AfterLoss) -> None:
        self.wanted = tuple(wanted)  # machines that train, in the order of their ranks
        self.after_loss = after_loss
        self.round: Round | None = None  # the one that trains, or trained last
        self.broken_by: str | None = None  # the machine that broke it
        self.finished: set[str] = set()
        self._joined: dict[str, float] = {}
        self._returning: set[str] = set()  # machines of the broken round that are connected and will join again
        self._waiting_since_s: float | None = None
        self._number = 0

    @property
    def joined(self) -> tuple[str, ...]:
        return tuple(name for name in self.wanted if name in self._joined)

    @property
    def training(self) -> bool:
        return self.round is not None and self.broken_by is None

    @property
    def over(self) -> bool:
        """True if every machine of the last round has finished its work."""
        return self.round is not None and set(self.round.members) <= self.finished

    def join(self, name: str, now_s: float) -> bool:
        """Add a machine to the next round. Return True if that breaks the present one."""
        self._joined[name] = now_s
        if self._waiting_since_s is None:
            self._waiting_since_s = now_s
        return self._break(name)

    def lose(self, name: str) -> bool:
        """Remove a lost machine. Return True if that breaks the round."""
        self._joined.pop(name, None)
        broke = (
            self.round is not None and name in self.round.members and name not in self.finished and self._break(name)
        )
        self._returning.discard(name)
        return broke

    def fail(self, name: str) -> bool:
        """Record that a machine's workers failed by themselves. Return True if that breaks the round."""
        return self.round is not None and name in self.round.members and self._break(name)

    def move(self, name: str) -> bool:
        """Break the round because a machine's checkpoints have a new address. Return True if one was training."""
        return self._break(name)

    def finish(self, name: str) -> None:
        self.finished.add(name)

    def form(self, now_s: float) -> Round | None:
        """Return the next round, if it may be formed now."""
        joined = self.joined
        if not joined or self.training or self._waiting_since_s is None:
            return None
        waited_s = now_s - self._waiting_since_s
        if len(joined) < len(self.wanted):
            first = self.round is None
            allowed = self.after_loss.decide(joined=len(joined), wanted=len(self.wanted), waited_s=waited_s)
            if not allowed or (first and waited_s < START_S):
                return None
        if self._returning - self._joined.keys() and waited_s < RETURN_S:
            return None
        self._number += 1
        self.round, self.broken_by, self._waiting_since_s = Round(number=self._number, members=joined), None, None
        self._joined, self._returning, self.finished = {}, set(), set()
        return self.round

    def _break(self, name: str) -> bool:
        if not self.training or self.over:
            return False
        self.broken_by = name
        self._returning = set(self.round.members) if self.round is not None else set()
        return True
