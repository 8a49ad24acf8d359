"""What follows a commit: the checkpoint becomes durable, older ones are deleted, nodes that missed it are repaired.

Input: handles of committed saves, from saver.py. Output: their state is durable.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from deepvm.checkpoint.determinism.replay import Witnesses, witness_run
from deepvm.checkpoint.handle import SaveHandle, Status
from deepvm.checkpoint.save.event_log import EventLog
from deepvm.checkpoint.save.save_job import is_committed, save_name
from deepvm.checkpoint.save.step_order import StepOrder
from deepvm.errors import StoreError
from deepvm.store.base import Store
from deepvm.store.memory.repair import repair
from deepvm.store.memory.store import MemoryStore

log = logging.getLogger("deepvm.checkpoint")

CHECK_S = 0.5  # how long one request waits for a change: a newer commit, or the end, is noticed in between
FURTHER_POLL_S = 0.05  # files and buckets cannot report a change
REPAIR_S = 1.0  # between two attempts to repair a node that missed a checkpoint


class DurabilityWorker:
    """A thread that follows each committed checkpoint. Rank 0 copies, deletes and repairs; others only observe."""

    def __init__(
        self,
        stores: Sequence[Store],
        run: str,
        rank: int,
        event_log: EventLog,
        *,
        order: StepOrder,
        status: Status,
        deadline_s: float,
        session: str,
        witnesses: Witnesses | None,
    ) -> None:
        self._stores, self._run, self._rank, self._event_log = stores, run, rank, event_log
        self._order, self._status, self._deadline_s = order, status, deadline_s
        self._session, self._witnesses = session, witnesses
        self._newest: SaveHandle | None = None
        self._ends_s = math.inf
        self._committed: queue.SimpleQueue[SaveHandle | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, before the first ``follow``."""
        self._thread = threading.Thread(target=self._loop, name="deepvm-tier", daemon=True)
        self._thread.start()

    def follow(self, handle: SaveHandle) -> None:
        """Make a save durable that the first store has."""
        self._newest = handle
        self._committed.put(handle)

    def finish_by(self, ends_s: float) -> None:
        """Wait until then at most for the write-back of memory nodes, and not at all if they have none."""
        self._ends_s = ends_s

    def end(self) -> None:
        """End the thread after the saves that it follows."""
        self._committed.put(None)

    def join(self, timeout_s: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _loop(self) -> None:
        while True:
            try:
                handle = self._committed.get(timeout=REPAIR_S)
            except queue.Empty:
                self._repair()
                continue
            if handle is None:
                return
            try:
                place = self._make_durable(handle)
                if place is not None:
                    self._event_log.saved(handle, "durable", place=place)
                    handle.advance("durable")
                    self._status.durable += 1
                    self._status.last_durable_step = handle.step
            except Exception as error:
                self._status.last_error = f"step {handle.step} is not durable: {error}"
                log.warning("%s", self._status.last_error)

    def _make_durable(self, handle: SaveHandle) -> str | None:
        """Return the place where it is durable now; None if it is not, or not in time."""
        first, *further = self._stores
        if self._rank == 0:
            self._supersede(first, handle)
        if first.durable and self._rank == 0:
            self._retain(first)
        if first.durable and not further:
            return first.url
        if further and self._rank == 0:
            from deepvm.store.verify import copy

            for store in further:
                copy(first, store, self._run, handle.step)
                self._supersede(store, handle)
                self._retain(store)
            return further[0].url
        if further:
            return self._await_further(handle, further)
        nodes = first.memory_nodes()
        return None if nodes is None else self._await_nodes(nodes, handle.step)

    def _await_further(self, handle: SaveHandle, further: Sequence[Store]) -> str | None:
        """Wait, on ranks other than 0, until rank 0 has copied it into all further stores."""
        ends_s, name = time.monotonic() + self._deadline_s, save_name(self._session, handle.attempt)
        while time.monotonic() < ends_s and self._ends_s == math.inf and self._committed.empty():
            if all(is_committed(store, self._run, handle.step, name) for store in further):
                return further[0].url
            time.sleep(FURTHER_POLL_S)
        return None

    def _await_nodes(self, nodes: MemoryStore, step: int) -> str | None:
        """Wait until the nodes have made it durable. They answer when a state changes."""
        ends_s, watch = time.monotonic() + self._deadline_s, nodes.watch(self._run)
        while time.monotonic() < min(ends_s, self._ends_s) and self._committed.empty():
            if self._ends_s < math.inf and self._rank != 0:
                return None
            states = watch.states(step)
            if not states or (self._ends_s < math.inf and not watch.writes_on):  # superseded, or nothing to wait for
                return None
            if nodes.is_durable(states):
                return nodes.url
            watch.wait(CHECK_S, node=next((node for node, state in states.items() if state == "remote"), None))
            self._repair()
        return None

    def _repair(self) -> None:
        """Restore the replicas of nodes that were down, as soon as they answer and no save is under way."""
        nodes, newest = self._stores[0].memory_nodes(), self._newest
        if not self._status.nodes_down or newest is None or self._rank != 0 or nodes is None:
            return
        try:
            whole = repair(nodes, self._run, newest.step, newest.attempt)
        except StoreError as error:
            log.info("step %d is not repaired yet: %s", newest.step, error)
            return
        if newest.step == self._status.last_remote_step:
            self._status.nodes_down = tuple(node for node in self._status.nodes_down if node not in whole)

    def _supersede(self, store: Store, handle: SaveHandle) -> None:
        """Delete the steps after the restored one, and their witnesses."""
        for step in self._order.committed(store, handle.step, handle.attempt):
            if self._witnesses is not None:
                with suppress(StoreError):
                    store.delete(witness_run(self._run), step)

    def _retain(self, store: Store) -> None:
        self._order.prune(store)
        if self._witnesses is not None:
            with suppress(StoreError):
                self._witnesses.prune(store)
