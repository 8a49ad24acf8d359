"""What deepvm-fetch brought to this machine, before the stores of a restore."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from deepvm.checkpoint import ranks
from deepvm.checkpoint.timeline import Start
from deepvm.fetch.clock import now_s
from deepvm.fetch.fetched import FetchedStore, fetched_before
from deepvm.store.base import Store

log = logging.getLogger("deepvm.checkpoint")


@contextmanager
def fetched_first(stores: Sequence[Store], run: str, start: Start) -> Iterator[Sequence[Store]]:
    """The stores, after what was fetched from them; it is let go of once a restore has succeeded."""
    found = _find(stores, run)
    if found is None:
        yield stores
        return
    try:
        yield (found, *stores)
        if found.times is not None:
            start.fetched(found.times.started_s, found.times.whole_s or now_s())
            log.info("%s", found)
        found.done()
    finally:
        found.close()


def _find(stores: Sequence[Store], run: str) -> FetchedStore | None:
    """Where one rank has something, all put a store in front: they name stores by their place."""
    found = fetched_before(stores, run)
    _, world_size = ranks.rank_and_world_size()
    if world_size > 1 and ranks.any_of(found is not None) and found is None:
        return FetchedStore(None, stores, run)
    return found
