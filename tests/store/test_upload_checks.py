"""What a writer may put and publish."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deepvm.errors import DeepvmError
from deepvm.store.chunks import UploadCheck, check_length, read_manifest, verify_chunk
from tests.support.store.checkpoints import manifest_of, payload

DATA = payload(250)
MANIFEST = manifest_of(DATA, "run-a", 1, chunk_bytes=100)


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
