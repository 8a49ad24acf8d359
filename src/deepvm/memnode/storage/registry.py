"""All runs of a node by name, and who may open them."""

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
    """All runs by name. A name belongs to whoever first brings a key for it."""

    def __init__(self, arena: Arena, outlet: Outlet, counters: Counters, kept: KeptDocuments, *, most: int) -> None:
        self._arena, self._outlet, self._counters, self._kept, self._most = arena, outlet, counters, kept, most
        self._lock = threading.Lock()
        self._runs: dict[str, Run] = {}

    def __iter__(self) -> Iterator[Run]:
        return iter(list(self._runs.values()))

    def __len__(self) -> int:
        return len(self._runs)

    def find(self, name: str) -> Run | None:
        return self._runs.get(name)

    def add(self, name: str, verifier: str) -> Run:
        """The run of that name; a new one where there is none. Whether the verifier fits is for the caller to see."""
        with self._lock:
            run = self._runs.get(name)
            if run is None:
                if len(self._runs) >= self._most:
                    self._forget_one()
                run = self._make(name, verifier)
            return run

    def load(self, name: str, verifier: str) -> Run:
        """A run that an earlier node kept: it has its place, however many there are."""
        with self._lock:
            return self._make(name, verifier)

    def _make(self, name: str, verifier: str) -> Run:
        run = self._runs[name] = Run(name, verifier, self._arena, self._outlet, self._counters, self._kept)
        return run

    def _forget_one(self) -> None:
        for name, run in self._runs.items():
            if run.empty:
                del self._runs[name]
                self._outlet.forget(run)
                return
        raise RequestRefused("no-room", f"{len(self._runs)} runs are kept here, which is the limit")


def may_open(
    run: Run | None, name: str, *, proof: str | None, verifier: str | None, node_nonce: str, client_nonce: str
) -> bool:
    """Whether the client has the run's key. Of a run that is not here, whoever brings a verifier may have an empty
    view; one who only claims to know the key hears the same as with a wrong key."""
    if run is None:
        return verifier is not None
    if proof is None and verifier is None:
        return False
    fits = True
    if proof is not None:
        fits &= frames.same(proof, frames.proof(run.verifier, f"run/{name}", node_nonce, client_nonce))
    if verifier is not None:
        fits &= frames.same(verifier, run.verifier)
    return fits
