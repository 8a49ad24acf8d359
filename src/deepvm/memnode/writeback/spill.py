"""The spill directory: committed checkpoints in, files out, which a restarted node loads and serves again.

``DIR/RUN/step-….safetensors`` and its manifest, as any file store keeps them; ``DIR/RUN/run.json`` (mode 0600) with
the verifier of the run's key and its sessions. A node that has only a share of a checkpoint's chunks keeps them,
packed, in ``DIR/.parts/RUN``, where no reader of whole checkpoints looks. Only what this node loaded or wrote is ever
removed from the directory.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from deepvm.errors import StoreError, UsageError
from deepvm.memnode.monitoring.log import Log
from deepvm.memnode.storage.arena import Arena
from deepvm.memnode.storage.checkpoint import Checkpoint
from deepvm.memnode.storage.registry import Runs
from deepvm.memnode.storage.run import Run
from deepvm.memnode.writeback.held_chunks import HeldChunks
from deepvm.memnode.writeback.leftovers import tidy
from deepvm.memnode.writeback.run_files import PARTS, RunFiles, make_private
from deepvm.protocol.placement import Share
from deepvm.store.base import Manifest
from deepvm.store.files.staged_file import lock_if_free
from deepvm.store.files.store import FileStore, explained

_LOCK = ".node.lock"
Places = range | dict[int, int]  # chunk -> its place in the file


class SpilledCopy:
    """The chunks of one checkpoint in a file store, at their places in its file."""

    def __init__(self, store: FileStore, manifest: Manifest, places: Places) -> None:
        self.store, self._manifest, self._places = store, manifest, places

    @property
    def whole(self) -> bool:
        return isinstance(self._places, range)

    def has(self, chunk: int) -> bool:
        return chunk in self._places

    def read(self, chunk: int, into: memoryview) -> None:
        self.store.read_chunk(self._manifest, self._places[chunk], into)


class Spill:
    """Writes checkpoints into the directory, and reads back what an earlier node left there."""

    name = "spill"

    def __init__(self, directory: Path | str, *, keep: int, log: Log) -> None:
        self._directory = Path(directory).absolute()
        self._keep, self._log = keep, log
        self._lock_fd = _lock(self._directory)
        self._whole = FileStore(self._directory, durable=False, private=True)
        self._parts = FileStore(self._directory / PARTS, durable=False, private=True)
        self._files = RunFiles(self._directory, log)
        self._mine: dict[str, set[tuple[FileStore, int]]] = {}  # by run: what this node loaded or wrote

    def wants(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.copy is None and len(_places(checkpoint.manifest, checkpoint.share)) > 0

    # --- writing --------------------------------------------------------------------------------------------------

    def write(self, run: Run, checkpoint: Checkpoint, source: HeldChunks) -> None:
        manifest, places = checkpoint.manifest, _places(checkpoint.manifest, checkpoint.share)
        store, kept = (self._whole, manifest) if isinstance(places, range) else (self._parts, _part(manifest, places))
        self._files.keep(run, self._order(run, checkpoint))
        if store is self._parts:
            with explained(self._parts.root):
                for folder in (self._parts.root, self._parts.root / run.name):
                    make_private(folder)
        writer = store.writer(run.name, manifest.step, size_bytes=kept.size_bytes, chunk_bytes=kept.chunk_bytes)
        try:
            for chunk in places:
                with source.chunk(chunk) as view:
                    writer.put(places[chunk], [view], manifest.digests[chunk])
            with run.lock:
                current = run.checkpoints.get(manifest.step, checkpoint)
                if checkpoint.is_deleted() or current is not checkpoint:
                    return
            writer.publish(_with_facts(checkpoint, kept))
        finally:
            writer.abort()
        with run.lock:
            self._mine.setdefault(run.name, set()).add((store, manifest.step))
            if checkpoint.is_deleted():
                store.delete(run.name, manifest.step)
                return
            checkpoint.copy = SpilledCopy(store, kept, places)
            run.checkpoints.setdefault(manifest.step, checkpoint)
        self._prune(run)

    @staticmethod
    def _order(run: Run, new: Checkpoint) -> list[int]:
        """Return the steps in the order of their commits, if that is not the order of their times: a clock was set
        back."""
        with run.lock:
            spilled = [found for found in run.checkpoints.values() if found.copy is not None and found is not new]
        spilled = sorted([*spilled, new], key=lambda found: found.order)
        return [found.step for found in spilled] if sorted(spilled, key=_by_time) != spilled else []

    def _prune(self, run: Run) -> None:
        with run.lock:
            copied = [found for found in run.in_order() if found.copy is not None]
            for found in copied[: -self._keep]:
                self.remove(run, found)
                if not found.in_memory:
                    del run.checkpoints[found.step]
            kept = {(found.copy.store, found.step) for found in copied if isinstance(found.copy, SpilledCopy)}
            stale = self._mine.get(run.name, set()) - kept  # left by a step that was saved again and then superseded
            for store, step in stale:
                self._delete(run, store, step)

    def remove(self, run: Run, checkpoint: Checkpoint) -> None:
        copy, checkpoint.copy = checkpoint.copy, None
        if isinstance(copy, SpilledCopy):
            self._delete(run, copy.store, checkpoint.step)

    def _delete(self, run: Run, store: FileStore, step: int) -> None:
        try:
            store.delete(run.name, step)
            self._mine.get(run.name, set()).discard((store, step))
        except StoreError as error:
            self._log.error("spill", run=run.name, step=step, error=str(error))

    def remember(self, run: Run) -> None:
        self._files.update(run)

    def forget(self, run: Run) -> None:
        for store in (self._whole, self._parts):
            store.forget(run.name)
        self._files.forget(run)
        self._mine.pop(run.name, None)

    # --- reading back ---------------------------------------------------------------------------------------------

    def load(self, runs: Runs, arena: Arena) -> list[tuple[Run, Checkpoint]]:
        """Load every run and checkpoint that an earlier node spilled. What cannot be read is logged and left."""
        if (self._directory / PARTS).is_dir():
            try:
                os.chmod(self._directory / PARTS, 0o700)  # an earlier version's may be readable by others
            except OSError as error:
                self._log.error("spill", error=f"{self._directory / PARTS} cannot be made private: {error.strerror}")
        tidy(self._directory, self._log)
        loaded = []
        for document in self._files.load():
            run = runs.load(document["run"], document["verifier"])
            run.session = document["session"]
            run.past_sessions.extend(document["past_sessions"])
            mine = self._mine.setdefault(run.name, set())
            for store in (self._parts, self._whole):
                for checkpoint in self._checkpoints(store, run.name, arena):
                    run.keep_document(checkpoint.manifest, checkpoint.document, force=True)
                    run.release_with(checkpoint)
                    run.checkpoints[checkpoint.step] = checkpoint
                    mine.add((store, checkpoint.step))
            for order, checkpoint in enumerate(_in_order(run, document.get("order", ())), start=1):
                checkpoint.order, checkpoint.recovered = order, True
                loaded.append((run, checkpoint))
        return loaded

    def _checkpoints(self, store: FileStore, run: str, arena: Arena) -> Iterator[Checkpoint]:
        try:
            steps = store.steps(run)
        except StoreError as error:
            self._log.error("spill", run=run, error=str(error))
            return
        for step in steps:
            try:
                checkpoint = _loaded(store, store.manifest(run, step), arena)
            except Exception as error:  # no file may stop the start
                self._log.error("spill", run=run, step=step, error=f"{type(error).__name__} {error}"[:300])
            else:
                yield checkpoint

    def is_lost(self) -> bool:
        """True if the directory was deleted or replaced: its lock is not the one that this node holds."""
        try:
            return not os.path.samestat(os.stat(self._directory / _LOCK), os.fstat(self._lock_fd))
        except FileNotFoundError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        self._whole.close()
        self._parts.close()
        os.close(self._lock_fd)


def _lock(directory: Path) -> int:
    """Make the directory if it is missing, and lock it: one node to a directory. The lock ends with the process.

    Parents are not made, so that a disk that is not mounted is noticed.
    """
    try:
        make_private(directory)
        fd = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        raise UsageError(f"the spill directory {directory} cannot be made: {directory.parent} does not exist") from None
    except OSError as error:
        raise UsageError(f"the spill directory {directory} cannot be written: {error.strerror}") from None
    if not lock_if_free(fd):
        os.close(fd)
        raise UsageError(f"another memory node uses the spill directory {directory}: give each one its own")
    return fd


def _places(manifest: Manifest, share: Share) -> Places:
    """Return the places of chunks in the file. Node 0 keeps all chunks, at their own places, and fetches those that it
    has not; the others keep their share, packed."""
    if share.index == 0 or share.replicas >= share.nodes:
        return range(len(manifest.digests))
    return _packed(manifest, share)


def _packed(manifest: Manifest, share: Share) -> dict[int, int]:
    return {chunk: place for place, chunk in enumerate(share.chunks(len(manifest.digests)))}


def _part(manifest: Manifest, places: dict[int, int]) -> Manifest:
    """Make the manifest of a share: its chunks one after the other; the short last chunk, if it has it, is last."""
    size_bytes = sum(manifest.span(chunk)[1] for chunk in places)
    digests = array("Q", (manifest.digests[chunk] for chunk in places))
    return replace(manifest, size_bytes=size_bytes, digests=digests, nodes=(), replicas=1)


def _with_facts(checkpoint: Checkpoint, kept: Manifest) -> Manifest:
    """Return the manifest as it is written; in memory the facts are kept as the document alone."""
    if kept is checkpoint.manifest:
        return checkpoint.whole_manifest()
    return replace(kept, facts={"part_of": json.loads(checkpoint.document), "node_index": checkpoint.share.index})


def _loaded(store: FileStore, manifest: Manifest, arena: Arena) -> Checkpoint:
    if "part_of" in manifest.facts:
        document = json.dumps(manifest.facts["part_of"], indent=1).encode()
        whole = Manifest.from_bytes(document)
        share = whole.share(int(manifest.facts["node_index"]))
        places: Places = _packed(whole, share)
    else:
        whole, share, document = manifest, manifest.share(0), manifest.to_bytes()
        places = range(len(manifest.digests))
    checkpoint = Checkpoint(arena, whole, document, share=share, blocks=None)
    checkpoint.copy = SpilledCopy(store, replace(manifest, facts={}), places)
    return checkpoint


def _in_order(run: Run, order: Sequence[int]) -> list[Checkpoint]:
    """Order checkpoints by their commits: as the run file lists them, else by their times."""
    place = {step: number for number, step in enumerate(order)}
    return sorted(run.checkpoints.values(), key=lambda found: (place.get(found.step, -1), _by_time(found)))


def _by_time(found: Checkpoint) -> tuple[float, int]:
    return found.manifest.created_s, found.step
