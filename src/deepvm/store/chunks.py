"""What every store does alike: name a checkpoint's two files, count what was put, verify what was read."""

from __future__ import annotations

import re
import threading

import xxhash

from deepvm.errors import Corrupt, StoreError
from deepvm.store.base import MOST_STEP, Manifest, check_run, chunk_count, chunk_span

_STEM = re.compile(r"step-([0-9]{12,19})\Z")
DATA, MANIFEST = ".safetensors", ".json"


def stem(step: int) -> str:
    """Names that sort like the steps they stand for."""
    return f"step-{step:012d}"


def step_of(name: str, suffix: str) -> int | None:
    if not name.endswith(suffix):
        return None
    match = _STEM.match(name[: -len(suffix)])
    step = int(match[1]) if match else -1
    return step if 0 <= step <= MOST_STEP and name == stem(step) + suffix else None


def whole_steps(names: set[str]) -> list[int]:
    """The steps with both files: a manifest is written last, but its bytes may have been lost since."""
    found = (step_of(name, MANIFEST) for name in names)
    return sorted(step for step in found if step is not None and stem(step) + DATA in names)


def read_manifest(data: bytes, run: str, step: int, place: str) -> Manifest:
    try:
        manifest = Manifest.from_bytes(data)
    except Corrupt as error:
        raise Corrupt(f"{place}: {error}; use another step, or delete this one") from None
    if (manifest.run, manifest.step) != (run, step):
        raise Corrupt(f"{place} speaks of {manifest.run} step {manifest.step}, not of {run} step {step}")
    return manifest


def verify_chunk(manifest: Manifest, chunk: int, data: memoryview, place: str) -> None:
    if xxhash.xxh3_64_intdigest(data) != manifest.digests[chunk]:
        raise Corrupt(f"chunk {chunk} of {place} is not what was saved (its xxh3 differs): use a copy or another step")


def check_length(manifest: Manifest, chunk: int, into: memoryview) -> int:
    """The chunk's offset, once it is sure that ``into`` is as long as the chunk."""
    offset, length = manifest.span(chunk)
    if into.nbytes != length:
        raise ValueError(f"chunk {chunk} has {length} bytes, the buffer {into.nbytes}")
    return offset


class UploadCheck:
    """The chunks that a writer has taken, checked against the manifest that is to be published."""

    def __init__(self, run: str, step: int, size_bytes: int, chunk_bytes: int) -> None:
        check_run(run)
        if step < 0 or size_bytes <= 0 or chunk_bytes <= 0:
            raise StoreError(f"no checkpoint has step {step}, {size_bytes} bytes in chunks of {chunk_bytes}")
        self.run, self.step, self.size_bytes, self.chunk_bytes = run, step, size_bytes, chunk_bytes
        self.chunks = chunk_count(size_bytes, chunk_bytes)
        self._digests: dict[int, int] = {}
        self._lock = threading.Lock()

    def span(self, chunk: int, length: int) -> int:
        """The offset of a chunk, once it is sure that it belongs here and is of the right length."""
        if not 0 <= chunk < self.chunks:
            raise StoreError(f"chunk {chunk} of a checkpoint that has {self.chunks}")
        offset, wanted = chunk_span(chunk, self.size_bytes, self.chunk_bytes)
        if length != wanted:
            raise StoreError(f"chunk {chunk} was given with {length} bytes, it has {wanted}")
        return offset

    def took(self, chunk: int, digest: int) -> None:
        with self._lock:
            self._digests[chunk] = digest

    def check(self, manifest: Manifest) -> None:
        """That a manifest speaks of exactly what was put."""
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
