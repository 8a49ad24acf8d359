"""How the ranks of a process group agree: through the key-value store with which torch.distributed was initialized.

Not with a collective: so no process group is touched, a missing rank costs a deadline instead of an abort, and it works
beside NCCL and after ``destroy_process_group``. Input: each rank's answer. Output: the verdict, which rank 0 writes and
all ranks read. ranks.py has the questions.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from deepvm.errors import CheckpointError

log = logging.getLogger("deepvm.checkpoint")

RULE = (
    "every rank creates the Checkpointer and calls restore(), step(), save() and close() alike, not only rank 0: take "
    "them out of `if rank == 0`"
)
GRACE_S = 10.0  # others wait longer than rank 0, whose verdict names the missing ranks
CREATING = "Checkpointer()"  # a meeting that a rank may join after it has left
WARN_S = 10.0  # a longer wait is logged
CHECK_S = 0.5  # between two checks whether another rank has left
MOST_POLL_S = 0.02
PIECE_BYTES = 2**20  # of a value: stores refuse much larger ones


class RanksDiverged(CheckpointError):
    """Ranks are not at the same call, or one of them is missing: to continue would only wait again."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The outcome of a meeting; the same on every rank, except for ``values`` of a gathering."""

    values: list[Any]
    problems: dict[int, str] = field(default_factory=dict)  # of ranks that could not do their part

    def text(self) -> str:
        return "; ".join(f"rank {rank}: {problem}" for rank, problem in sorted(self.problems.items()))


class Meetings:
    """The meetings of one process group, one after another, under numbers that all ranks count alike."""

    def __init__(self, name: str, rank: int, world_size: int) -> None:
        self.group = dist.group.WORLD
        self.pid = os.getpid()
        self._rank, self._world_size = rank, world_size
        store = _group_store()
        self._kept = store  # on rank 0 it may be the server, and must live as long
        with suppress(AttributeError, RuntimeError, NotImplementedError):
            store = store.clone()  # its own connection: a wait does not block other users
        self._store = distributed_c10d.PrefixStore(f"deepvm/{name}", store)
        self._number = 0
        self._open = 0
        self._written: list[str] = []  # keys that all ranks have read when they join the next meeting
        self._lock = threading.Lock()

    # --- a meeting ----------------------------------------------------------------------------------------------

    def hold(self, what: str, value: Any, problem: str | None, deadline_s: float, gather: bool) -> Verdict:
        with self._lock:
            number, self._number = self._number, self._number + 1
            try:
                if self._rank == 0:
                    found, rows = self._collect(number, [what, problem, value], deadline_s, gather)
                else:
                    self._put(f"{number}/{self._rank}", [what, problem, value])
                    found, rows = self._await_verdict(number, what, deadline_s + GRACE_S), []
            except RuntimeError as error:  # the store's own
                raise RanksDiverged(f"rank {self._rank} cannot reach the other ranks at {what}: {error}") from error
            if "diverged" in found:
                raise RanksDiverged(found["diverged"])
            problems = {int(rank): str(text) for rank, text in found["problems"].items()}
            return Verdict(values=rows if gather else found["values"], problems=problems)

    def _collect(
        self, number: int, own: list[Any], deadline_s: float, gather: bool
    ) -> tuple[dict[str, Any], list[Any]]:
        """Collect all answers and write the verdict, on rank 0."""
        what = own[0]
        missing = self._wait_for(number, what, deadline_s)
        rows: list[list[Any]] = [own]
        if missing:
            found: dict[str, Any] = {"diverged": missing}
        else:
            rows += [self._get(f"{number}/{rank}") for rank in range(1, self._world_size)]
            others = [rank for rank, row in enumerate(rows) if row[0] != what]
            if others:
                elsewhere = f"rank {others[0]} is at {rows[others[0]][0]} while rank 0 is at {what}"
                found = {"diverged": f"{elsewhere}: {RULE}"}
            else:
                problems = {rank: row[1] for rank, row in enumerate(rows) if row[1] is not None}
                found = {"problems": problems, "values": [] if gather else [row[2] for row in rows]}
        before = self._written
        self._written = []
        verdict = self._decide(number, found)
        if not missing:
            self._written += [f"{number}/{rank}" for rank in range(1, self._world_size)]
            for key in before:  # all ranks have joined, and read them
                self._delete(key)
        return verdict, [row[2] for row in rows]

    def _wait_for(self, number: int, what: str, deadline_s: float) -> str | None:
        """Wait until all others have answered; return why they did not."""
        waiting = _Waiting(deadline_s)
        missing = list(range(1, self._world_size))
        while True:
            missing = [rank for rank in missing if not self._store.check([f"{number}/{rank}"])]
            if not missing:
                return None
            if waiting.is_check_due():
                for rank in missing if what != CREATING else ():  # a rank that closed a Checkpointer may create another
                    if (why := self._left(rank)) is not None:
                        return f"rank {rank} has left ({why}), and rank 0 is at {what}: {RULE}"
                if self._store.check([f"{number}/verdict"]):  # another rank has given up
                    return "given up"
            if not waiting.pause("rank 0", f"{_listed(missing)} at {what}"):
                return f"{_listed(missing)} did not reach {what} within {deadline_s:g} s: {RULE}"

    def _await_verdict(self, number: int, what: str, deadline_s: float) -> dict[str, Any]:
        """Wait for the verdict, on ranks other than 0."""
        waiting, verdict = _Waiting(deadline_s), f"{number}/verdict"
        while not self._store.check([verdict]):
            if what != CREATING and waiting.is_check_due() and (why := self._left(0)) is not None:
                return self._decide(number, {"diverged": f"rank 0 has left ({why}), and others are at {what}: {RULE}"})
            if not waiting.pause(f"rank {self._rank}", f"rank 0 at {what}"):
                return self._decide(
                    number, {"diverged": f"rank 0 did not reach {what} within {deadline_s:g} s: {RULE}"}
                )
        return dict(self._get(verdict))

    def _decide(self, number: int, found: dict[str, Any]) -> dict[str, Any]:
        """Write the verdict, unless there is one: the first one counts, also for a rank that is late."""
        head = self._put_pieces(f"{number}/verdict/{self._rank}", found)
        self._written.append(f"{number}/verdict")
        decided = self._store.compare_set(f"{number}/verdict", "", head).decode()
        return found if decided == head else dict(self._get(f"{number}/verdict"))

    # --- values of any length -----------------------------------------------------------------------------------

    def _put(self, key: str, value: Any) -> None:
        self._store.set(key, self._put_pieces(key, value))

    def _put_pieces(self, name: str, value: Any) -> str:
        """Write the pieces of a value after the first; return its head: the first one, and where the others are."""
        text = json.dumps(value)
        first, *rest = [text[start : start + PIECE_BYTES] for start in range(0, len(text), PIECE_BYTES)]
        keys = [f"{name}/{i}" for i in range(len(rest))]
        for key, piece in zip(keys, rest, strict=True):
            self._store.set(key, piece)
        if self._rank == 0:
            self._written += keys
        return json.dumps([name, len(rest), first])

    def _get(self, key: str) -> Any:
        name, count, first = json.loads(self._store.get(key))
        keys = [f"{name}/{i}" for i in range(count)]
        found = json.loads(first + "".join(self._store.get(key).decode() for key in keys))
        if self._rank == 0:
            self._written += keys
        return found

    def _delete(self, key: str) -> None:
        with suppress(RuntimeError, NotImplementedError):  # a store that cannot delete only grows
            self._store.delete_key(key)

    # --- who is there -------------------------------------------------------------------------------------------

    def enter(self) -> None:
        self._open += 1
        if self._open == 1:
            self._delete(f"left/{self._rank}")

    def leave(self, why: str) -> None:
        self._open -= 1
        if self._open == 0 and os.getpid() == self.pid:
            with suppress(RuntimeError):  # the store may be gone, and the other ranks with it
                self._store.set(f"left/{self._rank}", why)

    def _left(self, rank: int) -> str | None:
        key = f"left/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else None


class _Waiting:
    """A wait with a deadline that polls often at first, then less often."""

    def __init__(self, deadline_s: float) -> None:
        self._began_s = time.monotonic()
        self._ends_s = self._began_s + deadline_s
        self._checked_s = self._began_s
        self._warned = False

    def is_check_due(self) -> bool:
        """True if it is time to check for ranks that have left."""
        now_s = time.monotonic()
        if now_s - self._checked_s < CHECK_S:
            return False
        self._checked_s = now_s
        return True

    def pause(self, who: str, awaited: str) -> bool:
        """Pause; False once the deadline is over. A long wait is logged once."""
        now_s = time.monotonic()
        if now_s >= self._ends_s:
            return False
        if not self._warned and now_s - self._began_s > WARN_S:
            self._warned = True
            most_s = self._ends_s - self._began_s
            log.warning("%s has waited %.0f s for %s and gives up after %.0f s: %s", who, WARN_S, awaited, most_s, RULE)
        time.sleep(min(MOST_POLL_S, (now_s - self._began_s) / 8))
        return True


def _group_store() -> Any:
    store = distributed_c10d._get_default_store()
    if store is None:
        raise CheckpointError(
            "torch.distributed was initialized without a store (MPI?): ranks cannot agree on what to save; use "
            'init_process_group("gloo") or ("nccl")'
        )
    return store


def _listed(ranks: Sequence[int]) -> str:
    shown = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}"
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"
