"""A fetched segment -> a store. Chunks that the segment lacks come from the stores behind it, through ``copies``.

``checkpoint.restore.prefetched`` puts it before a run's other stores.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from deepvm.errors import NotFound, StoreError, StoreUnavailable
from deepvm.fetch.clock import now_s
from deepvm.fetch.copies import Copies, same_bytes
from deepvm.fetch.segment_reader import SegmentReader, find_segment
from deepvm.store.base import Manifest, Store, Writer
from deepvm.store.chunks import check_length
from deepvm.store.search import find_checkpoints

log = logging.getLogger("deepvm.fetch")


class FetchedStore(Store):
    """``found`` is None on a machine without a segment if other machines of the job have one: all ranks must list
    their stores in the same order."""

    durable = False

    def __init__(self, found: SegmentReader | None, behind: Sequence[Store], run: str) -> None:
        self._segment, self._behind, self._run = found, tuple(behind), run
        self._copies: dict[int, Copies] = {}  # by step
        self._matching: Manifest | None = None  # the last one that describes the bytes in the segment
        self._confirmed: bool | None = None
        self._chunks_fetched: set[int] = set()
        self._chunks_missing: set[int] = set()  # not in the segment: read from the stores behind it

    @property
    def url(self) -> str:
        return "fetched:" if self._segment is None else f"fetched://{self._segment.path}"

    def __str__(self) -> str:
        """Say where the chunks came from."""
        if self._segment is None:
            return "nothing was fetched to this machine"
        about = self._segment.about
        text = f"{len(self._chunks_fetched)} chunks had been fetched from {about.store}"
        if self._chunks_missing:
            text += f"; the fetcher did not bring {len(self._chunks_missing)}, which came from the stores themselves"
        return text + (f"; it passed over {'; '.join(about.passed_over)}" if about.passed_over else "")

    @property
    def used(self) -> bool:
        """True if a chunk was read from the segment."""
        return bool(self._chunks_fetched)

    def fetch_interval_s(self) -> tuple[float, float]:
        """Return when the fetcher started and ended, or now if it still runs, in seconds since boot."""
        assert self._segment is not None  # noqa: S101 - it was used
        head = self._segment.read_head()
        return head.started_s, head.whole_s or now_s()

    # --- the contract -------------------------------------------------------------------------------------------

    def runs(self) -> list[str]:
        return [self._run]

    def steps(self, run: str) -> list[int]:
        """Return the segment's step, if the stores still have the same bytes for it: the run may have been deleted or
        restarted. Without a segment, return the newest step of any store, for rank 0 to propose."""
        if run != self._run:
            return []
        if self._segment is None:
            return [step for step, _ in find_checkpoints(self._behind, run).candidates[:1]]
        return [self._segment.about.manifest.step] if self._is_confirmed(self._segment) else []

    def _is_confirmed(self, segment: SegmentReader) -> bool:
        """True if a store has the segment's checkpoint, or if none answers and it came from one of them."""
        if self._confirmed is not None:
            return self._confirmed
        manifest, answered = segment.about.manifest, False
        for store in self._behind:
            try:
                self._copies_of(manifest).manifest_at(store)
                self._confirmed = True
                return True
            except StoreUnavailable:
                continue
            except StoreError:
                answered = True
        self._confirmed = not answered and self._is_from_behind(segment)
        if not self._confirmed:
            why = "no store has such a checkpoint any more" if answered else f"it comes from {segment.about.store}"
            log.warning("step %d in %s is not used: %s", manifest.step, segment.path, why)
        return self._confirmed

    def manifest(self, run: str, step: int) -> Manifest:
        found = self._segment
        if found is not None and (run, step) == (self._run, found.about.manifest.step) and self._is_confirmed(found):
            return found.about.manifest
        failure: StoreError = NotFound(f"{self.url} has no step {step} of run {run}")
        for store in self._behind:
            try:
                return store.manifest(run, step)
            except StoreError as error:
                failure = error
        raise failure

    def read_chunk(self, manifest: Manifest, chunk: int, into: memoryview) -> None:
        """Copy from the segment as soon as the chunk arrives, or read from the stores behind if it will not. The
        fetcher verified it, and nobody else writes there."""
        offset = check_length(manifest, chunk, into)
        found = self._holding(manifest)
        if found is not None and found.wait_for_chunk(chunk):
            found.read(offset, into)
            self._chunks_fetched.add(chunk)
            return
        self._copies_of(manifest).read(chunk, into)
        self._chunks_missing.add(chunk)

    @property
    def parallel_reads(self) -> int:
        return os.cpu_count() or 1  # the bytes are in memory

    def is_prefetched(self, manifest: Manifest) -> bool:
        return self._holding(manifest) is not None

    def origin(self, manifest: Manifest) -> str:
        found = self._holding(manifest)
        return self._behind[0].url if found is None else found.about.store

    def writer(self, run: str, step: int, *, size_bytes: int, chunk_bytes: int) -> Writer:  # noqa: ARG002
        raise StoreError(f"{self.url} is for reading: step {step} of {run} ({size_bytes} bytes) cannot be saved there")

    def delete(self, run: str, step: int) -> None:
        raise StoreError(f"{self.url} is for reading: step {step} of {run} goes when every rank has restored it")

    def release(self) -> None:
        """Mark the segment as no longer needed by this rank; the last rank of this machine removes it. A segment of
        other stores belongs to another job with the same run name, and is left alone."""
        found = self._segment
        if found is not None and (self._confirmed or self._is_from_behind(found)):
            found.release()

    def close(self) -> None:
        found, self._segment = self._segment, None
        if found is not None:
            found.close()

    # --- the segment and the stores behind it -------------------------------------------------------------------

    def _is_from_behind(self, segment: SegmentReader) -> bool:
        return segment.about.store in [store.url for store in self._behind]

    def _holding(self, manifest: Manifest) -> SegmentReader | None:
        """Return the segment if it holds the bytes of this manifest."""
        if self._segment is not None and manifest is not self._matching:  # comparing thousands of digests takes time
            if not same_bytes(manifest, self._segment.about.manifest):
                return None
            self._matching = manifest
        return self._segment

    def _copies_of(self, manifest: Manifest) -> Copies:
        return self._copies.setdefault(manifest.step, Copies(manifest, self._behind, {}))


def fetched_before(stores: Sequence[Store], run: str) -> FetchedStore | None:
    """Return the store to put before all others, if something is fetched for this run on this machine."""
    try:
        found = find_segment(run)
    except StoreError as error:
        log.warning("the fetched checkpoint is not used: %s", error)
        return None
    return None if found is None else FetchedStore(found, stores, run)
