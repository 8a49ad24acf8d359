"""One checkpoint in several stores -> its chunks, each from the nearest store that has it.

``pull`` fills a segment through it; ``fetched_store`` reads through it what the segment lacks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from deepvm.errors import NotFound, StoreError, StoreUnavailable
from deepvm.store.base import Manifest, Store

log = logging.getLogger("deepvm.fetch")


def same_bytes(left: Manifest, right: Manifest) -> bool:
    """True if two manifests describe the same bytes, wherever these are."""
    shape = (left.run, left.step, left.size_bytes, left.chunk_bytes)
    other = (right.run, right.step, right.size_bytes, right.chunk_bytes)
    return shape == other and list(left.digests) == list(right.digests)


class Copies:
    """Threads may share it. ``known`` are manifests of stores that were asked before, by URL."""

    def __init__(self, manifest: Manifest, stores: Sequence[Store], known: Mapping[str, Manifest]) -> None:
        self.manifest, self.nearest = manifest, stores[0]
        self.problems: list[str] = []
        self.used: dict[str, None] = {}  # URLs of stores that chunks came from
        self._stores, self._manifests = list(stores), dict(known)

    def manifest_at(self, store: Store) -> Manifest:
        """Return the manifest of a store's copy, which says where its chunks are."""
        found = self._manifests.get(store.url)
        if found is None:
            found = store.manifest(self.manifest.run, self.manifest.step)
            if not same_bytes(found, self.manifest):
                raise NotFound(f"{store.url} has other bytes for step {self.manifest.step}")
            self._manifests[store.url] = found
        return found

    def read(self, chunk: int, into: memoryview) -> None:
        """Read a chunk, verified. A store that does not answer is asked last from then on."""
        failure: StoreError = StoreUnavailable("no store is left to read from")
        for store in self._stores:
            try:
                store.read_chunk(self.manifest_at(store), chunk, into)
            except StoreError as error:
                failure = error
                if len(self._stores) > 1:
                    self.problems.append(f"chunk {chunk} in {store.url}: {error}")
                    log.warning("%s", self.problems[-1])
                    if isinstance(error, StoreUnavailable):  # a new list: other threads iterate over this one
                        self._stores = [*(other for other in self._stores if other is not store), store]
            else:
                self.used[store.url] = None
                return
        raise failure
