"""What deepvm-fetch brought to this machine, before the stores of a restore."""

from __future__ import annotations

import ctypes
import logging
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
    """The stores, after what was fetched from them; it is let go of once a restore has succeeded."""
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
    """Where one rank has something, all put a store in front: they name stores by their place."""
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
            f"step {manifest.step} has {size}, which this machine's memory cannot hold: {error}"
        ) from None


class SegmentMemory(Staging):
    """The memory of a prefetched segment. Tensors that a component keeps stay in it and are not copied."""

    def __init__(self, mapped: MappedBytes) -> None:
        self._exclusive = mapped.exclusive
        super().__init__(mapped.view.nbytes, warm=False, over=mapped.view)

    def release_all_but(self, kept: Iterable[tuple[int, int]]) -> None:
        """In the background, little by little: the first step needs the cores, and can spare the memory."""
        if self._exclusive:  # those of a file go when they are cut out of it, and not when one mapping forgets them
            name, work = "deepvm-release", super().release_all_but
            threading.Thread(target=work, args=(list(kept),), name=name, daemon=True).start()

    def _release(self, start: int, length: int) -> None:
        for at in range(start, start + length, _PIECE_BYTES):
            piece = min(_PIECE_BYTES, start + length - at)
            began_s = time.monotonic()
            _libc.madvise(ctypes.c_void_p(self.address + at), ctypes.c_size_t(piece), _MADV_REMOVE)
            time.sleep(_REST * (time.monotonic() - began_s))


_libc = ctypes.CDLL(None)
_MADV_REMOVE = 9
_PIECE_BYTES = 2 * 2**20
_REST = 20  # times as long as a piece took
