"""Write committed checkpoints to the durable store; of a checkpoint that nodes share, node 0 writes all chunks."""

from __future__ import annotations

import threading

from deepvm.errors import Corrupt, NotFound, UsageError
from deepvm.memnode.storage.checkpoint import Checkpoint
from deepvm.memnode.storage.run import Run
from deepvm.memnode.writeback.held_chunks import HeldChunks
from deepvm.store.base import Manifest, Store


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
        self._changing = threading.Lock()  # a removal that was answered is not followed by what it removed

    def wants(self, checkpoint: Checkpoint) -> bool:
        return not checkpoint.durable and checkpoint.share.index == 0

    def write(self, run: Run, checkpoint: Checkpoint, source: HeldChunks) -> None:
        manifest = checkpoint.manifest
        if checkpoint.recovered and self._has(manifest):
            checkpoint.durable = True
            return
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
                writer.publish(checkpoint.whole_manifest())
        finally:
            writer.abort()
        checkpoint.durable = True
        if self._keep is not None:
            older = [step for step in self._store.steps(run.name) if step <= manifest.step]
            for step in older[: -self._keep]:
                self._store.delete(run.name, step)

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
            try:
                found_s = self._store.manifest(run.name, checkpoint.step).created_s
            except (NotFound, Corrupt):
                found_s = 0.0
            if found_s <= checkpoint.manifest.created_s:
                self._store.delete(run.name, checkpoint.step)

    def is_lost(self) -> bool:
        return False  # a store that does not answer now may answer the next time

    def close(self) -> None:
        if self._ours:
            self._store.close()
