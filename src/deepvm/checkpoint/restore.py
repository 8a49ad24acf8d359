"""From a store back into the trainer: the newest whole checkpoint, every chunk verified, nothing half-loaded."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from deepvm.checkpoint import ranks
from deepvm.checkpoint.arrival import Arrival, InPlace, Part
from deepvm.checkpoint.documents import skeleton_of_rank
from deepvm.checkpoint.fetched import came_from, memory_for
from deepvm.checkpoint.layout import read_header
from deepvm.checkpoint.loading import TensorsIn, check, load
from deepvm.checkpoint.on_demand import OnDemand, Source, refuse_compiled
from deepvm.checkpoint.pieces import Pieces
from deepvm.checkpoint.staging import Staging
from deepvm.checkpoint.state import names_of_tensors
from deepvm.errors import CheckpointError, StoreError
from deepvm.store.base import Store, chunk_count
from deepvm.store.files import FileStore
from deepvm.store.header import header_bytes

log = logging.getLogger("deepvm.checkpoint")

T = TypeVar("T")
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
    drift: tuple[str, ...] = ()  # why the run will not go on bit for bit
    replayed: bool = False  # its next step was made once more, and was the same
    on_demand: OnDemand | None = None  # what is still under way

    def __str__(self) -> str:
        skipped = f"; passed over {'; '.join(self.passed_over)}" if self.passed_over else ""
        proven = "; replayed and identical" if self.replayed else ""
        how = "on demand, ready after" if self.on_demand is not None else "in"
        taken = f"{self.bytes} bytes {how} {self.seconds:.3f} s"
        return f"restored step {self.step} from {self.store}: {taken}{skipped}{proven}"


def restore_newest(
    stores: Sequence[Store],
    run: str,
    components: dict[str, Any],
    *,
    step: int | None = None,
    lazy: bool = False,
    deadline_s: float = 600.0,
) -> Restored | None:
    """Try checkpoints newest first, and each in the nearest store first; the first that is whole is loaded. Ranks load
    the same one, or none: rank 0 says which, and only what every rank could fetch is loaded by any."""
    if lazy:
        refuse_compiled(components)
    problems: list[str] = []
    rank, world_size = ranks.rank_and_world_size()
    found = _candidates(stores, run, step, problems) if rank == 0 else []
    while True:
        began = time.perf_counter()
        candidate, nearness = chosen = found.pop(0) if found else (-1, 0)
        if world_size > 1:
            candidate, nearness = chosen = ranks.as_rank_0_says(chosen)
        if candidate < 0:
            break
        store = stores[nearness]
        what = f"step {candidate} in {store.url}"
        fetch = partial(_Fetched, store, run, candidate, components, deadline_s, lazy)
        fetched = _on_every_rank(fetch, what, problems)
        if fetched is None:
            continue
        if _on_every_rank(partial(fetched.load, components), what, problems):
            origin, was_here = came_from(store, fetched.manifest)
            return Restored(
                step=candidate,
                store=store.url,
                origin=origin,
                fetched=was_here,
                bytes=fetched.manifest.size_bytes,
                seconds=time.perf_counter() - began,
                passed_over=tuple(problems),
                facts=fetched.manifest.facts,
                on_demand=fetched.on_demand,
            )
        if fetched.on_demand is not None:
            fetched.on_demand.abandon()
    if problems if world_size == 1 else ranks.any_of(bool(problems)):
        why = "; ".join(problems) or "another rank cannot: its log says why"
        raise CheckpointError(f"no checkpoint of run {run} can be restored: {why}")
    if step is not None:
        raise CheckpointError(f"no store has step {step} of run {run}")
    return None


def _candidates(stores: Sequence[Store], run: str, step: int | None, problems: list[str]) -> list[tuple[int, int]]:
    """Steps and the stores that have them."""
    found: list[tuple[int, int]] = []
    for nearness, store in enumerate(stores):
        try:
            found += [(s, nearness) for s in store.steps(run) if step in (None, s)]
        except StoreError as error:
            problems.append(f"{store.url}: {error}")
            log.warning("cannot look for checkpoints in %s", problems[-1])
    return sorted(found, key=lambda one: (-one[0], one[1]))


def _on_every_rank(work: Callable[[], T], what: str, problems: list[str]) -> T | None:
    """What the work returns, where every rank could do it; the problems tell why one could not."""
    result: T | None = None
    try:
        result = work()
    except _UNUSABLE as error:
        kind = "" if isinstance(error, StoreError) else f"{type(error).__name__}: "
        problems.append(f"{what}: {kind}{error}")
        log.warning("cannot restore %s", problems[-1], exc_info=error if kind else None)
    if ranks.rank_and_world_size()[1] > 1 and not ranks.all_of(result is not None):
        if result is not None:
            problems.append(f"{what}: another rank cannot read it")
        return None
    return result


class _Fetched:
    """A checkpoint of which the header is here; and, unless the rest is to come on demand, all that is asked for."""

    def __init__(
        self, store: Store, run: str, step: int, components: Mapping[str, Any], deadline_s: float, lazy: bool
    ) -> None:
        self._deadline_s, self._lazy = deadline_s, lazy
        self._store: Store | InPlace = store
        self.on_demand: OnDemand | None = None
        self.manifest = store.manifest(run, step)
        mapped = store.map(self.manifest) if isinstance(store, FileStore) else None
        if mapped is None:
            self._memory = memory_for(store, self.manifest)
        else:
            self._memory = Staging(self.manifest.size_bytes, warm=False, over=memoryview(mapped))
            self._store = InPlace(store, self._memory)
        self._fetch(range(1))
        header = header_bytes(self._memory.view[:8], self.manifest.size_bytes)
        self._here = range(chunk_count(header, self.manifest.chunk_bytes))
        self._fetch(self._here[1:])
        self._layout, metadata = read_header(self._memory.view, self.manifest.size_bytes)
        self._skeleton = skeleton_of_rank(metadata, ranks.rank_and_world_size()[0])
        if not lazy:
            self._fetch_whole(components)

    def _fetch_whole(self, components: Mapping[str, Any]) -> None:
        """All chunks of which the components need something."""
        names: set[str] = set()
        for name in components:
            names |= names_of_tensors(self._skeleton.get(name))
        pieces = Pieces(self._layout, self.manifest.chunk_bytes)
        needed = pieces.chunks_of(self._layout.by_name[name] for name in names)
        self._fetch([chunk for chunk in needed if chunk not in self._here])

    def _fetch(self, chunks: Collection[int]) -> None:
        arrival = Arrival(self._store, self.manifest, self._place, sorted(chunks))
        try:
            arrival.wait_all(self._deadline_s)
        finally:
            arrival.close()

    def _place(self, chunk: int) -> list[Part]:
        offset, length = self.manifest.span(chunk)
        return [(offset, length, self._memory.address + offset)]

    def load(self, components: dict[str, Any]) -> bool:
        """Give the components their state, or let it come to them."""
        tensors = TensorsIn(self._memory, self._layout)
        check(components, tensors, self._skeleton)
        if not self._lazy:
            load(components, tensors, self._skeleton)
            return True
        source = Source(
            store=self._store,
            manifest=self.manifest,
            layout=self._layout,
            skeleton=self._skeleton,
            deadline_s=self._deadline_s,
        )
        self.on_demand = OnDemand(components, tensors, source)
        return True
