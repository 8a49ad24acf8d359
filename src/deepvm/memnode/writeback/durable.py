"""Write committed checkpoints to the durable store; of a checkpoint that nodes share, node 0 writes all chunks."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import replace

from deepvm.errors import Corrupt, NotFound, StoreError, UsageError
from deepvm.memnode.storage.checkpoint import Checkpoint
from deepvm.memnode.storage.run import Run
from deepvm.memnode.writeback.held_chunks import HeldChunks
from deepvm.store.base import Manifest, Store

OWNER = "owner"  # the fact that has the mark of the run's key
_MARK_ROUNDS = 200_000  # about 0.1 s, once for each run: guesses of a weak key are slow


class Durable:
    name = "durable"

    def __init__(self, store: Store | str, *, keep: int | None) -> None:
        self._ours = isinstance(store, str)
        if isinstance(store, str):
            from deepvm.store.urls import open_store

            if store.startswith("memory:"):
                raise UsageError(f"{store} is memory and not durable: give --durable a file or object store")
            store = open_store(store)
        self._store, self._keep = store, keep
        self._marks: dict[str, str] = {}  # by verifier
        self._written: dict[tuple[str, int], tuple[float, int]] = {}  # by run and step: created_s and number
        self._changing = threading.Lock()  # a removal that was answered is not followed by what it removed

    def wants(self, checkpoint: Checkpoint) -> bool:
        return not checkpoint.durable and checkpoint.share.index == 0

    def write(self, run: Run, checkpoint: Checkpoint, source: HeldChunks) -> None:
        manifest = checkpoint.manifest
        if checkpoint.recovered and self._has(manifest):
            self._note(run, checkpoint)
            checkpoint.durable = True
            return
        for step in {manifest.step, *self._store.steps(run.name)[-1:]}:
            found = self._found(run, step)
            if found is not None and not self._is_ours(run, found):
                raise StoreError(
                    f"{self._store.url} has step {step} of a run {run.name!r} with another key, another training's: "
                    "give this training another run name, or its node another durable store"
                )
        writer = self._store.writer(
            run.name, manifest.step, size_bytes=manifest.size_bytes, chunk_bytes=manifest.chunk_bytes
        )
        try:
            for chunk, digest in enumerate(manifest.digests):
                with source.chunk(chunk) as view:
                    writer.put(chunk, [view], digest)
            with self._changing:
                if checkpoint.is_deleted():
                    return
                whole = checkpoint.whole_manifest()
                writer.publish(replace(whole, facts={**whole.facts, OWNER: self._mark(run)}))
                self._note(run, checkpoint)
        finally:
            writer.abort()
        checkpoint.durable = True
        if self._keep is not None:
            older = [step for step in self._store.steps(run.name) if step <= manifest.step]
            for step in older[: -self._keep]:
                self._store.delete(run.name, step)
                self._written.pop((run.name, step), None)

    def _found(self, run: Run, step: int) -> Manifest | None:
        """Return the manifest that the store has of a step; None if none is readable."""
        try:
            return self._store.manifest(run.name, step)
        except (NotFound, Corrupt):
            return None

    def _is_ours(self, run: Run, found: Manifest) -> bool:
        """True if it was saved with the run's key: another training of the same name has another one."""
        return bool(found.facts.get(OWNER, self._mark(run)) == self._mark(run))

    def _mark(self, run: Run) -> str:
        """Return what stands for the run's key in the store: nobody can compute the key's verifier from it."""
        mark = self._marks.get(run.verifier)
        if mark is None:
            salt = f"deepvm-owner/1/{run.name}".encode()
            mark = hashlib.pbkdf2_hmac("sha256", run.verifier.encode(), salt, _MARK_ROUNDS).hex()[:32]
            self._marks[run.verifier] = mark
        return mark

    def _has(self, manifest: Manifest) -> bool:
        try:
            found = self._store.manifest(manifest.run, manifest.step)
        except NotFound:
            return False
        return list(found.digests) == list(manifest.digests)

    def remove(self, run: Run, checkpoint: Checkpoint) -> None:
        """Remove this commit and earlier ones of its step. A later one stays: the step was saved again."""
        if checkpoint.share.index != 0:
            return
        with self._changing:
            found = self._found(run, checkpoint.step)
            if found is None or (self._is_ours(run, found) and not self._is_later(run, found, checkpoint)):
                self._store.delete(run.name, checkpoint.step)
                self._written.pop((run.name, checkpoint.step), None)

    def _note(self, run: Run, checkpoint: Checkpoint) -> None:
        self._written[run.name, checkpoint.step] = checkpoint.manifest.created_s, checkpoint.number

    def _is_later(self, run: Run, found: Manifest, checkpoint: Checkpoint) -> bool:
        """True if what the store has was committed after a checkpoint. This process knows the order of what it wrote;
        of another node's, or an earlier process's, only the time is known."""
        created_s, number = self._written.get((run.name, found.step), (None, 0))
        if created_s == found.created_s:
            return number > checkpoint.number
        return found.created_s > checkpoint.manifest.created_s

    def is_lost(self) -> bool:
        return False  # a store that does not answer now may answer the next time

    def close(self) -> None:
        if self._ours:
            self._store.close()
