"""From a store back into the trainer: the newest whole checkpoint, every chunk verified, nothing half-loaded."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from deepvm.checkpoint import ranks
from deepvm.checkpoint.restore.chunk_reader import ChunkReader, Part, Place
from deepvm.checkpoint.restore.lazy import LazyRestore, SavedTensors, refuse_compiled
from deepvm.checkpoint.restore.load import load
from deepvm.checkpoint.restore.prefetched import open_source
from deepvm.checkpoint.restore.rehearsal import Shown, prepare
from deepvm.checkpoint.restore.selection import Selection, Wanted, listed, select
from deepvm.checkpoint.restore.tensor_views import TensorViews
from deepvm.checkpoint.state.chunk_map import ChunkMap
from deepvm.checkpoint.state.documents import skeleton_of_rank
from deepvm.checkpoint.state.layout import read_header
from deepvm.checkpoint.state.skeleton import names_of_tensors
from deepvm.errors import CheckpointError, DeepvmError, StoreError
from deepvm.store.base import Store, chunk_count
from deepvm.store.safetensors import header_bytes

log = logging.getLogger("deepvm.checkpoint")

T = TypeVar("T")
CALL = "restore()"  # where ranks meet
# A checkpoint that raises one of these is passed over: its bytes are bad, or a component cannot take what they say.
_UNUSABLE = (
    StoreError, LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RuntimeError, OSError, MemoryError
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Restored:
    step: int
    store: str
    origin: str  # the store that keeps it: another one, where it was fetched before
    fetched: bool
    bytes: int
    seconds: float
    passed_over: tuple[str, ...]  # newer checkpoints that could not be used, and why
    facts: Mapping[str, Any] = field(default_factory=dict)  # what its manifest tells of it
    missing: tuple[str, ...] = ()  # of the state here, not in the checkpoint: as it was before
    unexpected: tuple[str, ...] = ()  # in the checkpoint, not of the state here
    skipped: tuple[str, ...] = ()  # left out, as was asked for
    drift: tuple[str, ...] = ()  # why the run will not go on bit for bit
    replayed: bool = False  # its next step was made once more, and was the same
    on_demand: LazyRestore | None = None  # what is still under way
    seen: Mapping[str, Sequence[int]] = field(default_factory=dict)  # on rank 0: the steps of each store that answered

    def left_as_it_was(self) -> tuple[str, ...]:
        """Why a run drifts that has not all of its state from the checkpoint."""
        parts = [*self.missing, *self.skipped]
        return (f"only a part was restored, the rest is as it was: {listed(parts)}",) if parts else ()

    def log(self) -> None:
        log.info("%s", self)
        if self.drift:
            log.warning("step %d is restored, but the run will drift: %s", self.step, "; ".join(self.drift))

    def __str__(self) -> str:
        skipped = f"; passed over {'; '.join(self.passed_over)}" if self.passed_over else ""
        proven = "; replayed and identical" if self.replayed else ""
        how = "on demand, ready after" if self.on_demand is not None else "in"
        taken = f"{self.bytes} bytes {how} {self.seconds:.3f} s"
        return f"restored step {self.step} from {self.store}: {taken}{skipped}{proven}"


@contextmanager
def _collector_paused() -> Iterator[None]:
    """A restore makes objects by the number of tensors, and nearly all of them stay: there is nothing to collect, and
    looking for it takes time by the number of all objects."""
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
    """Try checkpoints newest first, and each in the nearest store first; the first that is whole is loaded. Ranks load
    the same one, or none: rank 0 says which, and only what every rank could fetch is loaded by any."""
    problems: list[str] = []
    seen: dict[str, Sequence[int]] = {}
    rank, world_size = ranks.rank_and_world_size()

    def candidates() -> list[tuple[int, int]]:
        if lazy:
            refuse_compiled(components)
        return _candidates(stores, run, step, problems, seen) if rank == 0 else []

    found, _ = ranks.agree(CALL, candidates, deadline_s=ranks.START_S)
    while True:
        began = time.perf_counter()
        candidate, nearness = chosen = found.pop(0) if found else (-1, 0)
        if world_size > 1:
            candidate, nearness = ranks.broadcast_from_rank_0(CALL, chosen)
        if candidate < 0:
            break
        store = stores[nearness]
        what = f"step {candidate} in {store.url}"
        fetch = partial(_Fetched, store, run, candidate, components, deadline_s, lazy, wanted or Wanted())
        fetched = _on_every_rank(fetch, what, problems, deadline_s)
        if fetched is None:
            continue
        if _on_every_rank(partial(fetched.load, components), what, problems, deadline_s):
            return Restored(
                step=candidate,
                store=store.url,
                origin=store.origin(fetched.manifest),
                fetched=store.is_prefetched(fetched.manifest),
                bytes=fetched.manifest.size_bytes,
                seconds=time.perf_counter() - began,
                passed_over=tuple(problems),
                facts=fetched.manifest.facts,
                missing=tuple(fetched.selected.missing),
                unexpected=tuple(fetched.selected.unexpected),
                skipped=tuple(fetched.selected.skipped),
                on_demand=fetched.on_demand,
                seen=seen,
            )
        if fetched.on_demand is not None:
            fetched.on_demand.abandon()
    verdict = ranks.meet(CALL, problem="; ".join(problems) or None)
    if verdict.problems:
        why = "; ".join(problems) or verdict.text()
        raise CheckpointError(f"no checkpoint of run {run} can be restored: {why}")
    if step is not None:
        raise CheckpointError(f"no store has step {step} of run {run}")
    return None


def _candidates(
    stores: Sequence[Store], run: str, step: int | None, problems: list[str], seen: dict[str, Sequence[int]]
) -> list[tuple[int, int]]:
    """Steps and the stores that have them; ``seen`` gets all that each store has."""
    found: list[tuple[int, int]] = []
    for nearness, store in enumerate(stores):
        try:
            seen[store.url] = store.steps(run)
            found += [(s, nearness) for s in seen[store.url] if step in (None, s)]
        except StoreError as error:
            problems.append(f"{store.url}: {error}")
            log.warning("cannot look for checkpoints in %s", problems[-1])
    return sorted(found, key=lambda one: (-one[0], one[1]))


def _on_every_rank(work: Callable[[], T], what: str, problems: list[str], deadline_s: float) -> T | None:
    """What the work returns, where every rank could do it; the problems tell why one could not. An error for which no
    older checkpoint is tried is raised on every rank."""
    result, error = ranks.attempt(work)
    fatal = error is not None and not isinstance(error, _UNUSABLE)
    kind = "" if isinstance(error, DeepvmError) else f"{type(error).__name__}: "
    problem = None if error is None else f"{kind}{error}"
    if error is not None and not fatal:
        log.warning("cannot restore %s: %s", what, problem, exc_info=error if kind else None)
    verdict = ranks.meet(CALL, fatal, problem=problem, deadline_s=ranks.START_S + deadline_s)
    if error is not None and fatal:
        raise error
    if any(verdict.values):
        raise CheckpointError(verdict.text())
    if not verdict.problems:
        return result
    problems.append(f"{what}: {verdict.text() if len(verdict.values) > 1 else problem}")
    return None


class _Fetched:
    """A checkpoint of which the header is here; and, unless the rest is to come on demand, all that is asked for."""

    def __init__(
        self,
        store: Store,
        run: str,
        step: int,
        components: Mapping[str, Any],
        deadline_s: float,
        lazy: bool,
        wanted: Wanted,
    ) -> None:
        self._deadline_s, self._lazy = deadline_s, lazy
        self.on_demand: LazyRestore | None = None
        self.manifest = store.manifest(run, step)
        self._memory, self._source = open_source(store, self.manifest)
        self._fetch(range(1))
        header = header_bytes(self._memory.view[:8], self.manifest.size_bytes)
        self._here = range(chunk_count(header, self.manifest.chunk_bytes))
        self._fetch(self._here[1:])
        self._layout, metadata = read_header(self._memory.view, self.manifest.size_bytes)
        skeleton = skeleton_of_rank(metadata, ranks.rank_and_world_size()[0])
        self._pieces = ChunkMap(self._layout, self.manifest.chunk_bytes)
        self._tensors = TensorViews(self._memory, self._layout)
        self.selected: Selection = select(components, skeleton, self._tensors, wanted)
        if not lazy:
            self._fetch_whole()

    def _fetch_whole(self) -> None:
        """All chunks of which the components need something."""
        names = names_of_tensors(list(self.selected.skeleton.values()))
        needed = self._pieces.chunks_of(self._layout.by_name[name] for name in names)
        self._fetch([chunk for chunk in needed if chunk not in self._here], self._final_place)
        for chunk in self._here:
            self._tensors.settle(self._pieces.parts[chunk])

    def _fetch(self, chunks: Collection[int], place: Place | None = None) -> None:
        arrival = ChunkReader(self._source, self.manifest, place or self._place, sorted(chunks))
        try:
            arrival.wait_all(self._deadline_s)
        finally:
            arrival.close()

    def _place(self, chunk: int) -> list[Part]:
        offset, length = self.manifest.span(chunk)
        self._memory.touch(offset, offset + length)
        return [(offset, length, self._memory.address + offset)]

    def _final_place(self, chunk: int) -> list[Part]:
        return self._tensors.places(self._pieces.parts[chunk])

    def load(self, components: dict[str, Any]) -> bool:
        """Give the components their state, or let it come to them."""
        if self._lazy:
            prepare(self.selected, Shown(self._tensors))
            source = SavedTensors(
                chunks=self._source, manifest=self.manifest, layout=self._layout, deadline_s=self._deadline_s
            )
            self.on_demand = LazyRestore(self.selected, self._tensors, source)
        else:
            load(self.selected, self._tensors)
        components.update(self.selected.components)  # plain values are other objects now
        return True
