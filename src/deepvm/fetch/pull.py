"""Stores -> a segment that holds the newest whole checkpoint, every chunk verified. ``command`` keeps the segment."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from deepvm.errors import StoreError, StoreUnavailable
from deepvm.fetch.copies import Copies
from deepvm.fetch.segment_writer import SegmentFull, SegmentWriter
from deepvm.store.base import Store
from deepvm.store.chunk_reads import for_each_chunk
from deepvm.store.search import find_checkpoints

log = logging.getLogger("deepvm.fetch")

READERS = 4  # at once, from a store without a preference
END_S = 1.0  # a thread may wait for a node that does not answer; it ends with the process


class Unwanted(Exception):
    """Nothing needs the checkpoint any longer: its readers removed it, or this process got a signal to end."""


@dataclass(frozen=True, kw_only=True)
class Pulled:
    step: int
    store: str
    size_bytes: int
    seconds: float
    passed_over: tuple[str, ...]  # newer checkpoints and other copies that could not be used, and why


def pull(
    stores: Sequence[Store], run: str, step: int | None, path: Path, *, stop: threading.Event
) -> tuple[SegmentWriter, Pulled] | None:
    """Fill a segment with the newest checkpoint, or that of ``step``, that one store or several together have whole.

    Returns None if no store has any. Raises if there are some and none can be read.
    """
    writer = SegmentWriter(path)
    try:
        found = find_checkpoints(stores, run, step)
        problems = found.problems
        for candidate, group in groupby(found.candidates, key=lambda one: one[0]):
            began = time.monotonic()
            copies = _find_copies([stores[index] for _, index in group], run, candidate, problems)
            if copies is None:
                continue
            try:
                _fill(writer, copies, tuple(problems), stop)
            except SegmentFull:
                raise
            except StoreError as error:
                problems += copies.problems
                _pass_over(problems, f"step {candidate}: {error}")
                writer.give_up()
                writer = SegmentWriter(path)
                continue
            return writer, Pulled(
                step=candidate,
                store=", ".join(copies.used),
                size_bytes=copies.manifest.size_bytes,
                seconds=time.monotonic() - began,
                passed_over=(*problems, *copies.problems),
            )
        if problems:
            raise StoreUnavailable(f"no checkpoint of run {run} can be fetched: {'; '.join(problems)}")
    except BaseException:
        writer.give_up()
        raise
    writer.give_up()
    return None


def _find_copies(stores: Sequence[Store], run: str, step: int, problems: list[str]) -> Copies | None:
    """Return the copies of a checkpoint, from the nearest store on whose manifest can be read."""
    for index, store in enumerate(stores):
        try:
            manifest = store.manifest(run, step)
            return Copies(manifest, stores[index:], {store.url: manifest})
        except StoreError as error:
            _pass_over(problems, f"step {step} in {store.url}: {error}")
    return None


def _pass_over(problems: list[str], problem: str) -> None:
    problems.append(problem)
    log.warning("%s", problem)


def _fill(writer: SegmentWriter, copies: Copies, passed_over: tuple[str, ...], stop: threading.Event) -> None:
    manifest, nearest = copies.manifest, copies.nearest
    writer.choose(manifest, nearest.url, passed_over)

    def fetch(chunk: int, buffer: memoryview) -> None:
        copies.read(chunk, buffer)
        writer.put(chunk, manifest.span(chunk)[0], buffer)

    def watch() -> None:
        if stop.is_set() or not writer.is_wanted():
            raise Unwanted

    for_each_chunk(manifest, fetch, threads=nearest.parallel_reads or READERS, watch=watch, grace_s=END_S)
    writer.finish()
