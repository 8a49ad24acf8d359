"""Write committed checkpoints back to the spill directory and the durable store, each with a worker of its own."""

from __future__ import annotations

import time
from typing import Any

from deepvm.memnode.monitoring.log import Log
from deepvm.memnode.peer_rule import PeerRule
from deepvm.memnode.settings import Settings
from deepvm.memnode.storage.arena import Arena
from deepvm.memnode.storage.checkpoint import Checkpoint
from deepvm.memnode.storage.registry import Runs
from deepvm.memnode.storage.run import Run
from deepvm.memnode.writeback.durable import Durable
from deepvm.memnode.writeback.held_chunks import HeldChunks
from deepvm.memnode.writeback.peers import Peers
from deepvm.memnode.writeback.spill import Spill
from deepvm.memnode.writeback.worker import WritebackWorker
from deepvm.protocol.addresses import split_address
from deepvm.protocol.credentials import client_tls


class Writeback:
    def __init__(self, settings: Settings, log: Log) -> None:
        self._settings, self._log = settings, log
        self._tls = client_tls(settings.tls_cert)
        self._rule = PeerRule(split_address(settings.listen, listen=True)[0], settings.peers)
        self._spill: Spill | None = None
        self.workers: list[WritebackWorker] = []
        if settings.spill is not None:
            self._spill = Spill(settings.spill, keep=settings.kept_in_spill, log=log)
            self.workers.append(WritebackWorker(self._spill, log, self._hold))
        if settings.durable is not None:
            self.workers.append(WritebackWorker(Durable(settings.durable, keep=settings.durable_keep), log, self._hold))

    def _hold(self, run: Run, checkpoint: Checkpoint) -> HeldChunks:
        if len(checkpoint.manifest.nodes) < 2 or checkpoint.share.index != 0:
            return HeldChunks(checkpoint, None)
        return HeldChunks(checkpoint, Peers(run, self._rule, token=self._settings.token, tls=self._tls))

    def start(self, runs: Runs, arena: Arena) -> int:
        """Load what was spilled, start the workers, write back what is not durable yet; return the number loaded."""
        loaded = [] if self._spill is None else self._spill.load(runs, arena)
        for worker in self.workers:
            worker.start()
        for run, checkpoint in loaded:
            self.offer(run, checkpoint)
        return len(loaded)

    def offer(self, run: Run, checkpoint: Checkpoint) -> None:
        for worker in self.workers:
            worker.offer(run, checkpoint)

    def remember(self, run: Run) -> None:
        if self._spill is not None:
            self._spill.remember(run)

    def forget(self, run: Run) -> None:
        if self._spill is not None:
            self._spill.forget(run)

    def remove(self, run: Run, checkpoint: Checkpoint) -> None:
        """Remove a deleted checkpoint from the spill directory, or a restart would load it."""
        if self._spill is not None:
            self._spill.remove(run, checkpoint)

    def remove_durable(self, run: Run, step: int, deleted: Checkpoint | None) -> None:
        """Remove a deleted checkpoint from the durable store; without one, what an earlier removal did not manage."""
        for worker in self.workers:
            if worker.sink is not self._spill:
                worker.remove(run, step, deleted)

    def make_room(self, run: Run) -> None:
        for worker in self.workers:
            worker.make_room(run)

    def flush(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        flushed = [worker.flush(deadline) for worker in self.workers]  # all of them, also after one that failed
        return all(flushed)

    def status(self) -> dict[str, Any]:
        return {name: value for worker in self.workers for name, value in worker.status().items()}

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
