"""What a writer may put and publish."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from deepvm.errors import Corrupt, DeepvmError
from deepvm.store.base import (
    MOST_CHUNK_BYTES,
    MOST_CREATED_S,
    MOST_FACTS,
    MOST_FACTS_DEPTH,
    MOST_NODES,
    MOST_STEP,
    MOST_WORLD_SIZE,
    PART_OF,
    Manifest,
)
from deepvm.store.chunks import UploadCheck, check_length, read_manifest, verify_chunk
from tests.support.store.checkpoints import manifest_of, payload

DATA = payload(250)
MANIFEST = manifest_of(DATA, "run-a", 1, chunk_bytes=100)


def deep(levels: int) -> list[Any]:
    """Lists within lists."""
    found: list[Any] = []
    for _ in range(levels - 1):
        found = [found]
    return found


def full() -> UploadCheck:
    check = UploadCheck("run-a", 1, 250, 100)
    for chunk, digest in enumerate(MANIFEST.digests):
        check.put(chunk, digest)
    return check


@pytest.mark.parametrize(("step", "size", "chunk"), [(-1, 1, 1), (0, 0, 1), (0, 1, 0), (0, -1, 1), (0, 1, -1)])
def test_sizes_that_no_checkpoint_has(step: int, size: int, chunk: int) -> None:
    with pytest.raises(DeepvmError, match="checkpoint"):
        UploadCheck("run-a", step, size, chunk)
    UploadCheck("run-a", 0, 1, 1)


def test_a_chunk_has_its_place_and_length() -> None:
    check = full()
    assert [check.span(0, 100), check.span(1, 100), check.span(2, 50)] == [0, 100, 200]
    for chunk, length in ((-1, 100), (3, 50), (2, 100), (2, 49), (0, 101)):
        with pytest.raises(DeepvmError, match="chunk"):
            check.span(chunk, length)


def test_a_manifest_has_to_speak_of_what_was_put() -> None:
    full().check(MANIFEST)
    for other in (replace(MANIFEST, run="run-b"), replace(MANIFEST, step=2)):
        with pytest.raises(DeepvmError, match="cannot be published"):
            full().check(other)
    check = UploadCheck("run-a", 1, 250, 100)
    check.put(0, MANIFEST.digests[0])
    with pytest.raises(DeepvmError, match="2 of 3 chunks were never put, the first is 1"):
        check.check(MANIFEST)
    check = full()
    check.put(1, 5)
    with pytest.raises(DeepvmError, match="digest of chunk 1"):
        check.check(MANIFEST)


def test_a_buffer_has_to_fit_its_chunk() -> None:
    assert check_length(MANIFEST, 2, memoryview(bytearray(50))) == 200
    for length in (49, 51):
        with pytest.raises(ValueError, match="50 bytes"):
            check_length(MANIFEST, 2, memoryview(bytearray(length)))


def test_bytes_and_manifests_of_another_place_are_corrupt() -> None:
    verify_chunk(MANIFEST, 0, memoryview(DATA)[:100], "here")
    with pytest.raises(DeepvmError, match="not what was saved"):
        verify_chunk(MANIFEST, 0, memoryview(DATA)[100:200], "here")
    assert read_manifest(MANIFEST.to_bytes(), "run-a", 1, "here").to_bytes() == MANIFEST.to_bytes()
    for run, step in (("run-b", 1), ("run-a", 2)):
        with pytest.raises(DeepvmError, match="run-a step 1"):
            read_manifest(MANIFEST.to_bytes(), run, step, "here")
    with pytest.raises(DeepvmError, match="use another step"):
        read_manifest(b"{", "run-a", 1, "here")


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"step": 0}, {"step": -1}),
        ({"step": MOST_STEP}, {"step": MOST_STEP + 1}),
        ({"created_s": 0.0}, {"created_s": -1.0}),
        ({"created_s": MOST_CREATED_S}, {"created_s": MOST_CREATED_S * 2}),
        ({"world_size": MOST_WORLD_SIZE}, {"world_size": MOST_WORLD_SIZE + 1}),
        ({"world_size": 1}, {"world_size": 0}),
        ({"nodes": ("n:1",) * MOST_NODES}, {"nodes": ("n:1",) * (MOST_NODES + 1)}),
        ({"nodes": ("n" * 300,)}, {"nodes": ("n" * 301,)}),
        ({"nodes": ("n",)}, {"nodes": ("",)}),
        ({"nodes": ("a", "b"), "replicas": 2}, {"nodes": ("a", "b"), "replicas": 3}),
        ({"replicas": 1}, {"replicas": 0}),
        ({"run": "a" * 100}, {"run": "a" * 101}),
        ({"facts": {"a": deep(MOST_FACTS_DEPTH)}}, {"facts": {"a": deep(MOST_FACTS_DEPTH + 1)}}),
        ({"facts": {PART_OF: deep(MOST_FACTS_DEPTH + 1)}}, {"facts": {PART_OF: deep(MOST_FACTS_DEPTH + 2)}}),
        ({"digests": MANIFEST.digests}, {"digests": MANIFEST.digests[:-1]}),
        ({"chunk_bytes": 100}, {"chunk_bytes": MOST_CHUNK_BYTES + 1, "digests": [1]}),
    ],
)
def test_a_manifest_that_can_be_made_can_be_read_and_no_other_is_made(
    good: dict[str, Any], bad: dict[str, Any]
) -> None:
    made = replace(MANIFEST, **good)
    assert Manifest.from_bytes(made.to_bytes()).to_bytes() == made.to_bytes()
    with pytest.raises(DeepvmError):
        replace(MANIFEST, **bad)


def test_facts_are_an_object_with_a_limited_number_of_values() -> None:
    replace(MANIFEST, facts={"a": [0] * (MOST_FACTS - 2)})
    with pytest.raises(DeepvmError):
        replace(MANIFEST, facts={"a": [0] * (MOST_FACTS + 1)})
    with pytest.raises(DeepvmError, match=r"a manifest.s facts are .*, not an object"):
        replace(MANIFEST, facts=[])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format", "deepvm-checkpoint/2"),
        ("digests", "0" * 47),
        ("digests", " ".join(["0" * 16] * 3)),
        ("digests", "x" * 48),
        ("digests", 5),
        ("nodes", {}),
        ("facts", []),
        ("created_s", "now"),
    ],
)
def test_a_document_with_another_value_is_no_manifest(field: str, value: object) -> None:
    document = json.loads(MANIFEST.to_bytes())
    Manifest.from_bytes(json.dumps(document).encode())
    with pytest.raises(Corrupt, match="16 hexadecimal digits for each chunk" if field == "digests" else None):
        Manifest.from_bytes(json.dumps({**document, field: value}).encode())
    with pytest.raises(Corrupt, match="is missing"):
        Manifest.from_bytes(json.dumps({name: v for name, v in document.items() if name != field}).encode())
