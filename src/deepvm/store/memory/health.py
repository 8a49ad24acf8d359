"""Which memory nodes hang: stalled waits in, errors out that end them. One record for each store.

A dead node is noticed at once, since its system refuses or resets the connection. A node that hangs (stopped, swapped
out, cut off from the network) accepts connections and answers nothing. So a wait in which no byte moved for STALL_S
probes whether the node still greets a new connection. If it does not within GREET_S, the node is suspected: all waits
on it end, no later one begins, and a thread in the background probes it until it greets.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from deepvm.errors import StoreError, StoreUnavailable

log = logging.getLogger("deepvm.store")

STALL_S = 0.75  # without a byte: a node that is busy with a disk or waits for other ranks still greets meanwhile
GREET_S = 2.0  # to connect and to greet: one lost packet is sent again after 1 s
AGAIN_S = 1.0  # between two attempts in the background
_PROBE_S = 2 * GREET_S  # one probe at a time for each node; others wait for its outcome


class Health:
    """``greet`` connects to a node and is greeted, or raises. ``spare`` nodes can be done without."""

    def __init__(self, greet: Callable[[str], None], *, spare: int) -> None:
        self._greet, self._spare = greet, spare
        self._hung: dict[str, str] = {}  # node -> why it is suspected
        self._greeted: dict[str, float] = {}  # when it last greeted
        self._probes: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def is_hung(self, node: str) -> bool:
        return node in self._hung

    def check(self, node: str) -> None:
        """Raise for a node that is suspected."""
        why = self._hung.get(node)
        if why is not None:
            raise StoreUnavailable(why)

    def can_spare(self, node: str) -> bool:
        """True if everything has a replica elsewhere, without this node and those that hang."""
        with self._lock:
            return len(self._hung.keys() | {node}) <= self._spare

    def stalled(self, node: str) -> None:
        """No byte of a wait moved for a while. Return if the node lives or cannot be spared; else raise."""
        if not self.can_spare(node):
            return
        with self._lock:
            probe = self._probes.setdefault(node, threading.Lock())
        if not probe.acquire(timeout=_PROBE_S):
            return
        try:
            self.check(node)
            if time.monotonic() - self._greeted.get(node, -STALL_S) < STALL_S:
                return
            problem = self._probe(node)
            if problem is not None:
                self.suspect(node, problem)
                raise problem
            self._greeted[node] = time.monotonic()
        finally:
            probe.release()

    def _probe(self, node: str) -> StoreUnavailable | None:
        """Return why a node does not greet; None if it does, or refuses: then it lives."""
        try:
            self._greet(node)
        except StoreUnavailable as error:
            return error
        except StoreError:
            pass
        return None

    def suspect(self, node: str, why: StoreError) -> None:
        with self._lock:
            if node not in self._hung:
                log.warning("memory node %s hangs and is not used until it answers: %s", node, why)
            self._hung[node] = str(why)
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._probe_hung, name="deepvm-health", daemon=True)
                self._thread.start()

    def answers(self, node: str) -> None:
        with self._lock:
            if self._hung.pop(node, None) is not None:
                log.warning("memory node %s answers again", node)

    def _probe_hung(self) -> None:
        while not self._closed.wait(AGAIN_S):
            for node in list(self._hung):
                problem = self._probe(node)
                if problem is None:
                    self.answers(node)
                    continue
                with self._lock:
                    if node in self._hung:  # another thread may have had an answer meanwhile
                        self._hung[node] = str(problem)
            with self._lock:
                if not self._hung:
                    self._thread = None
                    return

    def close(self) -> None:
        self._closed.set()
        thread = self._thread
        if thread is not None:
            thread.join(GREET_S + 1.0)
