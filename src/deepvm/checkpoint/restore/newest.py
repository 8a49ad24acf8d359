"""Stores and components -> the newest whole checkpoint, every chunk verified, loaded on all ranks or on none.

``checkpoint.restorer`` calls ``restore_newest``; ``load`` and ``lazy`` fill the components.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from deepvm.checkpoint import ranks
from deepvm.checkpoint.buffers.staging import Staging
from deepvm.checkpoint.restore.chunk_reader import ChunkReader, ChunkSource, Part
from deepvm.checkpoint.restore.lazy import LazyRestore
from deepvm.checkpoint.restore.load import load
from deepvm.checkpoint.restore.parameters import refuse_compiled
from deepvm.checkpoint.restore.prefetched import open_source
from deepvm.checkpoint.restore.selection import Selection, Wanted, select
from deepvm.checkpoint.restore.tensor_views import TensorViews
from deepvm.checkpoint.restore.validation import TensorsToCheck, prepare
from deepvm.checkpoint.state.chunk_map import ChunkMap
from deepvm.checkpoint.state.documents import skeleton_of_rank
from deepvm.checkpoint.state.layout import read_header
from deepvm.checkpoint.state.skeleton import names_of_tensors
from deepvm.errors import CheckpointError, DeepvmError, StoreError, describe, listed
from deepvm.store.base import Manifest, Store, chunk_count
from deepvm.store.safetensors import header_bytes
from deepvm.store.search import FoundCheckpoints, find_checkpoints

log = logging.getLogger("deepvm.checkpoint")

CALL = "restore()"  # where ranks meet
# A checkpoint that raises one of these is passed over: its bytes are bad, or a component cannot load them.
_UNUSABLE = (
    StoreError, LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RuntimeError, OSError, MemoryError
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Restored:
    step: int
    store: str
    origin: str  # the store that keeps it, from which it may have been prefetched
    fetched: bool
    bytes: int
    seconds: float
    passed_over: tuple[str, ...]  # newer checkpoints that could not be used, and why
    facts: Mapping[str, Any] = field(default_factory=dict)  # of its manifest
    missing: tuple[str, ...] = ()  # of the live state, not in the checkpoint: unchanged
    unexpected: tuple[str, ...] = ()  # in the checkpoint, not in the live state
    skipped: tuple[str, ...] = ()  # not wanted
    drift: tuple[str, ...] = ()  # why the run will not continue bit for bit
    replayed: bool = False  # its next step was replayed with the same result
    lazy: LazyRestore | None = None  # what has not arrived yet
    steps: Mapping[str, Sequence[int]] = field(default_factory=dict)  # on rank 0: of each store that answered

    def left_as_it_was(self) -> tuple[str, ...]:
        """Say why the run will drift if only a part was restored."""
        parts = [*self.missing, *self.skipped]
        return (f"only a part was restored, the rest is as it was: {listed(parts)}",) if parts else ()

    def log(self) -> None:
        log.info("%s", self)
        if self.drift:
            log.warning("step %d is restored, but the run will drift: %s", self.step, "; ".join(self.drift))

    def __str__(self) -> str:
        skipped = f"; passed over {'; '.join(self.passed_over)}" if self.passed_over else ""
        proven = "; replayed and identical" if self.replayed else ""
        how = "on demand, ready after" if self.lazy is not None else "in"
        taken = f"{self.bytes} bytes {how} {self.seconds:.3f} s"
        return f"restored step {self.step} from {self.store}: {taken}{skipped}{proven}"


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause garbage collection: a restore creates many objects and keeps nearly all, and a collection visits each."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_collector_paused()
def restore_newest(
    stores: Sequence[Store],
    run: str,
    components: dict[str, Any],
    step: int | None = None,
    wanted: Wanted | None = None,
    lazy: bool = False,
    *,
    deadline_s: float = 600.0,
) -> Restored | None:
    """Try checkpoints newest first, each in the nearest store first, and load the first whole one. Rank 0 proposes;
    ranks load a checkpoint only if every rank could read it."""
    rank, world_size = ranks.rank_and_world_size()

    def find() -> FoundCheckpoints:
        if lazy:
            refuse_compiled(components)
        return find_checkpoints(stores if rank == 0 else (), run, step)

    found, _ = ranks.agree(CALL, find, deadline_s=ranks.START_S)
    problems = found.problems
    while True:
        began = time.perf_counter()
        proposed, index = found.candidates.pop(0) if found.candidates else (-1, 0)
        if world_size > 1:
            proposed, index = ranks.broadcast_from_rank_0(CALL, (proposed, index))
        if proposed < 0:
            break
        candidate = _Candidate(stores[index], run, proposed, deadline_s, lazy)
        if _on_every_rank(candidate, lambda c: c.read(components, wanted or Wanted()), problems):
            if _on_every_rank(candidate, lambda c: c.load(components), problems):
                return candidate.restored(time.perf_counter() - began, problems, found.steps)
            if candidate.lazy is not None:
                candidate.lazy.abandon()
    verdict = ranks.meet(CALL, problem="; ".join(problems) or None)
    if verdict.problems:
        why = "; ".join(problems) or verdict.text()
        raise CheckpointError(f"no checkpoint of run {run} can be restored: {why}")
    if step is not None:
        raise CheckpointError(f"no store has step {step} of run {run}")
    return None


def _on_every_rank(candidate: _Candidate, work: Callable[[_Candidate], None], problems: list[str]) -> bool:
    """Do the work on every rank. False if it failed on one, with a problem added. Raises on every rank if one has an
    error that an older checkpoint would not mend."""
    _, error = ranks.attempt(lambda: work(candidate))
    fatal = error is not None and not isinstance(error, _UNUSABLE)
    problem = None if error is None else describe(error)
    if error is not None and not fatal:
        trace = None if isinstance(error, DeepvmError) else error
        log.warning("cannot restore %s: %s", candidate, problem, exc_info=trace)
    verdict = ranks.meet(CALL, fatal, problem=problem, deadline_s=ranks.START_S + candidate.deadline_s)
    if error is not None and fatal:
        raise error
    if any(verdict.values):
        raise CheckpointError(verdict.text())
    if verdict.problems:
        problems.append(f"{candidate}: {verdict.text() if len(verdict.values) > 1 else problem}")
    return not verdict.problems


class _Candidate:
    """A checkpoint that may be restored: ``read``, then ``load`` it."""

    manifest: Manifest
    selected: Selection
    _memory: Staging
    _source: ChunkSource
    _chunk_map: ChunkMap
    _tensors: TensorViews

    def __init__(self, store: Store, run: str, step: int, deadline_s: float, lazy: bool) -> None:
        self._store, self._run, self._step = store, run, step
        self.deadline_s, self._is_lazy = deadline_s, lazy
        self.lazy: LazyRestore | None = None

    def __str__(self) -> str:
        return f"step {self._step} in {self._store.url}"

    def read(self, components: Mapping[str, Any], wanted: Wanted) -> None:
        """Read the header and, unless the restore is lazy, all chunks that the components need."""
        self.manifest = manifest = self._store.manifest(self._run, self._step)
        self._memory, self._source = open_source(self._store, manifest)
        self._read(range(1), self._place)
        header = header_bytes(self._memory.view[:8], manifest.size_bytes)
        of_header = range(chunk_count(header, manifest.chunk_bytes))
        self._read(of_header[1:], self._place)
        layout, metadata = read_header(self._memory.view, manifest.size_bytes)
        skeleton = skeleton_of_rank(metadata, ranks.rank_and_world_size()[0])
        self._chunk_map = ChunkMap(layout, manifest.chunk_bytes)
        self._tensors = TensorViews(self._memory, layout)
        self.selected = select(components, skeleton, self._tensors, wanted)
        if self._is_lazy:
            return
        names = names_of_tensors(list(self.selected.skeleton.values()))
        needed = self._chunk_map.chunks_of(layout.by_name[name] for name in names)
        parts = self._chunk_map.parts
        rest = sorted(chunk for chunk in needed if chunk not in of_header)
        self._read(rest, lambda chunk: self._tensors.places(parts[chunk]))
        for chunk in of_header:
            self._tensors.move_to_places(parts[chunk])

    def _read(self, chunks: Sequence[int], place: Callable[[int], list[Part]]) -> None:
        reader = ChunkReader(self._source, self.manifest, place, chunks)
        try:
            reader.start()
            reader.wait_all(self.deadline_s)
        finally:
            reader.close()

    def _place(self, chunk: int) -> list[Part]:
        offset, length = self.manifest.span(chunk)
        self._memory.touch(offset, offset + length)
        return [(offset, length, self._memory.address + offset)]

    def load(self, components: dict[str, Any]) -> None:
        """Load the components, or start to load them lazily."""
        if self._is_lazy:
            prepare(self.selected, TensorsToCheck(self._tensors))
            lazy = LazyRestore(
                self.selected, self._tensors, self._chunk_map, self._source, self.manifest, self.deadline_s
            )
            lazy.start()
            self.lazy = lazy
        else:
            load(self.selected, self._tensors)
        components.update(self.selected.components)  # plain values are new objects

    def restored(self, seconds: float, problems: Sequence[str], steps: Mapping[str, Sequence[int]]) -> Restored:
        return Restored(
            step=self._step,
            store=self._store.url,
            origin=self._store.origin(self.manifest),
            fetched=self._store.is_prefetched(self.manifest),
            bytes=self.manifest.size_bytes,
            seconds=seconds,
            passed_over=tuple(problems),
            facts=self.manifest.facts,
            missing=tuple(self.selected.missing),
            unexpected=tuple(self.selected.unexpected),
            skipped=tuple(self.selected.skipped),
            lazy=self.lazy,
            steps=steps,
        )
