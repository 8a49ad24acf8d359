"""From stores into a segment: the newest whole checkpoint, in parallel, every chunk verified."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepvm.errors import StoreError, StoreUnavailable
from deepvm.fetch.segment_writer import SegmentFull, SegmentWriter
from deepvm.store.base import Manifest, Store
from deepvm.store.chunk_reads import for_each_chunk

log = logging.getLogger("deepvm.fetch")

READERS = 4  # at once, from a store without a preference
END_S = 1.0  # a thread may wait for a node that does not answer; it ends with the process


class Unwanted(Exception):
    """Nobody wants the checkpoint any more: it was removed by its readers, or this process is told to end."""


@dataclass(frozen=True, kw_only=True)
class Pulled:
    step: int
    store: str
    size_bytes: int
    seconds: float
    passed_over: tuple[str, ...]  # newer checkpoints and other copies that could not be used, and why


@dataclass(frozen=True, kw_only=True)
class _Copy:
    store: Store
    manifest: Manifest


def pull(
    stores: Sequence[Store], run: str, step: int | None, path: Path, *, stop: threading.Event
) -> tuple[SegmentWriter, Pulled] | None:
    """Fill a segment with the newest checkpoint (or that of ``step``) that is whole in one store or in several
    together, nearest first; None where there is none. Raises where there are some, and none can be used."""
    filling = SegmentWriter(path)
    problems: list[str] = []
    try:
        for candidate, having in _candidates(stores, run, step, problems):
            began = time.monotonic()
            copies = list(_copies(having, run, candidate, problems))
            if not copies:
                continue
            nearest = copies[0]
            filling.choose(nearest.manifest, nearest.store.url, tuple(problems))
            try:
                used = _fill(filling, copies, problems, stop)
            except SegmentFull:
                raise
            except StoreError as error:
                _pass_over(problems, f"step {candidate}: {error}")
                filling.give_up()
                filling = SegmentWriter(path)
                continue
            filling.finish()
            return filling, Pulled(
                step=candidate,
                store=used,
                size_bytes=nearest.manifest.size_bytes,
                seconds=time.monotonic() - began,
                passed_over=tuple(problems),
            )
    except BaseException:
        filling.give_up()
        raise
    filling.give_up()
    if problems:
        raise StoreUnavailable(f"no checkpoint of run {run} can be fetched: {'; '.join(problems)}")
    return None


def _candidates(
    stores: Sequence[Store], run: str, step: int | None, problems: list[str]
) -> Iterator[tuple[int, list[Store]]]:
    """Steps, newest first, and the stores that have them, nearest first."""
    having: dict[int, list[Store]] = {}
    for store in stores:
        try:
            for found in store.steps(run):
                having.setdefault(found, []).append(store)
        except StoreError as error:
            _pass_over(problems, f"{store.url}: {error}")
    for found in sorted(having, reverse=True):
        if step in (None, found):
            yield found, having[found]


def _copies(stores: Sequence[Store], run: str, step: int, problems: list[str]) -> Iterator[_Copy]:
    """The nearest copy of a checkpoint, and those in other stores that are the same bytes."""
    first: Manifest | None = None
    for store in stores:
        try:
            manifest = store.manifest(run, step)
        except StoreError as error:
            _pass_over(problems, f"step {step} in {store.url}: {error}")
            continue
        first = first or manifest
        if same_bytes(first, manifest):
            yield _Copy(store=store, manifest=manifest)


def same_bytes(left: Manifest, right: Manifest) -> bool:
    """Whether two manifests speak of the same bytes, wherever they lie."""
    shape = (left.run, left.step, left.size_bytes, left.chunk_bytes)
    return shape == (right.run, right.step, right.size_bytes, right.chunk_bytes) and list(left.digests) == list(
        right.digests
    )


def _pass_over(problems: list[str], problem: str) -> None:
    problems.append(problem)
    log.warning("%s", problem)


def _fill(filling: SegmentWriter, copies: Sequence[_Copy], problems: list[str], stop: threading.Event) -> str:
    """Fill a segment with all chunks; returns the stores that they came from. Fails if no copy has some chunk."""
    manifest, reader = copies[0].manifest, _Reader(copies, problems)

    def fetch(chunk: int, buffer: memoryview) -> None:
        reader.read(chunk, buffer)
        filling.put(chunk, manifest.span(chunk)[0], buffer)

    def watch() -> None:
        if stop.is_set() or not filling.wanted:
            raise Unwanted

    for_each_chunk(manifest, fetch, threads=copies[0].store.parallel_reads or READERS, watch=watch, grace_s=END_S)
    return reader.used()


class _Reader:
    """Chunks from the nearest copy that has them. A store that does not answer is asked last from then on."""

    def __init__(self, copies: Sequence[_Copy], problems: list[str]) -> None:
        self._order = list(copies)
        self._problems = problems
        self._used: dict[str, None] = {}

    def read(self, chunk: int, into: memoryview) -> None:
        failure: StoreError | None = None
        for copy in list(self._order):
            try:
                copy.store.read_chunk(copy.manifest, chunk, into)
            except StoreError as error:
                failure = error
                if len(self._order) > 1:
                    _pass_over(self._problems, f"chunk {chunk} in {copy.store.url}: {error}")
                    if isinstance(error, StoreUnavailable):
                        self._order.sort(key=lambda other, last=copy: other is last)  # type: ignore[misc]
                continue
            self._used[copy.store.url] = None
            return
        raise failure or StoreUnavailable("no store is left")

    def used(self) -> str:
        return ", ".join(self._used)
