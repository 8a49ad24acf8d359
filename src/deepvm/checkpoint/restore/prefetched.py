"""A restore's stores -> the same behind what ``deepvm-fetch`` fetched; one store -> memory and a source of chunks."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from deepvm.checkpoint import ranks
from deepvm.checkpoint.buffers.staging import Staging
from deepvm.checkpoint.restore.chunk_reader import ChunkSource, MappedSource, StoreSource
from deepvm.checkpoint.timeline import Start
from deepvm.errors import StoreUnavailable
from deepvm.fetch.fetched_store import FetchedStore, fetched_before
from deepvm.store.base import Manifest, Store
from deepvm.units import format_bytes

log = logging.getLogger("deepvm.checkpoint")


@contextmanager
def fetched_first(stores: Sequence[Store], run: str, start: Start) -> Iterator[Sequence[Store]]:
    """Put the fetched store, if there is one, before the others. It is released once a restore has succeeded."""
    found = _find(stores, run)
    if found is None:
        yield stores
        return
    try:
        yield (found, *stores)
        if found.used:
            start.fetched(*found.fetch_interval_s())
            log.info("%s", found)
        found.release()
    finally:
        found.close()


def _find(stores: Sequence[Store], run: str) -> FetchedStore | None:
    """Return a fetched store on every rank if one rank has any: ranks refer to stores by their index."""
    found = fetched_before(stores, run)
    _, world_size = ranks.rank_and_world_size()
    if world_size > 1 and ranks.any_of("restore()", found is not None, deadline_s=ranks.START_S) and found is None:
        return FetchedStore(None, stores, run)
    return found


def open_source(store: Store, manifest: Manifest) -> tuple[Staging, ChunkSource]:
    """Return the memory for a checkpoint and the source of its chunks. Bytes that the store can map stay in place."""
    mapped = store.map(manifest)
    if mapped is None:
        return _new_memory(manifest), StoreSource(store)
    memory = Staging(manifest.size_bytes, warm=False, over=mapped.view)
    return memory, MappedSource(store, memory)


def _new_memory(manifest: Manifest) -> Staging:
    try:
        return Staging(manifest.size_bytes, warm=False, inherited=True)  # tensors that stay in it are the trainer's
    except (OSError, MemoryError, OverflowError, ValueError) as error:
        size = format_bytes(manifest.size_bytes)
        raise StoreUnavailable(
            f"step {manifest.step} needs {size} of memory, which this machine does not have: {error}"
        ) from None
