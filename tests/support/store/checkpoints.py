"""Checkpoints to save in tests: payloads, and the two ways of putting them into any store."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import xxhash

from deepvm.store import Manifest, Store, Writer
from deepvm.store.base import chunk_count, chunk_span

CHUNK = 2**16


def payload(size_bytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


def safetensors_payload() -> bytes:
    """A small model's file, as the format's own library writes it: several chunks, an odd tail."""
    import torch
    from safetensors.torch import save as to_bytes

    generator = torch.Generator().manual_seed(0)
    tensors = {
        "model.weight": torch.randn(300, 257, generator=generator),
        "model.bias": torch.randn(257, generator=generator).to(torch.bfloat16),
        "optimizer.step": torch.tensor(12),
        "empty": torch.zeros(0, 3),
        "mask": torch.ones(7, dtype=torch.bool),
    }
    return to_bytes(tensors, {"what": "a test"})


def spans(data: bytes, chunk_bytes: int = CHUNK) -> list[tuple[int, int]]:
    return [chunk_span(c, len(data), chunk_bytes) for c in range(chunk_count(len(data), chunk_bytes))]


def manifest_of(data: bytes, run: str, step: int, *, chunk_bytes: int = CHUNK, **more: object) -> Manifest:
    digests = [xxhash.xxh3_64_intdigest(data[offset : offset + length]) for offset, length in spans(data, chunk_bytes)]
    return Manifest(
        run=run,
        step=step,
        size_bytes=len(data),
        chunk_bytes=chunk_bytes,
        digests=digests,
        created_s=1.7e9,
        **more,  # type: ignore[arg-type]
    )


def put(writer: Writer, data: bytes, manifest: Manifest, chunks: Sequence[int], *, pieces: int = 1) -> None:
    """Put chunks, each from a buffer that changes as soon as the store says that it may."""
    for chunk in chunks:
        offset, length = manifest.span(chunk)
        buffer = bytearray(data[offset : offset + length])
        cuts = [length * k // pieces for k in range(pieces + 1)]
        views = [memoryview(buffer)[a:b] for a, b in itertools.pairwise(cuts)]
        writer.put(chunk, views, manifest.digests[chunk])
        buffer[:] = b"\xee" * length


def save(
    store: Store,
    data: bytes,
    run: str = "run-a",
    step: int = 1,
    *,
    chunk_bytes: int = CHUNK,
    threads: int = 1,
    shuffle: bool = False,
    pieces: int = 1,
) -> Manifest:
    manifest = manifest_of(data, run, step, chunk_bytes=chunk_bytes)
    order = list(range(len(manifest.digests)))
    if shuffle:
        random.Random(7).shuffle(order)
    writer = store.writer(run, step, size_bytes=len(data), chunk_bytes=chunk_bytes)
    try:
        with ThreadPoolExecutor(threads) as pool:
            shares = [order[k::threads] for k in range(threads)]
            list(pool.map(lambda share: put(writer, data, manifest, share, pieces=pieces), shares))
        writer.publish(manifest)
    except BaseException:
        writer.abort()
        raise
    return store.manifest(run, step)


def read(store: Store, run: str = "run-a", step: int = 1) -> bytes:
    manifest = store.manifest(run, step)
    out = bytearray(manifest.size_bytes)
    view = memoryview(out)
    for chunk in range(len(manifest.digests)):
        offset, length = manifest.span(chunk)
        store.read_chunk(manifest, chunk, view[offset : offset + length])
    return bytes(out)
