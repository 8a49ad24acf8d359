"""Ranks' own states in the memory of a node: whole JSON documents, and no more than their limits."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from deepvm.errors import StoreError, StoreUnavailable
from deepvm.memnode import MemoryNode
from deepvm.memnode.errors import RequestRefused
from deepvm.memnode.storage.budgets import STATE_BYTES, KeptDocuments
from deepvm.memnode.storage.rank_states import MOST_BYTES, MOST_PARSED_BYTES, RankStates, check
from deepvm.protocol.frames import MOST_DOCUMENT_BYTES, Kind
from tests.support.memnode.client import BLOCK, Client


@pytest.fixture
def client(node: MemoryNode, connect: Callable[..., Client]) -> Client:
    found = connect(node.address, "run", timeout_s=30)
    found.begin(1, BLOCK, world_size=4)
    return found


@pytest.mark.parametrize("state", [b'"no end', b'"two" "strings"', b"{", b"NaN", b"", b'"\\x"'])
def test_a_state_that_is_not_one_json_document_is_refused_by_its_rank(client: Client, state: bytes) -> None:
    with pytest.raises(StoreError, match="rank 3"):
        client.ask(Kind.EXTRA, {"step": 1, "rank": 3}, state)
    client.ask(Kind.EXTRA, {"step": 1, "rank": 3}, b"{}")  # and may come again


def test_a_state_larger_than_one_rank_may_have_is_refused_with_the_limit(client: Client) -> None:
    with pytest.raises(StoreError, match=f"{MOST_BYTES} are allowed"):
        client.ask(Kind.EXTRA, {"step": 1, "rank": 0}, json.dumps("x" * MOST_BYTES).encode())


def test_a_state_for_which_no_memory_is_left_leaves_those_that_were_taken(client: Client) -> None:
    large = json.dumps("x" * (MOST_BYTES - 100)).encode()
    client.ask(Kind.EXTRA, {"step": 1, "rank": 0}, large)
    with pytest.raises(StoreUnavailable, match="rank 1's own state takes"):
        client.ask(Kind.EXTRA, {"step": 1, "rank": 1}, large)
    for rank in (2, 3):
        client.ask(Kind.EXTRA, {"step": 1, "rank": rank}, b"1")
    with pytest.raises(StoreUnavailable, match="1 of 4 ranks"):
        client.ask(Kind.EXTRAS, {"step": 1, "world_size": 4, "timeout_s": 0.05})
    client.ask(Kind.EXTRA, {"step": 1, "rank": 1}, b"1")
    body = client.ask(Kind.EXTRAS, {"step": 1, "world_size": 4, "timeout_s": 1})[2]
    assert json.loads(body) == [json.loads(large), 1, 1, 1]


def test_a_state_may_have_exactly_what_is_allowed() -> None:
    check(0, b'"' + b"x" * (MOST_BYTES - 2) + b'"')
    check(0, b"1" + b" " * (MOST_PARSED_BYTES - 1))
    with pytest.raises(RequestRefused, match="rank 5's own state cannot be taken"):
        check(5, b"1" + b" " * MOST_PARSED_BYTES)
    with pytest.raises(RequestRefused, match="rank 5's own state cannot be taken"):
        check(5, b"[" + b"1," * 20_000 + b"1]")


def test_all_states_together_fit_into_one_document() -> None:
    kept = KeptDocuments(2**40)
    states = RankStates(kept)
    half = MOST_DOCUMENT_BYTES // 2
    states.add(1, bytes(half))
    with pytest.raises(RequestRefused, match=f"exceed {MOST_DOCUMENT_BYTES} bytes in all"):
        states.add(0, bytes(MOST_DOCUMENT_BYTES - half - 3))  # two brackets, two commas at most
    states.add(0, bytes(MOST_DOCUMENT_BYTES - half - 4))
    assert len(states) == 2
    assert len(states.as_list()) <= MOST_DOCUMENT_BYTES
    assert kept.used_bytes == 2 * (MOST_DOCUMENT_BYTES - 4) + 2 * STATE_BYTES
    states.clear()
    assert (kept.used_bytes, len(states), states.as_list()) == (0, 0, b"[]")


def test_a_state_that_comes_again_takes_the_place_of_the_first() -> None:
    kept = KeptDocuments(2**20)
    states = RankStates(kept)
    states.add(1, b"[1, 2, 3]")
    states.add(0, b"null")
    assert states.as_list() == b"[null,[1, 2, 3]]"
    states.add(1, b"4")
    assert states.as_list() == b"[null,4]"
    assert kept.used_bytes == 2 * 5 + 2 * STATE_BYTES
