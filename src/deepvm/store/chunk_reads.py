"""Work on the chunks of a checkpoint, on several threads.

Input: a manifest and what to do with each chunk. Output: nothing, or the first failure. ``verify``, ``fetch.pull`` and
``checkpoint.dcp`` read through it; a restore, which orders chunks by need, has ``checkpoint.restore.chunk_reader``.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Sequence

from deepvm.store.base import Manifest

WATCH_S = 0.05  # how often the calling thread wakes up, to handle signals and to call ``watch``
GRACE_S = 60.0  # for reads under way when the caller is interrupted; their own deadlines are shorter


def chunk_buffer(manifest: Manifest) -> memoryview:
    """Return memory for one chunk. It takes no pages before it is written to."""
    size_bytes = min(manifest.chunk_bytes, manifest.size_bytes)
    return memoryview(mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def for_each_chunk(
    manifest: Manifest,
    work: Callable[[int, memoryview], None],
    *,
    threads: int,
    chunks: Sequence[int] | None = None,
    watch: Callable[[], None] = lambda: None,
    grace_s: float = GRACE_S,
) -> None:
    """Call ``work`` with each chunk and a buffer of its length, about in order. The first failure stops all threads.

    ``watch`` runs in the calling thread every WATCH_S; what it raises stops them too. Threads that are still busy after
    ``grace_s`` are left behind: they work on no other chunk.
    """
    wanted = range(len(manifest.digests)) if chunks is None else chunks
    waiting, lock, stopped = iter(wanted), threading.Lock(), threading.Event()
    failures: list[BaseException] = []

    def loop() -> None:
        buffer = chunk_buffer(manifest)
        while not stopped.is_set():
            with lock:
                chunk = next(waiting, None)
            if chunk is None:
                return
            try:
                work(chunk, buffer[: manifest.span(chunk)[1]])
            except BaseException as error:
                failures.append(error)
                stopped.set()

    count = min(threads, len(wanted))
    running = [threading.Thread(target=loop, name=f"deepvm-chunks-{i}", daemon=True) for i in range(count)]
    try:
        for thread in running:
            thread.start()
        for thread in running:
            while thread.is_alive():
                thread.join(WATCH_S)
                watch()
    except BaseException:
        stopped.set()
        for thread in running:
            if thread.ident is not None:
                thread.join(grace_s)
        raise
    if failures:
        raise failures[0]
