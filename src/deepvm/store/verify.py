"""Verify every byte of a checkpoint, copy it to another store, or export it as a file. The command line calls it."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deepvm.errors import Corrupt, NotFound
from deepvm.store.base import Manifest, Store
from deepvm.store.chunk_reads import for_each_chunk
from deepvm.store.files.staged_file import StagedFile
from deepvm.store.files.store import explained
from deepvm.store.safetensors import read_header
from deepvm.store.state_check import check_skeletons

THREADS = 4  # each holds one chunk in memory

Progress = Callable[[int], None]  # called with the number of bytes that were done since its last call


def _no_progress(_done_bytes: int) -> None:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class BadChunk:
    chunk: int
    offset: int
    problem: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    run: str
    step: int
    size_bytes: int
    chunks: int
    chunks_bad: tuple[BadChunk, ...]
    header_problem: str | None  # why the bytes are not a safetensors file, or not a state
    seconds: float

    @property
    def good(self) -> bool:
        return not self.chunks_bad and self.header_problem is None


def verify(
    store: Store, run: str, step: int, *, threads: int = THREADS, progress: Progress = _no_progress
) -> Verification:
    """Read every chunk and compare its digest, and check that the whole is a safetensors file whose state has
    a valid form."""
    began = time.perf_counter()
    manifest = store.manifest(run, step)
    bad: list[BadChunk] = []

    def check(chunk: int, buffer: memoryview) -> None:
        try:
            store.read_chunk(manifest, chunk, buffer)
        except (Corrupt, NotFound) as error:
            bad.append(BadChunk(chunk=chunk, offset=manifest.span(chunk)[0], problem=str(error)))
        progress(len(buffer))

    for_each_chunk(manifest, check, threads=threads)
    try:
        check_skeletons(read_header(store, manifest).metadata)
        header_problem = None
    except (Corrupt, NotFound) as error:
        header_problem = str(error)
    return Verification(
        run=run,
        step=step,
        size_bytes=manifest.size_bytes,
        chunks=len(manifest.digests),
        chunks_bad=tuple(sorted(bad, key=lambda b: b.chunk)),
        header_problem=header_problem,
        seconds=time.perf_counter() - began,
    )


def copy(
    source: Store, target: Store, run: str, step: int, *, threads: int = THREADS, progress: Progress = _no_progress
) -> Manifest:
    """Copy a checkpoint, every chunk verified on the way, and publish it last. A failure leaves nothing behind."""
    manifest = source.manifest(run, step)
    writer = target.writer(run, step, size_bytes=manifest.size_bytes, chunk_bytes=manifest.chunk_bytes)

    def move(chunk: int, buffer: memoryview) -> None:
        source.read_chunk(manifest, chunk, buffer)
        writer.put(chunk, [buffer], manifest.digests[chunk])
        progress(len(buffer))

    try:
        for_each_chunk(manifest, move, threads=threads)
        published = dataclasses.replace(manifest, nodes=(), replicas=1)  # those are the source's
        writer.publish(published)
    except BaseException:
        writer.abort()
        raise
    return published


def export(
    store: Store,
    run: str,
    step: int,
    path: str | os.PathLike[str],
    *,
    threads: int = THREADS,
    progress: Progress = _no_progress,
) -> Manifest:
    """Write a checkpoint as one safetensors file, every chunk verified. The file appears whole, or not at all."""
    manifest = store.manifest(run, step)
    target = Path(path).expanduser().absolute()
    with explained(target.parent, manifest.size_bytes), StagedFile(target.parent, target.name) as staged:

        def write(chunk: int, buffer: memoryview) -> None:
            store.read_chunk(manifest, chunk, buffer)
            staged.write([buffer], manifest.span(chunk)[0])
            progress(len(buffer))

        staged.resize(manifest.size_bytes)
        for_each_chunk(manifest, write, threads=threads)
        os.fsync(staged.fd)
        staged.rename(target)
    return manifest
