"""Which steps of its run a session may delete from a store, and which ones keep it from saving.

Input: what restore() saw and loaded, and what was committed. A step that this session neither wrote nor restored, and
that is newer than all that it did, belongs to another training or was unreachable: it is never deleted. Steps that
restore() saw after the one that it loaded are superseded. They are deleted at the first commit after that, so that the
new branch is the newest.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress

from deepvm.checkpoint import ranks
from deepvm.errors import CheckpointError, StoreError
from deepvm.policy import Retention
from deepvm.store.base import Store

log = logging.getLogger("deepvm.checkpoint")


class _InStore:
    """One store's steps, as far as this session knows them."""

    def __init__(self, store: Store, run: str) -> None:
        self.store, self.run = store, run
        self.own: list[int] = []  # restored or committed by this session, in that order
        self.superseded: list[int] = []
        self.found: int | None = None  # the newest that was there before the first save; -1: none, or it was restored
        self.warned = False

    def refuse(self, step: int) -> None:
        """Raise if the store has a newer step that was not restored. Asks the store once."""
        if self.found is None:
            self.found = max(self.store.steps(self.run), default=-1)
        if step < self.found:
            raise CheckpointError(
                f'run "{self.run}" in {self.store.url} has step {self.found}, newer than step {step} and not restored: '
                "call restore() first, or choose another run="
            )
        self.found = -1

    def restored(self, step: int | None, seen: Sequence[int] | None) -> None:
        self.found = -1
        if step is not None:
            self.superseded = [s for s in (self.own if seen is None else seen) if s > step]
            self.own = [*(s for s in self.own if s < step), step]

    def committed(self, step: int) -> None:
        self.own = [*(s for s in self.own if s != step), step]
        self.superseded = [s for s in self.superseded if s != step]

    def supersede(self, step: int) -> bool:
        """True if a save that was under way at the restore is newer than the restored step: it is superseded, too."""
        newer = bool(self.own) and step > self.own[-1]
        if newer and step not in self.superseded:
            self.superseded.append(step)
        return newer

    def remove_superseded(self) -> list[int]:
        """Delete superseded steps and return them; those that fail are tried again at the next commit."""
        deleted = []
        for step in self.superseded:
            with suppress(StoreError):
                self.store.delete(self.run, step)
                deleted.append(step)
        self.superseded = [s for s in self.superseded if s not in deleted]
        if deleted:
            steps = ", ".join(map(str, deleted))
            log.warning("deleted step %s of run %s from %s: training continued from an older step",
                        steps, self.run, self.store.url)  # fmt: skip
        return deleted

    def prune(self, retention: Retention) -> None:
        """Delete expired steps: its own and older ones. What was committed last counts as the newest."""
        found = self.store.steps(self.run)
        newest = max(self.own, default=-1)
        older = [s for s in found if s < newest and s not in self.own]
        self.own = [s for s in self.own if s in found]
        for step in retention.expired([*older, *self.own]):
            with suppress(StoreError):
                self.store.delete(self.run, step)
        unknown = [s for s in found if s > newest and s not in self.superseded]
        if unknown and not self.warned:
            self.warned = True
            log.warning(
                "%s has step %s of run %s, newer than step %d and not seen by restore(): it is kept, and the next "
                "restore() loads it; delete it if it is not wanted",
                self.store.url, ", ".join(map(str, unknown)), self.run, newest,
            )  # fmt: skip


class StepOrder:
    """The steps of a run in all of its stores. Rank 0 asks and deletes; the others learn what it found."""

    def __init__(self, stores: Sequence[Store], run: str, retention: Retention, rank: int, world_size: int) -> None:
        self._places = [_InStore(store, run) for store in stores]
        self._retention, self._rank, self._world_size = retention, rank, world_size
        self._settled = False  # nothing is there that a save could be below
        self._since = 0  # commits of earlier attempts were before the last restore
        self._lock = threading.Lock()

    def check_alone(self, step: int) -> None:
        """Check with one rank: in the background, so that a store that hangs does not keep the trainer waiting."""
        if self._world_size == 1 and not self._settled:
            self._check(step)

    def _check(self, step: int) -> None:
        """Raise if a store has a newer step that was not restored. A store that does not answer is asked again."""
        with self._lock:
            for place in self._places:
                with suppress(StoreError):  # the save itself reports it
                    place.refuse(step)
            self._settled = all(place.found == -1 for place in self._places)

    def check_together(self, step: int) -> None:
        """Check with several ranks, before any of them takes a snapshot: all raise, or none."""
        if self._world_size > 1 and not self._settled:
            check = (lambda: self._check(step)) if self._rank == 0 else (lambda: None)
            _, settled = ranks.agree(f"save({step})", check, report=lambda _: self._settled)
            self._settled = bool(settled[0])

    def restored(self, step: int | None, seen: Mapping[str, Sequence[int]], attempts: int) -> None:
        """``step``: what was loaded, None if no store had any. ``seen``: all steps of the stores that answered."""
        with self._lock:
            self._settled, self._since = True, attempts
            for place in self._places:
                place.restored(step, seen.get(place.store.url))

    def committed(self, store: Store, step: int, attempt: int) -> list[int]:
        """Delete from a store what a step that it has now supersedes; return the deleted steps."""
        with self._lock:
            place = self._place(store)
            if attempt <= self._since and place.supersede(step):
                return []
            place.committed(step)
            return place.remove_superseded()

    def prune(self, store: Store) -> None:
        with self._lock:
            self._place(store).prune(self._retention)

    def _place(self, store: Store) -> _InStore:
        return next(place for place in self._places if place.store is store)
