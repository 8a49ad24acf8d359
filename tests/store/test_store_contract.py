"""What every store must do, tried on each of them."""

from __future__ import annotations

import dataclasses
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deepvm.errors import Corrupt, NotFound, StoreError, UsageError
from deepvm.policy import Retention
from deepvm.store import Store
from deepvm.store.files.store import FileStore
from deepvm.store.verify import copy, export, verify
from tests.support.store.checkpoints import CHUNK, manifest_of, payload, put, read, safetensors_payload, save
from tests.support.store.places import Place

SIZES = [1, 7, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 13]


@pytest.mark.parametrize("size_bytes", SIZES)
def test_what_was_saved_is_read_back(place: Place, store: Store, size_bytes: int) -> None:
    data = payload(size_bytes)
    saved = save(store, data)
    other = place.open()
    try:
        found = other.manifest("run-a", 1)
        assert (found.size_bytes, list(found.digests)) == (size_bytes, list(saved.digests))
        assert read(other) == data
        assert (other.runs(), other.steps("run-a")) == (["run-a"], [1])
    finally:
        other.close()


def test_chunks_come_in_any_order_from_many_threads_and_in_pieces(store: Store) -> None:
    data = payload(23 * CHUNK + 5)
    save(store, data, threads=4, shuffle=True, pieces=5)
    assert read(store) == data


def test_chunks_are_read_by_many_threads(store: Store) -> None:
    data = payload(23 * CHUNK + 5)
    manifest = save(store, data)
    out = memoryview(bytearray(len(data)))

    def fetch(chunk: int) -> None:
        offset, length = manifest.span(chunk)
        store.read_chunk(manifest, chunk, out[offset : offset + length])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(fetch, range(len(manifest.digests))))
    assert out == data


def test_the_manifest_keeps_its_facts(store: Store) -> None:
    data = payload(100)
    manifest = manifest_of(data, "run-a", 3, world_size=3, facts={"torch": "2.13", "names": ["model", "ü"]})
    writer = store.writer("run-a", 3, size_bytes=100, chunk_bytes=CHUNK)
    put(writer, data, manifest, [0])
    writer.publish(manifest)
    found = store.manifest("run-a", 3)
    assert (found.world_size, dict(found.facts)) == (3, dict(manifest.facts))


@pytest.mark.parametrize("change", ["its run", "its step", "a digest"])
def test_a_manifest_that_speaks_of_other_bytes_is_not_published(store: Store, change: str) -> None:
    data = payload(2 * CHUNK)
    manifest = manifest_of(data, "run-a", 1)
    writer = store.writer("run-a", 1, size_bytes=len(data), chunk_bytes=CHUNK)
    put(writer, data, manifest, [0, 1])
    other = {
        "its run": manifest_of(data, "run-b", 1),
        "its step": manifest_of(data, "run-a", 2),
        "a digest": dataclasses.replace(manifest, digests=[manifest.digests[0], 5]),
    }[change]
    with pytest.raises(StoreError):
        writer.publish(other)
    writer.abort()
    assert [store.steps(run) for run in ("run-a", "run-b")] == [[], []]


@pytest.mark.parametrize(("step", "size_bytes", "chunk_bytes"), [(-1, 10, CHUNK), (1, 0, CHUNK), (1, 10, 0)])
def test_a_checkpoint_that_cannot_be_is_not_begun(store: Store, step: int, size_bytes: int, chunk_bytes: int) -> None:
    with pytest.raises(StoreError):
        store.writer("run-a", step, size_bytes=size_bytes, chunk_bytes=chunk_bytes)
    assert store.runs() == []


@pytest.mark.parametrize("length", [0, CHUNK - 1, CHUNK + 1])
def test_a_chunk_is_not_read_into_memory_of_another_length(store: Store, length: int) -> None:
    manifest = save(store, payload(2 * CHUNK))
    with pytest.raises(ValueError, match="bytes"):
        store.read_chunk(manifest, 0, memoryview(bytearray(length)))


def test_nothing_is_visible_before_publish(place: Place, store: Store) -> None:
    data = payload(2 * CHUNK)
    manifest = manifest_of(data, "run-a", 1)
    writer = store.writer("run-a", 1, size_bytes=len(data), chunk_bytes=CHUNK)
    put(writer, data, manifest, [0, 1])
    other = place.open()
    try:
        assert other.steps("run-a") == []
        with pytest.raises(NotFound):
            other.manifest("run-a", 1)
        writer.publish(manifest)
        assert other.steps("run-a") == [1]
    finally:
        other.close()
        writer.abort()  # harmless after publish
    assert store.steps("run-a") == [1]


@pytest.mark.parametrize("chunks", [0, 1, 2])
def test_abort_leaves_nothing(place: Place, store: Store, chunks: int) -> None:
    data = payload(3 * CHUNK)
    manifest = manifest_of(data, "run-a", 1)
    writer = store.writer("run-a", 1, size_bytes=len(data), chunk_bytes=CHUNK)
    put(writer, data, manifest, range(chunks))
    writer.abort()
    writer.abort()
    with pytest.raises(StoreError):
        writer.publish(manifest)
    assert store.steps("run-a") == []
    assert place.everything() == []


def test_abort_of_a_second_save_keeps_the_first(store: Store) -> None:
    first, second = payload(3 * CHUNK, 1), payload(3 * CHUNK, 2)
    save(store, first)
    writer = store.writer("run-a", 1, size_bytes=len(second), chunk_bytes=CHUNK)
    put(writer, second, manifest_of(second, "run-a", 1), [0, 1, 2])
    writer.abort()
    assert read(store) == first


def test_an_incomplete_checkpoint_cannot_be_published(store: Store) -> None:
    data = payload(3 * CHUNK)
    manifest = manifest_of(data, "run-a", 1)
    writer = store.writer("run-a", 1, size_bytes=len(data), chunk_bytes=CHUNK)
    put(writer, data, manifest, [0, 2])
    with pytest.raises(StoreError):
        writer.publish(manifest)
    writer.abort()
    assert store.steps("run-a") == []


def test_chunks_of_wrong_length_or_number_are_refused(store: Store) -> None:
    writer = store.writer("run-a", 1, size_bytes=CHUNK + 1, chunk_bytes=CHUNK)
    for chunk, length in ((0, CHUNK - 1), (1, 2), (2, 1), (-1, 1)):
        with pytest.raises(StoreError):
            writer.put(chunk, [memoryview(bytes(length))], 0)
    writer.abort()


@pytest.mark.parametrize("offset", [0, CHUNK, 2 * CHUNK + 4])
def test_a_changed_byte_is_found(place: Place, store: Store, offset: int) -> None:
    data = payload(2 * CHUNK + 5)
    manifest = save(store, data)
    place.flip("run-a", 1, offset)
    bad = offset // CHUNK
    for chunk in range(3):
        into = memoryview(bytearray(manifest.span(chunk)[1]))
        if chunk == bad:
            with pytest.raises(Corrupt, match=str(bad)):
                store.read_chunk(manifest, chunk, into)
        else:
            store.read_chunk(manifest, chunk, into)


def test_a_step_saved_again_has_the_new_bytes(store: Store) -> None:
    save(store, payload(3 * CHUNK, 1))
    longer = payload(4 * CHUNK + 9, 2)
    save(store, longer)
    assert read(store) == longer
    shorter = payload(11, 3)
    save(store, shorter)
    assert read(store) == shorter
    assert store.steps("run-a") == [1]


def test_steps_ascend_and_deletion_removes_one(place: Place, store: Store) -> None:
    for step in (5, 30, 0, 200):
        save(store, payload(100, step), step=step)
    assert store.steps("run-a") == [0, 5, 30, 200]
    store.delete("run-a", 30)
    store.delete("run-a", 30)
    store.delete("run-b", 1)
    assert store.steps("run-a") == [0, 5, 200]
    with pytest.raises(NotFound):
        store.manifest("run-a", 30)
    for step in (0, 5, 200):
        assert read(store, step=step) == payload(100, step)
        store.delete("run-a", step)
    assert (store.steps("run-a"), store.runs()) == ([], [])
    store.close()
    assert place.everything() == []


def test_runs_do_not_mix(store: Store) -> None:
    one, two = payload(CHUNK + 1, 1), payload(CHUNK + 1, 2)
    save(store, one, "run-a", 1)
    save(store, two, "run-a.b", 1)
    assert (read(store, "run-a"), read(store, "run-a.b")) == (one, two)
    store.delete("run-a", 1)
    assert (store.runs(), read(store, "run-a.b")) == (["run-a.b"], two)


def test_what_is_not_there_is_not_found(store: Store) -> None:
    assert (store.runs(), store.steps("run-a")) == ([], [])
    with pytest.raises(NotFound, match="run-a"):
        store.manifest("run-a", 1)
    data = payload(10)
    manifest = save(store, data)
    with pytest.raises(NotFound):
        store.manifest("run-a", 2)
    store.delete("run-a", 1)
    with pytest.raises(NotFound):
        store.read_chunk(manifest, 0, memoryview(bytearray(10)))


@pytest.mark.parametrize("run", ["", "../up", "a/b", ".hidden", "x" * 101])
def test_names_that_are_no_runs_are_refused(store: Store, run: str) -> None:
    with pytest.raises(UsageError):
        store.steps(run)
    with pytest.raises(UsageError):
        store.writer(run, 1, size_bytes=1, chunk_bytes=CHUNK)


def test_two_checkpoints_are_written_at_once(store: Store) -> None:
    data = {step: payload(4 * CHUNK + step, step) for step in (1, 2, 3)}
    threads = [threading.Thread(target=save, args=(store, data[s]), kwargs={"step": s}) for s in data]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert store.steps("run-a") == [1, 2, 3]
    assert all(read(store, step=s) == data[s] for s in data)


@pytest.mark.chaos
def test_a_thousand_saves_with_retention_leave_no_growth(
    place: Place, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # growth is looked for, and disks take minutes for 5,000 of them
    retention, saves = Retention(keep_last=2), 1000 if place.name in ("files", "memory") else 50  # others are slower
    seen: list[str] = []
    for step in range(saves):
        save(store, payload(50 + step % 7, step), step=step)
        for old in retention.expired(store.steps("run-a")):
            store.delete("run-a", old)
        if step == 20:
            seen = place.everything()
    assert store.steps("run-a") == [saves - 2, saves - 1]
    assert len(place.everything()) == len(seen)
    assert read(store, step=saves - 1) == payload(50 + (saves - 1) % 7, saves - 1)


def test_a_checkpoint_is_verified_and_copied_whole(place: Place, store: Store, tmp_path: Path) -> None:
    data = safetensors_payload()
    save(store, data, step=7)
    lengths: list[int] = []
    found = verify(store, "run-a", 7, progress=lengths.append)
    assert (found.good, found.size_bytes, found.chunks) == (True, len(data), -(-len(data) // CHUNK))
    assert sum(lengths) == len(data)
    target = FileStore(tmp_path / "copy")
    copy(store, target, "run-a", 7)
    assert read(target, step=7) == data
    export(store, "run-a", 7, tmp_path / "plain.safetensors")
    assert (tmp_path / "plain.safetensors").read_bytes() == data
    assert sorted(p.name for p in tmp_path.glob("*plain*")) == ["plain.safetensors"]

    place.flip("run-a", 7, 3 * CHUNK)
    found = verify(store, "run-a", 7)
    assert (found.good, [b.chunk for b in found.chunks_bad]) == (False, [3])
    with pytest.raises(Corrupt):
        copy(store, target, "run-a", 7)
    with pytest.raises(Corrupt):
        export(store, "run-a", 7, tmp_path / "bad.safetensors")
    assert not list(tmp_path.glob("*bad*"))
    assert read(target, step=7) == data  # the copy made before is as it was
    assert len(list((tmp_path / "copy" / "run-a").iterdir())) == 2


def test_a_checkpoint_is_copied_into_every_store(store: Store, tmp_path: Path) -> None:
    source, data = FileStore(tmp_path / "source"), payload(9 * CHUNK + 1)
    save(source, data, step=3)
    copy(source, store, "run-a", 3)
    assert read(store, step=3) == data


def test_capabilities_agree_with_what_the_store_does(store: Store) -> None:
    data = payload(3 * CHUNK + 5)
    manifest = save(store, data)
    assert store.parallel_reads is None or store.parallel_reads > 0
    assert (store.origin(manifest), store.is_prefetched(manifest)) == (store.url, False)
    nodes = store.memory_nodes()
    assert nodes is None or (nodes.url == store.url and not store.durable)
    mapped = store.map(manifest)
    assert mapped is None or mapped.view == data
