"""docs/protocol.md says what the code does: its numbers are read here, and small promises of it are kept."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepvm.errors import AccessDenied, StoreError
from deepvm.memnode import Limits, MemoryNode
from deepvm.memnode.serving.fields import MOST_TIMEOUT_S
from deepvm.memnode.storage.dedup import MOST_FALSE, MOST_OFFERED
from deepvm.protocol import frames
from deepvm.protocol.frames import Kind
from deepvm.protocol.sockets import LEAST_BYTES_PER_S
from tests.support import ROOT
from tests.support.memnode.client import BLOCK, Client, content, manifest_of

PAGE = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
SIZE = 2 * BLOCK + 5


def test_the_page_names_every_kind_by_its_number() -> None:
    line = PAGE[PAGE.index("Kinds: ") : PAGE.index("A header that breaks")]
    assert {name: int(number) for name, number in re.findall(r"([A-Z]+) (\d+)", line)} == {k.name: int(k) for k in Kind}


def test_the_page_names_version_magic_and_errors() -> None:
    assert PAGE.startswith(f"# The memory node's protocol, version {frames.VERSION}\n")
    assert f"| 4 | magic | `{frames.MAGIC.decode()}` |" in PAGE
    errors = PAGE[PAGE.index("## Errors") : PAGE.index("## Limits")]
    assert set(re.findall(r"^\| `([a-z-]+)` \|", errors, re.M)) == set(frames._ERRORS)


def test_the_page_names_the_limits_as_they_are() -> None:
    limits, text = Limits(), " ".join(PAGE.split())
    for words in (
        f"at most {frames.MOST_META_BYTES // 2**10} KiB",
        f"at most {frames.MOST_BLOCK_BYTES // 2**20} MiB for MEND, {frames.MOST_PUT} times",
        f"{frames.MOST_DOCUMENT_BYTES // 2**20} MiB for KEEP",
        f"Connections: {limits.connections} of clients",
        f"{limits.connections_of_a_host} of them from one host",
        f"{limits.handshakes} that are shaking hands, for {limits.handshake_s:g} s",
        f"{limits.runs:,} runs",
        f"{limits.frame_s:g} s for a frame that has begun, and {1e6 / LEAST_BYTES_PER_S:g} s more for each MB",
        f"{limits.idle_s / 3600:g} h of silence",
        f"{limits.documents_bytes // 2**20} MiB of all clients together",
        f"{limits.document_piece_s:g} s for each MiB",
        f"or {limits.upload_idle_s:g} s in which nobody touches it",
        f"N at most {MOST_OFFERED}",
    ):
        assert words in text, words
    assert (MOST_TIMEOUT_S, MOST_FALSE) == (3600.0, 8)  # "at most an hour", "after eight wrong proofs"


def test_nonces_are_fresh_for_every_connection(node: MemoryNode, connect: Callable[..., Client]) -> None:
    nonces = [connect(node.address).node_nonce for _ in range(20)]
    assert len(set(nonces)) == 20
    assert all(re.fullmatch("[0-9a-f]{64}", nonce) for nonce in nonces)


def test_fields_that_are_not_known_are_ignored(node: MemoryNode, connect: Callable[..., Client]) -> None:
    client = connect(node.address, "run")
    client.begin(1, SIZE, tomorrow="something new")
    client.save_chunks(1, content(1, SIZE))
    client.publish(manifest_of(content(1, SIZE), "run", 1))
    assert client.read(1) == content(1, SIZE)


def test_requests_are_answered_in_order_before_the_next_is_awaited(start_node: Any, connect: Any) -> None:
    client = connect(start_node(token="t").address, "run", token="t")
    client.send(b"".join(client.head_of(Kind.STEPS if n % 2 else Kind.RUNS, {}) for n in range(10)))
    assert ["steps" in client.answer()[1] for _ in range(10)] == [False, True] * 5


def test_what_is_malformed_is_answered_with_request_0_and_the_end(node: MemoryNode, connect: Any) -> None:
    client = connect(node.address, "run")
    client.send(client.head_of(Kind.BEGIN, {"step": True}))
    header = frames.decode_header(client.exactly(frames.HEADER.size))
    assert (header.kind, header.request) == (Kind.ERROR, 0)
    client.exactly(header.meta_bytes)
    assert client.sock.recv(1) == b""


def test_a_document_whose_digest_is_wrong_is_corrupt_and_the_connection_continues(
    start_node: Any, connect: Any
) -> None:
    for token in (None, "t"):
        client = connect(start_node(token=token).address, "run", token=token)
        client.begin(1, SIZE)
        body = b'{"a": 1}'
        client.send_document(Kind.EXTRA, {"step": 1, "rank": 0}, body, tagged=body, digest=4711)
        with pytest.raises(StoreError, match="its digest differs"):
            frames.raise_error(client.answer()[1])
        client.save_chunks(1, content(1, SIZE))
        client.publish(manifest_of(content(1, SIZE), "run", 1))
        assert client.steps() == {1: "remote"}


def test_chunks_that_are_refused_leave_a_tagged_connection_whole(start_node: Any, connect: Any) -> None:
    client = connect(start_node(token="t").address, "run", token="t")
    client.begin(1, SIZE)
    parts = dict(enumerate([content(1, SIZE)[:BLOCK], content(1, SIZE)[BLOCK : 2 * BLOCK]]))
    with pytest.raises(StoreError, match="its digest differs"):
        client.puts(1, parts, {0: 4711})
    client.puts(1, parts)
    with pytest.raises(StoreError, match=r"bytes, .* were sent"):
        client.puts(1, {0: parts[0], 1: b"short"})
    with pytest.raises(StoreError):
        client.put(1, 77, parts[0])
    client.put(1, 2, content(1, SIZE)[2 * BLOCK :])
    client.publish(manifest_of(content(1, SIZE), "run", 1))
    assert client.read(1) == content(1, SIZE)


def test_a_run_may_be_opened_again_and_another_after_it(node: MemoryNode, connect: Callable[..., Client]) -> None:
    client = connect(node.address, "one")
    client.save(1, content(1, SIZE))
    client.open_run("two")
    client.save(2, content(2, SIZE))
    client.open_run("one")
    assert client.steps() == {1: "remote"}


def test_a_publish_that_is_sent_again_is_answered_with_ok(node: MemoryNode, connect: Callable[..., Client]) -> None:
    client = connect(node.address, "run")
    client.save(1, content(1, SIZE))
    client.publish(manifest_of(content(1, SIZE), "run", 1))
    assert client.read(1) == content(1, SIZE)


def test_a_delete_of_what_is_not_there_is_answered_with_ok(node: MemoryNode, connect: Callable[..., Client]) -> None:
    client = connect(node.address, "run")
    client.ask(Kind.DELETE, {"step": 7})
    assert client.steps() == {}


def test_steps_are_ascending_and_the_last_600(start_node: Any, connect: Callable[..., Client]) -> None:
    node = start_node(buffers=610, capacity_bytes=700 * BLOCK)
    client = connect(node.address, "run")
    for step in reversed(range(605)):
        client.save(step, b"x")
    steps = list(client.steps())
    assert steps == sorted(steps)
    assert len(steps) == 600
    assert steps[-1] == 604


def test_a_node_tells_whether_checkpoints_become_more_than_remote(
    start_node: Any, connect: Callable[..., Client], tmp_path: Path
) -> None:
    for fields, expected in (({}, False), ({"spill": tmp_path}, True)):
        answer = connect(start_node(**fields).address, "run").ask(Kind.STEPS)[1]
        assert answer == {"steps": [], "writes_on": expected, "version": 0}


def test_a_node_holds_an_answer_back_until_the_list_or_a_state_changes(
    start_node: Any, connect: Callable[..., Client], tmp_path: Path
) -> None:
    node = start_node(spill=tmp_path)
    writer, reader = connect(node.address, "run"), connect(node.address, "run")
    version = reader.ask(Kind.STEPS)[1]["version"]
    seen = []
    reader.send(reader.head_of(Kind.STEPS, {"after": version, "timeout_s": 60}))
    writer.save(1, content(1, SIZE))
    while (answer := reader.answer()[1])["steps"][0]["state"] != "spilled":
        seen.append(answer["version"])
        reader.send(reader.head_of(Kind.STEPS, {"after": answer["version"], "timeout_s": 60}))
    reader.send(reader.head_of(Kind.STEPS, {"after": answer["version"], "timeout_s": 60}))
    writer.ask(Kind.DELETE, {"step": 1})
    last = reader.answer()[1]
    assert last["steps"] == []
    assert version < seen[0] < answer["version"] < last["version"]


def test_a_node_answers_at_once_if_the_list_has_changed_and_after_the_timeout_if_not(
    node: MemoryNode, connect: Callable[..., Client]
) -> None:
    client = connect(node.address, "run")
    client.save(1, content(1, SIZE))
    version = client.ask(Kind.STEPS, {"after": 0, "timeout_s": 60})[1]["version"]
    assert client.ask(Kind.STEPS, {"after": version, "timeout_s": 0.01})[1]["version"] == version


def test_a_verifier_is_not_readable_on_the_wire_where_there_is_a_token(start_node: Any, connect: Any) -> None:
    node = start_node(token="t")
    client = connect(node.address, token="t")
    verifier = frames.run_verifier("run", "key")
    hidden = frames.masked(verifier, "t", client.node_nonce, client.client_nonce)
    assert hidden != verifier
    with pytest.raises(AccessDenied):
        client.ask(Kind.OPEN, {"run": "run", "session": "s", "write": True, "proof": "", "verifier": ""})
    client.open_run("run")
    client.save(1, content(1, SIZE))
    other = connect(node.address, token="t")
    with pytest.raises(AccessDenied):
        other.ask(Kind.OPEN, {"run": "run", "session": "s", "write": True, "verifier": hidden})
