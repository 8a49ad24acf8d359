"""Fields of frames: the largest and the smallest that are taken, and the next that is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from deepvm.memnode.serving import fields
from deepvm.memnode.storage.upload import Begin
from deepvm.protocol.frames import MOST_PUT, ProtocolError
from deepvm.protocol.placement import Share
from deepvm.store.base import MOST_CHUNKS, MOST_NODES, MOST_STEP, MOST_WORLD_SIZE
from deepvm.strict_json import MalformedJson
from tests.support.memnode.client import BLOCK

LEAST: dict[str, Any] = {"step": 0, "size_bytes": 1, "layout": "", "rank": 0, "world_size": 1}
MOST: dict[str, Any] = {
    "step": MOST_STEP, "size_bytes": MOST_CHUNKS * BLOCK, "layout": "l" * 1024, "rank": MOST_WORLD_SIZE - 1,
    "world_size": MOST_WORLD_SIZE, "nodes": MOST_NODES, "node_index": MOST_NODES - 1, "replicas": MOST_NODES,
    "attempt": MOST_STEP, "repair": True, "lean": True,
}  # fmt: skip


def test_a_begin_of_the_least_has_defaults() -> None:
    assert fields.begin(LEAST, BLOCK) == Begin(
        step=0, size_bytes=1, layout="", rank=0, world_size=1, share=Share(nodes=1, index=0, replicas=1), attempt=0,
        repair=False, partial_reservation=False,
    )  # fmt: skip


def test_a_begin_of_the_most_is_taken() -> None:
    found = fields.begin(MOST, BLOCK)
    assert (found.step, found.size_bytes, found.rank, found.attempt) == (
        MOST_STEP, MOST_CHUNKS * BLOCK, MOST_WORLD_SIZE - 1, MOST_STEP,
    )  # fmt: skip
    assert found.share == Share(nodes=MOST_NODES, index=MOST_NODES - 1, replicas=MOST_NODES)
    assert found.repair
    assert found.partial_reservation


@pytest.mark.parametrize("name", [name for name, value in MOST.items() if type(value) is int])
def test_a_begin_of_more_or_less_is_refused(name: str) -> None:
    with pytest.raises(MalformedJson, match=name):
        fields.begin({**MOST, name: MOST[name] + 1}, BLOCK)
    least = LEAST.get(name, {"nodes": 1, "replicas": 1}.get(name, 0))
    with pytest.raises(MalformedJson, match=name):
        fields.begin({**MOST, name: least - 1}, BLOCK)
    with pytest.raises(MalformedJson, match=name):
        fields.begin({**MOST, name: "1"}, BLOCK)


def test_a_rank_is_one_of_the_world_and_an_index_one_of_the_nodes() -> None:
    for change in (
        {"world_size": 4, "rank": 4},
        {"nodes": 3, "node_index": 3, "replicas": 1},
        {"nodes": 3, "node_index": 0, "replicas": 4},
        {"layout": "l" * 1025},
        {"repair": 1},
    ):
        with pytest.raises(MalformedJson):
            fields.begin({**MOST, **change}, BLOCK)


@pytest.mark.parametrize(
    ("read", "good", "bad"),
    [
        (fields.chunk, [0, MOST_CHUNKS - 1], [-1, MOST_CHUNKS, None, True]),
        (lambda meta: fields.step({"step": meta["chunk"]}), [0, MOST_STEP], [-1, MOST_STEP + 1, None]),
        (lambda meta: fields.run_name({"run": meta["chunk"]}), ["a", "a" * 100], ["", "a" * 101, "../a", 5, None]),
        (
            lambda meta: fields.hexadecimal({"nonce": meta["chunk"]}, "nonce"),
            ["0" * 64, "abcdef0123456789" * 4],
            ["0" * 63, "0" * 65, "A" * 64, "g" + "0" * 63, 5, None, ""],
        ),
    ],
)
def test_single_fields(read: Callable[[Any], Any], good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert read({"chunk": value}) == value
    for value in bad:
        with pytest.raises((MalformedJson, ProtocolError)):
            read({"chunk": value})


def test_an_optional_proof_may_be_empty_but_not_another_thing() -> None:
    assert fields.optional_hexadecimal({}, "proof") is None
    assert fields.optional_hexadecimal({"proof": ""}, "proof") is None
    assert fields.optional_hexadecimal({"proof": "0" * 64}, "proof") == "0" * 64
    with pytest.raises(ProtocolError, match="proof is not 64 hexadecimal digits"):
        fields.optional_hexadecimal({"proof": "0"}, "proof")


def test_lists_of_chunks_have_from_one_to_as_many_as_a_frame_takes() -> None:
    assert fields.chunks({"chunks": list(range(MOST_PUT))}) == list(range(MOST_PUT))
    for bad in ([], list(range(MOST_PUT + 1)), None, [1.0], {}):
        with pytest.raises((MalformedJson, ProtocolError)):
            fields.chunks({"chunks": bad})


def test_a_time_out_is_bounded_and_zero_without_one() -> None:
    assert fields.timeout_s({}) == 0
    assert fields.timeout_s({"timeout_s": 1.5}) == 1.5
    assert fields.timeout_s({"timeout_s": 1e300}) == 3600
    assert fields.timeout_s({"timeout_s": 5}, most_s=2.0) == 2.0
    with pytest.raises(MalformedJson):
        fields.timeout_s({"timeout_s": -0.1})
