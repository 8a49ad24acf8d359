"""Memory beside the blocks: documents on their way in, and those that are kept."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from deepvm.memnode.errors import PeerGone, RequestRefused
from deepvm.memnode.settings import Limits, Settings
from deepvm.memnode.storage.budgets import FREE_BYTES, Budget, KeptDocuments, Room, cost_of
from deepvm.protocol.frames import MOST_DOCUMENT_BYTES
from tests.support.memnode.client import BLOCK, content, manifest_of


def test_a_budget_gives_what_it_has_and_then_waits_no_longer_than_it_is_told() -> None:
    budget = Budget(100)
    budget.take(60, 0.0)
    budget.take(40, 0.0)
    with pytest.raises(PeerGone, match="too many documents arrive at once"):
        budget.take(1, 0.01)
    threading.Timer(0.02, budget.give_back, (40,)).start()
    budget.take(40, 20.0)
    with pytest.raises(PeerGone):
        budget.take(1, 0.0)


def test_a_room_takes_only_what_arrives_beyond_what_is_free_and_gives_it_back() -> None:
    budget = Budget(10)
    later = time.monotonic() + 20
    with Room(budget) as room:
        room.grow(FREE_BYTES - 1, later)
        room.grow(1, later)
        budget.take(10, 0.0)
        budget.give_back(10)
        room.grow(6, later)
        room.grow(4, later)
        with pytest.raises(PeerGone):
            budget.take(1, 0.0)
        with pytest.raises(PeerGone):
            room.grow(1, time.monotonic())
    budget.take(10, 0.0)
    with Room(budget) as room:
        room.grow(1, later)


def test_kept_documents_are_counted_and_refused_above_the_limit() -> None:
    kept = KeptDocuments(100)
    kept.add(60, "it")
    kept.add(40, "it")
    with pytest.raises(RequestRefused, match="it takes 1 B; documents take 100 B of 100 B already"):
        kept.add(1, "it")
    assert kept.used_bytes == 100
    kept.add(5, "it", force=True)
    kept.drop(105)
    assert kept.used_bytes == 0


def test_a_checkpoint_costs_its_document_its_nodes_and_its_chunks() -> None:
    plain = manifest_of(content(1, 3 * BLOCK), "run", 1)
    shared = manifest_of(content(1, 3 * BLOCK), "run", 1, nodes=("a:1", "b:1"))
    assert cost_of(plain, bytes(1000)) == 1000 + 3 * 200 + 4096
    assert cost_of(shared, bytes(1000)) - cost_of(plain, bytes(1000)) == 2 * sys.getsizeof("a:1")


def test_documents_have_room_beside_the_capacity() -> None:
    small = Settings(capacity_bytes=BLOCK, block_bytes=BLOCK)
    assert (small.incoming_documents_bytes, small.kept_documents_bytes) == (MOST_DOCUMENT_BYTES, 40 * 2**20)
    large = Settings(capacity_bytes=2**30, block_bytes=BLOCK, limits=Limits(documents_bytes=2**20))
    assert (large.incoming_documents_bytes, large.kept_documents_bytes) == (2**20, 2**28)
    assert Settings(capacity_bytes=2**27, block_bytes=BLOCK).incoming_documents_bytes == 2**27
    assert (small.buffers, small.kept_in_spill) == (2, 2)
    assert Settings(capacity_bytes=BLOCK, block_bytes=BLOCK, spill_keep=5).kept_in_spill == 5
