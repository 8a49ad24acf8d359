"""A fetched segment as a store: what it has not, or not any more, comes from the stores behind it."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from deepvm.errors import Corrupt, NotFound, StoreError, StoreUnavailable
from deepvm.fetch.pull import same_bytes
from deepvm.fetch.segment_reader import Segment, Times, find_segment
from deepvm.store.base import Manifest, MappedBytes, Store, Writer
from deepvm.store.chunks import check_length, verify_chunk

log = logging.getLogger("deepvm.fetch")


class FetchedStore(Store):
    """Stands before a run's other stores. ``found`` may be None, on a machine without a segment whose fellow ranks on
    other machines have one: all ranks have to name the stores in the same order."""

    durable = False

    def __init__(self, found: Segment | None, behind: Sequence[Store], run: str) -> None:
        self._segment, self._behind, self._run = found, tuple(behind), run
        self._copies: dict[tuple[int, str], Manifest] = {}  # what stores have under a step, where it is the same bytes
        self._same: Manifest | None = None  # the last that was found to be of the bytes in the segment
        self._confirmed: bool | None = None
        self._taken: set[int] = set()  # chunks that came from the segment
        self._missed: set[int] = set()  # those that were not in it, and came from the stores behind

    @property
    def url(self) -> str:
        return "fetched:" if self._segment is None else f"fetched://{self._segment.path}"

    def __str__(self) -> str:
        """What was taken from where."""
        if self._segment is None:
            return "nothing was fetched to this machine"
        said = f"{len(self._taken)} chunks had been fetched from {self._segment.about.store}"
        if self._missed:
            said += f"; the fetcher did not bring {len(self._missed)}, which came from the stores themselves"
        passed_over = self._segment.about.passed_over
        return said + (f"; it passed over {'; '.join(passed_over)}" if passed_over else "")

    @property
    def used(self) -> bool:
        """Whether anything was taken from the segment."""
        return bool(self._taken)

    @property
    def times(self) -> Times | None:
        """Those of the process that fetched."""
        return None if self._segment is None else self._segment.times

    # --- the contract -------------------------------------------------------------------------------------------

    def runs(self) -> list[str]:
        return [self._run]

    def steps(self, run: str) -> list[int]:
        """The one step that is here, if it still is what the stores have under its number: a run may have been deleted
        or begun anew since it was fetched. Where nothing is here, the newest that is anywhere: for a rank that speaks
        for others."""
        if run != self._run:
            return []
        if self._segment is None:
            return sorted({step for store in self._behind for step in _steps(store, run)})[-1:]
        return [self._segment.about.manifest.step] if self._is_confirmed(self._segment) else []

    def _is_confirmed(self, found: Segment) -> bool:
        if self._confirmed is None:
            self._confirmed = self._confirm(found)
        return self._confirmed

    def _confirm(self, found: Segment) -> bool:
        manifest, answered = found.about.manifest, False
        for store in self._behind:
            try:
                self._copy_at(store, manifest)
                return True
            except StoreUnavailable:
                continue
            except StoreError:
                answered = True
        if not answered and found.about.store in self._urls_behind():
            return True  # no store answers: what came from one of them is all there is
        why = "no store has such a checkpoint any more" if answered else f"it comes from {found.about.store}"
        log.warning("step %d in %s is not used: %s", manifest.step, found.path, why)
        return False

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
        """From the segment, as soon as it is there; from the stores behind it, if nobody brings it. The fetcher has
        verified it; it is verified again where a trainer may have written to it since."""
        offset = check_length(manifest, chunk, into)
        found = self._holds(manifest)
        if found is not None and found.await_chunk(chunk):
            if not found.is_in_place(offset, into):
                found.read(offset, into)
            try:
                if found.taken:
                    verify_chunk(manifest, chunk, into, self.url)
                self._taken.add(chunk)
                return
            except Corrupt as error:
                log.warning("%s", error)
        self._read_behind(manifest, chunk, into)

    @property
    def parallel_reads(self) -> int:
        return os.cpu_count() or 1  # the bytes are in memory

    def is_prefetched(self, manifest: Manifest) -> bool:
        return self._holds(manifest) is not None

    def origin(self, manifest: Manifest) -> str:
        found = self._holds(manifest)
        return self._behind[0].url if found is None else found.about.store

    def map(self, manifest: Manifest) -> MappedBytes | None:
        """Return the segment's memory, to be used in place: ``read_chunk`` into a part of it copies nothing."""
        found = self._holds(manifest)
        return None if found is None else MappedBytes(view=found.mapped(), complete=False, exclusive=found.alone)

    def writer(self, run: str, step: int, *, size_bytes: int, chunk_bytes: int) -> Writer:  # noqa: ARG002
        raise StoreError(f"{self.url} is for reading: step {step} of {run} ({size_bytes} bytes) cannot be saved there")

    def delete(self, run: str, step: int) -> None:
        raise StoreError(f"{self.url} is for reading: step {step} of {run} goes when every rank has restored it")

    def done(self) -> None:
        """This rank has what it wanted; the last of this machine removes the segment. One that comes from other stores
        is of another job that gave its run the same name, and is left alone."""
        found = self._segment
        if found is not None and (self._confirmed or found.about.store in self._urls_behind()):
            found.done()

    def close(self) -> None:
        found, self._segment = self._segment, None
        if found is not None:
            found.close()

    # --- behind it ----------------------------------------------------------------------------------------------

    def _urls_behind(self) -> list[str]:
        return [store.url for store in self._behind]

    def _holds(self, manifest: Manifest) -> Segment | None:
        found = self._segment
        if found is None or manifest is self._same:
            return found
        if not same_bytes(manifest, found.about.manifest):
            return None
        self._same = manifest
        return found

    def _read_behind(self, manifest: Manifest, chunk: int, into: memoryview) -> None:
        failure: StoreError = StoreUnavailable("no store is behind it")
        for store in self._behind:
            try:
                store.read_chunk(self._copy_at(store, manifest), chunk, into)
                self._missed.add(chunk)
                return
            except StoreError as error:
                failure = error
        raise failure

    def _copy_at(self, store: Store, manifest: Manifest) -> Manifest:
        """The same checkpoint as that store describes it, which says where its copies lie."""
        found = self._copies.get((manifest.step, store.url))
        if found is None:
            found = store.manifest(manifest.run, manifest.step)
            if not same_bytes(found, manifest):
                raise NotFound(f"{store.url} has other bytes under step {manifest.step}")
            self._copies[manifest.step, store.url] = found
        return found


def _steps(store: Store, run: str) -> list[int]:
    try:
        return store.steps(run)
    except StoreError as error:
        log.warning("cannot look for checkpoints in %s: %s", store.url, error)
        return []


def fetched_before(stores: Sequence[Store], run: str) -> FetchedStore | None:
    """The store to put before all others, if something is fetched for this run on this machine."""
    try:
        found = find_segment(run)
    except StoreError as error:
        log.warning("what was fetched is not used: %s", error)
        return None
    return None if found is None else FetchedStore(found, stores, run)
