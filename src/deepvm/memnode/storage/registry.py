"""All runs of a node by name, and which clients may open them. Used by serving/ and writeback/."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from deepvm.memnode.errors import RequestRefused
from deepvm.memnode.monitoring.counters import Counters
from deepvm.memnode.storage.arena import Arena
from deepvm.memnode.storage.budgets import KeptDocuments
from deepvm.memnode.storage.run import Outlet, Run
from deepvm.protocol import frames


class Runs:
    """All runs by name. A name belongs to the client that first brings a key for it."""

    def __init__(self, arena: Arena, outlet: Outlet, counters: Counters, kept: KeptDocuments, *, most: int) -> None:
        self._arena, self._outlet, self._counters, self._kept, self._most = arena, outlet, counters, kept, most
        self._lock = threading.Condition()
        self._runs: dict[str, Run] = {}

    def __iter__(self) -> Iterator[Run]:
        return iter(list(self._runs.values()))

    def __len__(self) -> int:
        return len(self._runs)

    def find(self, name: str) -> Run | None:
        return self._runs.get(name)

    def wait_for(self, name: str, timeout_s: float) -> None:
        """Wait until there is a run of that name."""
        with self._lock:
            self._lock.wait_for(lambda: name in self._runs, timeout_s)

    def add(self, name: str, verifier: str) -> Run:
        """Return the run of that name, or make it. The caller checks whether the verifier fits."""
        with self._lock:
            run = self._runs.get(name)
            if run is None:
                if len(self._runs) >= self._most:
                    self._forget_one()
                run = self._make(name, verifier)
            return run

    def load(self, name: str, verifier: str) -> Run:
        """Add a run that an earlier node kept, however many there are."""
        with self._lock:
            return self._make(name, verifier)

    def _make(self, name: str, verifier: str) -> Run:
        run = self._runs[name] = Run(name, verifier, self._arena, self._outlet, self._counters, self._kept)
        self._lock.notify_all()
        return run

    def _forget_one(self) -> None:
        for name, run in self._runs.items():
            if run.empty:
                del self._runs[name]
                self._outlet.forget(run)
                return
        raise RequestRefused("no-room", f"the node keeps {len(self._runs)} runs, which is its limit")


def may_open(run: Run | None, name: str, nonces: tuple[str, str], *, proof: str | None, verifier: str | None) -> bool:
    """True if the client has the run's key. A run that does not exist is empty for a client that brings a verifier; one
    that only claims to know the key gets the same answer as for a wrong key."""
    if run is None or (proof is None and verifier is None):
        return run is None and verifier is not None
    expected = frames.proof(run.verifier, f"run/{name}", *nonces)
    return (proof is None or frames.same(proof, expected)) and (verifier is None or frames.same(verifier, run.verifier))
