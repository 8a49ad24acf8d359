"""Checks that all stores share: of manifests and chunks that are read, and of chunks that are written."""

from __future__ import annotations

import threading

import xxhash

from deepvm.errors import Corrupt, StoreError
from deepvm.store.base import Manifest, check_run, chunk_count, chunk_span


def read_manifest(data: bytes, run: str, step: int, place: str) -> Manifest:
    try:
        manifest = Manifest.from_bytes(data)
    except Corrupt as error:
        raise Corrupt(f"{place}: {error}; use another step, or delete this one") from None
    if (manifest.run, manifest.step) != (run, step):
        raise Corrupt(f"{place} is the manifest of {manifest.run} step {manifest.step}, not of {run} step {step}")
    return manifest


def verify_chunk(manifest: Manifest, chunk: int, data: memoryview, place: str) -> None:
    if xxhash.xxh3_64_intdigest(data) != manifest.digests[chunk]:
        raise Corrupt(f"chunk {chunk} of {place} is not what was saved (its xxh3 differs): use a copy or another step")


def truncated(place: object, found_bytes: int, manifest: Manifest) -> Corrupt:
    return Corrupt(f"{place} ends at {found_bytes} of {manifest.size_bytes} bytes: use another step")


def as_bytes(view: memoryview) -> memoryview:
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def check_length(manifest: Manifest, chunk: int, into: memoryview) -> int:
    """Check that ``into`` is as long as the chunk; return the chunk's offset."""
    offset, length = manifest.span(chunk)
    if into.nbytes != length:
        raise ValueError(f"chunk {chunk} has {length} bytes, the buffer {into.nbytes}")
    return offset


class UploadCheck:
    """The chunks that a writer has put, compared with the manifest that it publishes."""

    def __init__(self, run: str, step: int, size_bytes: int, chunk_bytes: int) -> None:
        check_run(run)
        if step < 0 or size_bytes <= 0 or chunk_bytes <= 0:
            raise StoreError(f"no checkpoint has step {step}, {size_bytes} bytes in chunks of {chunk_bytes}")
        self.run, self.step, self.size_bytes, self.chunk_bytes = run, step, size_bytes, chunk_bytes
        self.chunks = chunk_count(size_bytes, chunk_bytes)
        self._digests: dict[int, int] = {}
        self._lock = threading.Lock()

    def span(self, chunk: int, length: int) -> int:
        """Check that a chunk exists and has this length; return its offset."""
        if not 0 <= chunk < self.chunks:
            raise StoreError(f"chunk {chunk} is out of range: the checkpoint has {self.chunks} chunks")
        offset, wanted = chunk_span(chunk, self.size_bytes, self.chunk_bytes)
        if length != wanted:
            raise StoreError(f"chunk {chunk} was put with {length} bytes instead of {wanted}")
        return offset

    def put(self, chunk: int, digest: int) -> None:
        with self._lock:
            self._digests[chunk] = digest

    def check(self, manifest: Manifest) -> None:
        """Check that a manifest describes exactly what was put."""
        mine = (self.run, self.step, self.size_bytes, self.chunk_bytes)
        theirs = (manifest.run, manifest.step, manifest.size_bytes, manifest.chunk_bytes)
        if mine != theirs:
            raise StoreError(f"a manifest of {theirs} cannot be published by the writer of {mine}")
        with self._lock:
            missing = [chunk for chunk in range(self.chunks) if chunk not in self._digests]
            wrong = [chunk for chunk, digest in self._digests.items() if manifest.digests[chunk] != digest]
        if missing:
            raise StoreError(f"{len(missing)} of {self.chunks} chunks were never put, the first is {missing[0]}")
        if wrong:
            raise StoreError(f"the manifest's digest of chunk {wrong[0]} is not that of the bytes that were put")
