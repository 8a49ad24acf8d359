"""A restore's stores -> the same behind what ``deepvm-fetch`` fetched; one store -> memory and a source of chunks."""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from deepvm.checkpoint import ranks
from deepvm.checkpoint.buffers.staging import Staging
from deepvm.checkpoint.restore.chunk_reader import ChunkSource, MappedSource, StoreSource
from deepvm.checkpoint.timeline import Start
from deepvm.errors import StoreUnavailable
from deepvm.fetch.fetched_store import FetchedStore, fetched_before
from deepvm.store.base import Manifest, MappedBytes, Store
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
    if not mapped.complete:
        return SegmentMemory(mapped), StoreSource(store)
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


class SegmentMemory(Staging):
    """The memory of a fetched segment. Tensors that a component keeps stay in it and are not copied."""

    def __init__(self, mapped: MappedBytes) -> None:
        self._exclusive = mapped.exclusive
        super().__init__(mapped.view.nbytes, warm=False, over=mapped.view)

    def release_all_but(self, kept: Iterable[tuple[int, int]]) -> None:
        """Free pages in the background, little by little: the first step needs the cores more than the memory."""
        if self._exclusive:  # a file's pages are freed in the file, not in one mapping of it
            name, work = "deepvm-release", super().release_all_but
            threading.Thread(target=work, args=(list(kept),), name=name, daemon=True).start()

    def _release(self, start: int, length: int) -> None:
        for at in range(start, start + length, _PIECE_BYTES):
            piece = min(_PIECE_BYTES, start + length - at)
            began_s = time.monotonic()
            _libc.madvise(ctypes.c_void_p(self.address + at), ctypes.c_size_t(piece), mmap.MADV_REMOVE)
            time.sleep(_REST * (time.monotonic() - began_s))


_libc = ctypes.CDLL(None)
_PIECE_BYTES = 2 * 2**20
_REST = 20  # sleep 20 times as long as a piece took
